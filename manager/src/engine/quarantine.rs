//! Jobs that clean devices: a reset that somebody asks for, and the way out of quarantine.
//!
//! A device leaves its quarantine only where it answers; until the ledger says so it stays there, whatever becomes of the job.

use std::collections::BTreeMap;
use std::path::PathBuf;

use vfio::{Function, Identity, Inventory, Kind, PciAddress, rescan};

use super::carry::one_line;
use super::devices::observe;
use super::jobs::{Concern, Work};
use super::sanitise::{self, Cleaning, Dirty, How};
use super::stuck::{self, stuck_in};
use super::worker::{Outcome, Worker};
use super::{Engine, now};
use crate::failure::{ErrorKind, Failure};
use crate::history;
use crate::id::JobId;
use crate::ledger::{DeviceRecord, Ledger, Standing};
use crate::plan::{self, Refusal};
use crate::view::{EventKind, Subject};

/// Whether a device's bundle may be reset: it is in the pool and nobody's.
pub(super) fn admit_reset(engine: &mut Engine, device: PciAddress) -> Result<Concern, Failure> {
    engine.observe();
    let devices = engine.bundle_of(device);
    without_functions(engine, &devices, |_| true)?;
    free_of_others(engine, &devices)?;
    devices.iter().try_for_each(|device| in_pool(engine, *device))?;
    Ok(Concern { kind: "reset", devices, ..Concern::default() })
}

fn in_pool(engine: &Engine, device: PciAddress) -> Result<(), Failure> {
    let Some(function) = engine.inventory.devices.get(&device) else {
        return Err(Refusal::UnknownDevice { device }.into());
    };
    if let Some(quarantine) = engine.ledger.quarantines.get(&device) {
        return Err(Refusal::Quarantined { device, reason: quarantine.reason.clone() }.into());
    }
    if let Some((claim, record)) = engine.ledger.claim_on(device) {
        return Err(Refusal::Claimed { device, claim, machine: record.machine }.into());
    }
    let record = engine.ledger.record_of(function);
    if record.is_some_and(DeviceRecord::is_lent) {
        let failure = Failure::new(ErrorKind::NotSupported, format!("{device} is lent: its owner resets it"));
        return Err(failure.remedy("release it from there first"));
    }
    let is_ours = record.is_some_and(|record| record.standing == Standing::Active);
    if is_ours && plan::is_in_pool(function) {
        return Ok(());
    }
    let driver = function.driver.as_deref().unwrap_or("no driver");
    let message = format!("{device} is not in the pool: a reset below {driver} would take it from under that driver");
    Err(Failure::new(ErrorKind::Conflict, message).remedy(format!("`gpuward assign {device}` takes it into the pool")))
}

// What is done to a physical function takes its virtual ones with it.
fn without_functions(engine: &Engine, devices: &[PciAddress], is_touched: impl Fn(&Function) -> bool) -> Result<(), Failure> {
    let functions = devices.iter().filter_map(|device| engine.inventory.devices.get(device)).filter(|function| is_touched(function));
    let with_some = |function: &Function| function.sriov.clone().filter(|sriov| sriov.enabled > 0);
    match functions.into_iter().find_map(|function| Some((function.address, with_some(function)?))) {
        Some((device, sriov)) => Err(Refusal::LiveFunctions { device, count: sriov.enabled, functions: sriov.functions }.into()),
        None => Ok(()),
    }
}

// A device in use belongs to whoever uses it; one with a store that has not returned gets no other.
fn free_of_others(engine: &Engine, devices: &[PciAddress]) -> Result<(), Failure> {
    let functions = || devices.iter().filter_map(|device| engine.inventory.devices.get(device));
    // A reset of the bus is stored at the bridge above.
    let bridges = functions().filter_map(|function| function.bus_reset_at);
    if let Some(store) = stuck_in(&engine.options.host, &devices.iter().copied().chain(bridges).collect::<Vec<_>>()) {
        return Err(stuck::failure(&store));
    }
    let held = observe(&engine.options.host, &devices.iter().copied().collect(), &engine.inventory).holders;
    match held.into_iter().next() {
        Some((device, holders)) => Err(Refusal::Held { device, holders, pausable: engine.config.policy.pause_units.clone() }.into()),
        None => Ok(()),
    }
}

/// Resets a bundle of the pool. One that does not come back is in quarantine.
pub(super) fn begin_reset(engine: &mut Engine, job: JobId, device: PciAddress) -> Result<Work, Failure> {
    let devices = admit_reset(engine, device)?.devices;
    let cleaning = cleaning(engine, How::Reset, job);
    Ok(Box::new(move |worker: &Worker| {
        worker.step(format!("resetting {device}"), 0.1);
        match sanitise::clean(worker, &devices, &cleaning) {
            Ok(done) => {
                let told = |device: &PciAddress| (EventKind::Sanitised, Subject::Device(*device), detail(&done));
                Outcome { events: devices.iter().map(told).collect(), ..Outcome::done() }
            }
            Err(dirty) => keep_out(worker, &devices, dirty),
        }
    }))
}

fn cleaning(engine: &Engine, how: How, job: JobId) -> Cleaning {
    Cleaning { how, occasion: vec![("job", job.to_string())], ledger: engine.ledger.clone() }
}

/// Whether a device's bundle may leave its quarantine.
pub(super) fn admit_clearing(engine: &mut Engine, device: PciAddress) -> Result<Concern, Failure> {
    engine.observe();
    if !engine.ledger.quarantines.contains_key(&device) {
        let message = format!("{device} is not in quarantine");
        return Err(Failure::new(ErrorKind::Conflict, message).remedy("`gpuward quarantine list` shows those that are"));
    }
    let devices = engine.bundle_of(device);
    // Below a driver of the host it is looked at, and not reset.
    without_functions(engine, &devices, Function::is_on_vfio)?;
    free_of_others(engine, &devices)?;
    Ok(Concern { kind: "clear-quarantine", devices, ..Concern::default() })
}

/// Resets and looks at a bundle in quarantine, and lets it out where it is sound. One that has left the host is forgotten.
pub(super) fn begin_clearing(engine: &mut Engine, job: JobId, device: PciAddress) -> Result<Work, Failure> {
    let devices = admit_clearing(engine, device)?.devices;
    let present: Vec<_> = devices.iter().filter(|device| engine.inventory.devices.contains_key(device)).copied().collect();
    let cleaning = cleaning(engine, How::ResetIfPossible, job);
    Ok(Box::new(move |worker: &Worker| {
        worker.step(format!("looking whether {device} is sound"), 0.1);
        match sanitise::clean(worker, &present, &cleaning) {
            Ok(_) => let_out(worker, devices),
            Err(dirty) => keep_out(worker, &devices, dirty),
        }
    }))
}

/// Whether a bundle in quarantine may be taken off the bus to be found again.
pub(super) fn admit_recovery(engine: &mut Engine, device: PciAddress) -> Result<Concern, Failure> {
    let concern = admit_clearing(engine, device)?;
    without_functions(engine, &concern.devices, |_| true)?;
    if !engine.config.policy.remove_rescan {
        let message = format!("{device} may not be taken off the bus");
        let failure = Failure::new(ErrorKind::NotSupported, message).because("policy.remove-rescan is false in gpuward.toml, the default");
        return Err(failure.remedy("set it to true, and reload gpuwardd"));
    }
    let kind = |device: &&PciAddress| engine.inventory.devices.get(device).map(|function| function.kind);
    if let Some(device) = concern.devices.iter().find(|device| kind(device) == Some(Kind::VirtualFunction)) {
        let message = format!("{device} is a virtual function: its physical one makes it anew");
        return Err(Failure::new(ErrorKind::NotSupported, message).remedy("set the number of virtual functions to 0 and back"));
    }
    Ok(Concern { kind: "recover-device", ..concern })
}

/// Takes a bundle in quarantine off the bus, has it found again, and lets it out where it is sound. Whichever driver matches may have
/// it then; what is neither that nor VFIO's is planned as usual.
pub(super) fn begin_recovery(engine: &mut Engine, job: JobId, device: PciAddress) -> Result<Work, Failure> {
    let devices = admit_recovery(engine, device)?.devices;
    let identity = |device: &PciAddress| Some((*device, engine.ledger.quarantines.get(device)?.identity.clone()));
    let functions: Vec<_> = devices.iter().filter_map(identity).collect();
    let cleaning = cleaning(engine, How::ResetIfPossible, job);
    Ok(Box::new(move |worker: &Worker| bring_back(worker, (&devices, &functions), &cleaning)))
}

/// Takes a bundle in quarantine off the bus, has it found again, and lets it out where it is sound.
pub(super) fn bring_back(
    worker: &Worker,
    (devices, functions): (&[PciAddress], &[(PciAddress, Identity)]),
    cleaning: &Cleaning,
) -> Outcome {
    let now = match find_again(worker, devices, functions) {
        Ok(now) => now,
        Err(dirty) => return keep_out(worker, devices, dirty),
    };
    let cleaned = sanitise::clean(worker, &now, cleaning);
    match cleaned.and_then(|_| restore_knobs(worker, &now, &cleaning.ledger)) {
        Ok(()) => let_out(worker, now),
        Err(dirty) => keep_out(worker, &now, dirty),
    }
}

fn find_again(worker: &Worker, devices: &[PciAddress], functions: &[(PciAddress, Identity)]) -> Result<Vec<PciAddress>, Dirty> {
    worker.step(format!("taking {} devices off the bus and looking for them", devices.len()), 0.1);
    let rescan = rescan::remove_and_rescan(worker.host(), worker.deadlines(), functions);
    let (kind, text) = match &rescan.outcome {
        Ok(_) => (history::Kind::Recovered, "taken off the bus and found again".to_owned()),
        Err(error) => (history::Kind::Reset, format!("not back: {}", one_line(&Failure::of(ErrorKind::Internal, error)))),
    };
    let entry = sanitise::with_steps(history::Entry::new(kind, &text).with("job", worker.job), &rescan.steps);
    for (_, identity) in functions {
        history::append(&worker.options.state_dir, identity, entry.clone());
    }
    let inventory = Inventory::observe(worker.host(), 0);
    let followed = worker.commit(move |ledger| ledger.follow(&inventory));
    match rescan.outcome {
        Ok(now) => followed.map(|()| now).map_err(|failure| Dirty { reason: failure.message, stuck: false }),
        Err(error) => Err(Dirty { stuck: error.is_stuck(), reason: one_line(&Failure::of(ErrorKind::Internal, &error)) }),
    }
}

/// The kernel has forgotten what it had been told of functions that it found anew: those on the driver they had get their other knobs
/// back too.
fn restore_knobs(worker: &Worker, devices: &[PciAddress], ledger: &Ledger) -> Result<(), Dirty> {
    let inventory = Inventory::observe(worker.host(), 0);
    for function in devices.iter().filter_map(|device| inventory.devices.get(device)) {
        let known = ledger.devices.values().find(|record| record.identity.matches(&function.identity));
        let Some(record) = known.filter(|record| record.original.binding == function.binding()) else { continue };
        for change in plan::back(function, &record.original) {
            change
                .make(worker.host(), worker.deadlines())
                .map_err(|error| Dirty { stuck: error.is_stuck(), reason: one_line(&Failure::of(ErrorKind::Internal, &error)) })?;
        }
    }
    Ok(())
}

/// Ends the quarantine of a bundle. A device that has everything it had before is the host's again, and so is one that has left; any
/// other stays ours, to be assigned or released. A claim that was never made ready ends.
fn let_out(worker: &Worker, devices: Vec<PciAddress>) -> Outcome {
    let inventory = Inventory::observe(worker.host(), 0);
    let recorded = worker.commit(move |ledger| {
        for device in &devices {
            ledger.quarantines.remove(device);
            let now = inventory.devices.get(device).map(plan::original);
            match ledger.devices.get_mut(device) {
                Some(record) if now.as_ref().is_some_and(|now| *now != record.original) => record.standing = Standing::Active,
                Some(_) | None => drop(ledger.devices.remove(device)),
            }
        }
        drop_pending(ledger, &devices);
    });
    recorded.map_or_else(Outcome::failed, |()| Outcome::done())
}

fn drop_pending(ledger: &mut Ledger, devices: &[PciAddress]) {
    let is_half_made = |devices_of: &[PciAddress]| devices_of.iter().any(|device| devices.contains(device));
    ledger.claims.retain(|_, claim| claim.standing != Standing::Pending || !is_half_made(&claim.devices));
}

/// Records that a bundle is not clean, with the newest reason, and fails.
pub(super) fn keep_out(worker: &Worker, devices: &[PciAddress], dirty: Dirty) -> Outcome {
    let Dirty { reason, stuck } = dirty;
    let (kept, told) = (devices.to_vec(), reason.clone());
    let recorded = worker.commit(move |ledger| ledger.quarantine(&kept, &told, (now(), stuck)));
    let kind = if stuck { ErrorKind::Stuck } else { ErrorKind::Internal };
    let failure =
        Failure::new(kind, reason.clone()).remedy("`gpuward history` has each step; `gpuward quarantine recover` may bring it back");
    let event = if stuck { EventKind::Stuck } else { EventKind::Quarantined };
    let told = |device: &PciAddress| (event, Subject::Device(*device), detail(&reason));
    let events: Vec<_> = devices.iter().map(told).collect();
    recorded.map_or_else(Outcome::failed, |()| Outcome { events, ..Outcome::failed(failure) })
}

fn detail(text: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("detail".to_owned(), text.to_owned())])
}

impl Engine {
    /// Where the history of a device lies, also of one that has left.
    pub(super) fn history_of(&self, device: PciAddress) -> Result<(PathBuf, Identity), Failure> {
        let identity = self.identity_of(device).ok_or_else(|| Failure::from(Refusal::UnknownDevice { device }))?;
        Ok((self.options.state_dir.clone(), identity))
    }
}
