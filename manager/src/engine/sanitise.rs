//! Cleaning the devices of a bundle, with evidence: each is reset and looked at, and what was seen goes into its history.

use vfio::reset::{self, Report, ResetError, Step};
use vfio::{Function, Inventory, PciAddress};

use super::carry::one_line;
use super::worker::Worker;
use crate::failure::{ErrorKind, Failure};
use crate::history::{self, Entry, Kind};
use crate::ledger::Ledger;

/// What is done to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// It is reset: one that cannot be is not clean.
    Reset,
    /// It is reset where that can be done: a person has looked at it.
    ResetIfPossible,
}

/// A device that is not clean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dirty {
    /// Why, for a person.
    pub reason: String,
    /// A store into it has not returned.
    pub stuck: bool,
}

/// How devices are cleaned, and what for.
#[derive(Clone, Debug)]
pub struct Cleaning {
    /// What is done to each.
    pub how: How,
    /// Why, for their histories: key and value each (`claim`, `epoch`).
    pub occasion: Vec<(&'static str, String)>,
    /// Which devices they are: one that does not answer has no serial number to be read.
    pub ledger: Ledger,
}

/// Cleans the devices of a bundle, the one it is about first, and says what was done to that one.
///
/// # Errors
/// The first that is not clean. Those after it were not touched.
pub fn clean(worker: &Worker, devices: &[PciAddress], cleaning: &Cleaning) -> Result<String, Dirty> {
    let inventory = Inventory::observe(worker.host(), 0);
    let mut done = Vec::new();
    for device in devices.iter().rev() {
        let Some(function) = inventory.devices.get(device) else {
            return Err(Dirty { reason: format!("{device} has left the host"), stuck: false });
        };
        done.push(clean_one(worker, (function, devices), cleaning)?);
    }
    Ok(done.into_iter().next().unwrap_or_default())
}

fn clean_one(worker: &Worker, (function, bundle): (&Function, &[PciAddress]), cleaning: &Cleaning) -> Result<String, Dirty> {
    let (host, deadlines) = (worker.host(), worker.deadlines());
    // After a boot the host's driver has it: it was initialised anew, and must not be reset below that driver. What others gave to VFIO
    // is theirs (P75).
    let record = cleaning.ledger.record_of(function);
    let is_reset = record.is_some() && function.is_on_vfio() && (cleaning.how == How::Reset || reset::way(function, bundle).is_ok());
    let report = if is_reset { reset::reset(host, deadlines, (function, bundle)) } else { reset::check(host, deadlines, function) };
    let (kind, text) = match &report.outcome {
        Ok(()) => (if is_reset { Kind::Sanitised } else { Kind::Checked }, summary(&report)),
        Err(error) => (Kind::Reset, format!("not clean: {} {}", function.address, said(error))),
    };
    let mut entry = Entry::new(kind, &text).with("address", function.address);
    for (key, value) in &cleaning.occasion {
        entry = entry.with(key, value);
    }
    let identity = record.map_or(&function.identity, |record| &record.identity);
    history::append(&worker.options.state_dir, identity, with_steps(entry, &report.steps));
    match report.outcome {
        Ok(()) => Ok(text),
        Err(error) => Err(Dirty { stuck: error.is_stuck(), reason: format!("{} {}", function.address, said(&error)) }),
    }
}

/// An entry with what was seen step by step: `step-01`, `step-02`, …
pub(super) fn with_steps(entry: Entry, steps: &[Step]) -> Entry {
    (1..).zip(steps).fold(entry, |entry, (number, step)| {
        entry.with(&format!("step-{number:02}"), format!("{}: {} ({} ms)", step.name, step.result, step.took.as_millis()))
    })
}

fn said(error: &ResetError) -> String {
    one_line(&Failure::of(ErrorKind::Internal, error))
}

fn summary(report: &Report) -> String {
    let took: u128 = report.steps.iter().map(|step| step.took.as_millis()).sum();
    let reset = report.steps.iter().find(|step| step.name == "reset");
    let how = reset.map_or_else(|| "not reset".to_owned(), |step| format!("reset ({})", step.result));
    format!("{how}, answers, regions in place, in {took} ms")
}
