//! Pausing units of the host that hold devices: only those that the configuration names, and never for longer than a job.

use std::time::Instant;

use vfio::{Deadlines, Holders, Host, Inventory, UnitAsk};

use super::carry::one_line;
use super::worker::Worker;
use crate::apply::ApplyError;
use crate::failure::{ErrorKind, Failure};
use crate::journal::Journal;
use crate::plan::{Plan, Refusal};

/// Stops the units that are in the way of a plan, each in the journal first, and looks who holds its devices then. `paused` gets
/// those that are to be started again, also where it fails.
///
/// # Errors
/// A unit does not stop, or somebody else holds a device: nothing else is to be done then.
pub(super) fn pause(worker: &Worker, plan: &Plan, journal: &mut Journal, paused: &mut Vec<String>) -> Result<(), ApplyError> {
    if plan.pauses.is_empty() {
        return Ok(());
    }
    let failed = |error| ApplyError::Held(Box::new(Failure::of(ErrorKind::Held, &error).remedy("systemctl status says why")));
    for unit in plan.pauses.keys() {
        let deadline = || Instant::now() + worker.deadlines().unit;
        if !worker.host().unit_is_active(unit, deadline()).map_err(failed)? {
            continue;
        }
        journal.pause(unit)?;
        paused.push(unit.clone());
        worker.step(format!("pausing {unit}"), 0.0);
        worker.host().unit(&UnitAsk::Stop(unit.clone()), deadline()).map_err(failed)?;
    }
    let inventory = Inventory::observe(worker.host(), 0);
    let devices = plan.devices();
    let held = Holders::of(worker.host(), devices.iter().filter_map(|device| inventory.devices.get(device))).found;
    match held.first().map(|holder| holder.device) {
        Some(device) => Err(ApplyError::Held(Box::new(Refusal::Held { device, holders: held, pausable: Vec::new() }.into()))),
        None => Ok(()),
    }
}

/// Starts units again that were paused. Each is tried; why some did not start is logged and given.
pub(super) fn resume(host: &Host, deadlines: &Deadlines, paused: &[String]) -> Vec<String> {
    let start = |unit: &String| host.unit(&UnitAsk::Start(unit.clone()), Instant::now() + deadlines.unit).err();
    let failed = paused.iter().filter_map(start).map(|error| Failure::of(ErrorKind::Internal, &error));
    let told = failed.map(|failure| format!("paused, and not started again: {}", one_line(&failure)));
    told.inspect(|failure| tracing::error!("{failure}")).collect()
}
