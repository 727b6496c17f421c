//! What was held in an earlier boot is taken again, and what became of each device is told.
//!
//! Devices of claims are bound for their claims ([`super::reboot`]); what is here is bound for the pool, or for the manager that it is lent
//! to. A device that cannot be taken again stays on record, and the next start tries once more.

use std::collections::{BTreeMap, BTreeSet};

use vfio::{Function, PciAddress};

use super::carry::one_line;
use super::jobs::{Job, Work};
use super::{Engine, devices};
use crate::failure::{ErrorKind, Failure};
use crate::history::{self, Entry, Kind};
use crate::id::JobId;
use crate::ledger::{DeviceRecord, Standing};
use crate::plan::{self, Refusal};
use crate::request::Goal;
use crate::view::{JobView, Restored};

/// The kinds of jobs that a start makes by itself to bring back what was.
const KINDS: [&str; 4] = ["recover", "restore", "claim-restore", "machine-end"];

/// What is to be taken again after a boot.
#[derive(Debug, Default)]
pub(super) struct Restoring {
    /// Devices that were held in an earlier boot, and whether they were on their VFIO drivers when this start first looked.
    held: BTreeMap<PciAddress, bool>,
    /// Those which a job has yet to be made for: some are claimed, and free once the claim has ended with its boot; some are virtual functions
    /// that have yet to be made.
    waiting: BTreeSet<PciAddress>,
    /// What became of each, once that is told.
    pub results: BTreeMap<PciAddress, Restored>,
}

impl Restoring {
    /// Devices that have left are about to come back.
    pub fn expect(&mut self, devices: &[PciAddress]) {
        for device in devices {
            self.held.insert(*device, false);
            self.waiting.insert(*device);
            self.results.remove(device);
        }
    }
}

impl Engine {
    /// Notes what the ledger holds from an earlier boot. Called once, when devices were found by their identities.
    pub(super) fn note_held_before(&mut self) {
        // One that was being bound again as the last daemon died is not taken yet.
        let is_before = |record: &DeviceRecord| match record.standing {
            Standing::Active => record.boot != self.ledger.boot,
            Standing::Pending => record.again,
            Standing::Releasing => false,
        };
        let held = self.ledger.devices.iter().filter(|(_, record)| is_before(record)).map(|(device, _)| *device);
        self.restoring.held = held.map(|device| (device, self.own_function(device).is_some_and(plan::is_in_pool))).collect();
        self.restoring.waiting = self.restoring.held.keys().copied().collect();
    }

    /// Queues a job for each bundle that was held in an earlier boot and is free (P66).
    pub(super) fn restore_after_boot(&mut self) {
        if !self.recovered {
            return;
        }
        let waiting = std::mem::take(&mut self.restoring.waiting);
        let free = |device: &PciAddress| self.ledger.claim_on(*device).is_none();
        let is_awaited = |device: &PciAddress| self.makes_vfs() && !self.inventory.devices.contains_key(device);
        let (ready, later): (BTreeSet<_>, BTreeSet<_>) = waiting.into_iter().partition(|device| free(device) && !is_awaited(device));
        self.restoring.waiting = later;
        let is_before = |device: &PciAddress| self.ledger.devices.get(device).is_some_and(|record| record.boot != self.ledger.boot);
        let is_here = |device: &PciAddress| self.own_function(*device).is_some() && !self.ledger.quarantines.contains_key(device);
        let bundles: BTreeSet<_> =
            ready.into_iter().filter(|device| is_before(device) && is_here(device)).map(|device| self.bundle_of(device)).collect();
        for bundle in bundles {
            if let Err(failure) = self.queue_restoring(&bundle) {
                tracing::error!("{bundle:?} are not taken again: {}", one_line(&failure));
            }
        }
    }

    fn queue_restoring(&mut self, bundle: &[PciAddress]) -> Result<(), Failure> {
        let Some(device) = bundle.last().copied() else { return Ok(()) };
        let id = JobId(self.ledger.next_job);
        self.commit(|ledger| ledger.next_job += 1)?;
        let mut job = Job::own("restore", None).queued(Box::new(move |engine, id| begin(engine, id, device)));
        job.view.devices = bundle.to_vec();
        self.jobs.0.insert(id, job);
        Ok(())
    }

    /// Tells what became of each device, once nothing is under way for any.
    pub(super) fn tell_restored(&mut self) {
        let under_way = self.jobs.live().any(|(_, view)| KINDS.contains(&view.kind));
        if !self.recovered || under_way || self.makes_vfs() || self.restoring.held.is_empty() {
            return;
        }
        for (device, was_there) in std::mem::take(&mut self.restoring.held) {
            let restored = self.restored(device, was_there);
            self.remember_restored(device, &restored);
            self.restoring.results.insert(device, restored);
        }
    }

    fn restored(&self, device: PciAddress, was_there: bool) -> Restored {
        let Some(record) = self.ledger.devices.get(&device) else { return Restored::GivenBack };
        if let Some(quarantine) = self.ledger.quarantines.get(&device) {
            return Restored::KeptOut(quarantine.reason.clone());
        }
        let Some(function) = self.own_function(device) else { return Restored::Left(self.where_it_is(record)) };
        if plan::is_in_pool(function) {
            return if was_there { Restored::WasThere } else { Restored::Again };
        }
        let of_device = |view: &&JobView| KINDS.contains(&view.kind) && view.devices.contains(&device);
        let failure = self.jobs.0.values().map(|job| &job.view).filter(of_device).find_map(|view| view.error.as_ref());
        match failure {
            Some(failure) if failure.kind == ErrorKind::Held => Restored::InUse(one_line(failure)),
            Some(failure) => Restored::Failed(one_line(failure)),
            None => Restored::Failed(format!("it is bound to {}", function.driver.as_deref().unwrap_or("no driver"))),
        }
    }

    // The ids are in docs/boot.md.
    fn remember_restored(&self, device: PciAddress, restored: &Restored) {
        let Some(identity) = self.identity_of(device) else { return };
        let (word, text) = (restored.word(), restored.text());
        if restored.is_as_it_was() {
            tracing::info!(message_id = "3f1d7c0b6a1e4f0d9c52a4f0f6b1d201", %device, result = word, "{device} ({identity}): {word}{text}");
        } else {
            tracing::warn!(message_id = "3f1d7c0b6a1e4f0d9c52a4f0f6b1d202", %device, result = word, "{device} ({identity}): {word}{text}");
        }
        let entry = Entry::new(Kind::Restored, format!("after a boot: {word}{text}")).with("address", device).with("result", word);
        let recorded = self.ledger.devices.get(&device).map_or(&identity, |record| &record.identity);
        history::append(&self.options.state_dir, recorded, entry);
    }

    /// The function at an address, where it is the one that the ledger means.
    fn own_function(&self, device: PciAddress) -> Option<&Function> {
        self.inventory.devices.get(&device).filter(|function| self.ledger.record_of(function).is_some())
    }

    /// Where a device of the ledger's that is not at its address has gone, for a person: what was in its slot, and what is there now.
    pub(super) fn where_it_is(&self, record: &DeviceRecord) -> String {
        let identity = &record.identity;
        match self.inventory.devices.values().find(|function| function.identity.slot == identity.slot) {
            Some(other) => format!("in its slot is {} now, at {}; {identity} has left the host", other.identity, other.address),
            None => format!("{} is not on the host", identity.slot),
        }
    }
}

// Also one that is bound already, and whose power only is to be set, is left alone while somebody uses it.
fn begin(engine: &mut Engine, job: JobId, device: PciAddress) -> Result<Work, Failure> {
    let on_vfio = |device: &PciAddress| engine.inventory.devices.get(device).is_some_and(Function::is_on_vfio);
    let bound: BTreeSet<_> = engine.bundle_of(device).into_iter().filter(on_vfio).collect();
    if let Some((device, holders)) = engine.surroundings(&bound, Some(job)).holders.into_iter().next() {
        return Err(Refusal::Held { device, holders, pausable: Vec::new() }.into());
    }
    devices::begin(engine, job, &[Goal::Assign { device, force: false }], None)
}
