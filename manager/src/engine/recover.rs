//! The first job of a start: mends what the last one left. Needs the kernel only; machines come after it.

use std::collections::{BTreeMap, BTreeSet};

use vfio::{ChangeError, Function, Inventory, PciAddress, reset};

use super::carry::one_line;
use super::claims::release_bundle;
use super::jobs::Job;
use super::pause::resume;
use super::pinned;
use super::stuck::{self, stuck_in};
use super::worker::{Outcome, Worker};
use super::{Engine, now};
use crate::apply::{ApplyError, Run, boot_id};
use crate::failure::{ErrorKind, Failure};
use crate::id::JobId;
use crate::journal::{self, Left};
use crate::ledger::moves::bindings;
use crate::ledger::{ClaimRecord, Ledger, Standing};
use crate::plan::{self, Move, Plan, Side};
use crate::view::{EventKind, Subject};

impl Engine {
    /// Starts the first job. A ledger that cannot be used is left as it is, and so is the host.
    pub(super) fn begin_recovery(&mut self) {
        if self.ledger_fault.is_some() {
            return;
        }
        let boot = boot_id(&self.options.host);
        let inventory = self.inventory.clone();
        let job = JobId(self.ledger.next_job);
        let started = self.commit(|ledger| {
            ledger.next_job += 1;
            ledger.boot = boot;
            ledger.follow(&inventory);
        });
        if let Err(failure) = started {
            self.ledger_fault = Some(failure.to_string());
            self.publish();
            return;
        }
        self.note_held_before();
        self.recovery = Some(job);
        self.jobs.0.insert(job, Job::own("recover", None));
        let ledger = self.ledger.clone();
        self.spawn(job, Box::new(move |worker: &Worker| recover(worker, &ledger)));
    }
}

/// Mends everything that can be mended by itself. What cannot is in quarantine afterwards, and no reason not to go on.
fn recover(worker: &Worker, ledger: &Ledger) -> Outcome {
    match Recovery::new(worker, ledger.clone()).and_then(Recovery::run) {
        Ok(outcome) => outcome,
        Err(failure) => Outcome::failed(failure),
    }
}

struct Recovery<'a> {
    worker: &'a Worker,
    ledger: Ledger,
    journals: Vec<Left>,
    boot: String,
    outcome: Outcome,
}

impl<'a> Recovery<'a> {
    fn new(worker: &'a Worker, ledger: Ledger) -> Result<Self, Failure> {
        let journals = journal::left(&worker.options.run_dir).map_err(|error| Failure::of(ErrorKind::Internal, &error))?;
        Ok(Self { worker, ledger, journals, boot: boot_id(worker.host()), outcome: Outcome::done() })
    }

    fn run(mut self) -> Result<Outcome, Failure> {
        for journal in std::mem::take(&mut self.journals) {
            self.mend(&journal)?;
        }
        self.settle_the_rest()?;
        pinned::give_back_strays(self.worker, &self.ledger);
        self.look_at_the_pool()?;
        Ok(self.outcome)
    }

    fn change(&mut self, entry: impl Fn(&mut Ledger) + Send + 'static) -> Result<(), Failure> {
        entry(&mut self.ledger);
        self.worker.commit(entry)
    }

    fn mend(&mut self, journal: &Left) -> Result<(), Failure> {
        // A reboot has forgotten every knob that was turned: nothing is left to undo, and every unit has been started.
        let is_of_this_boot = journal.header.boot == self.boot;
        let mut is_kept = false;
        for bundle in &journal.header.moves {
            if bundle.devices.iter().any(|device| self.ledger.quarantines.contains_key(device)) {
                is_kept = true;
            } else if is_of_this_boot {
                let mended = match stuck_in(self.worker.host(), &bundle.devices) {
                    Some(store) => Err(stuck::failure(&store)),
                    None => self.mend_bundle(journal, bundle)?,
                };
                if let Err(failure) = mended {
                    self.give_up(journal, bundle, &failure)?;
                    is_kept = true;
                }
            }
        }
        for vfs in &journal.header.vfs {
            is_kept |= !self.mend_vfs(journal, vfs.device, is_of_this_boot)?;
        }
        if is_of_this_boot {
            resume(self.worker.host(), self.worker.deadlines(), &journal.paused);
        }
        let closed = if is_kept { journal::keep_as_failed(&journal.path) } else { journal::remove(&journal.path) };
        closed.map_err(|error| Failure::of(ErrorKind::Internal, &error))
    }

    // A number that was recorded was reached; any other is undone from what is.
    fn mend_vfs(&mut self, journal: &Left, device: PciAddress, is_of_this_boot: bool) -> Result<bool, Failure> {
        if self.ledger.vfs.get(&device).is_none_or(|intent| intent.wished.is_none()) {
            return Ok(true);
        }
        let begun: Vec<_> = journal.begun.iter().filter(|change| change.device() == device).cloned().collect();
        let undone = match stuck_in(self.worker.host(), &[device]) {
            _ if !is_of_this_boot => Ok(()),
            Some(store) => Err(stuck::failure(&store)),
            None => self.quietly().roll_back(&begun, &Plan::default()).map_err(|error| error.failure()),
        };
        if let Err(failure) = &undone {
            let bundle = Move { to: Side::Host, devices: vec![device] };
            self.give_up(journal, &bundle, failure)?;
        }
        self.change(move |ledger| ledger.undo_vfs(device))?;
        Ok(undone.is_ok())
    }

    fn mend_bundle(&mut self, journal: &Left, bundle: &Move) -> Result<Result<(), Failure>, Failure> {
        let of_bundle = |device: PciAddress| bundle.devices.contains(&device);
        let begun: Vec<_> = journal.begun.iter().filter(|change| of_bundle(change.device())).cloned().collect();
        let standing = bundle.devices.iter().find_map(|device| Some(self.ledger.devices.get(device)?.standing));
        match (bundle.to, standing) {
            (Side::Pool, Some(Standing::Pending)) => {
                if let Err(error) = self.quietly().roll_back(&begun, &Plan::default()) {
                    return Ok(Err(error.failure()));
                }
                let (devices, now) = (bundle.devices.clone(), bindings(self.worker.host(), bundle.devices.iter().copied()));
                self.change(move |ledger| devices.iter().for_each(|device| ledger.settle(*device, &now)))?;
            }
            // The end was recorded, only the journal was not removed: what is has to be what was wished.
            (Side::Pool, Some(Standing::Active)) => {
                let unmade = begun.iter().rev().find_map(|change| match change.is_made(self.worker.host()) {
                    Ok(true) | Err(ChangeError::Gone { .. }) => None,
                    Ok(false) => Some(Failure::new(
                        ErrorKind::Internal,
                        format!("{} of {} is not {} any more", change.knob(), change.device(), change.to()),
                    )),
                    Err(error) => Some(ApplyError::from(error).failure()),
                });
                return Ok(unmade.map_or(Ok(()), Err));
            }
            // Releasing goes on below, from what is; whatever is not in the ledger is not ours.
            (Side::Pool, Some(Standing::Releasing)) | (Side::Pool, None) | (Side::Host, _) => {}
        }
        Ok(Ok(()))
    }

    // What has no journal was not begun in this boot.
    fn settle_the_rest(&mut self) -> Result<(), Failure> {
        let standing = |wanted: Standing| {
            let records = self.ledger.devices.iter().filter(|(device, _)| !self.ledger.quarantines.contains_key(device));
            records.filter(|(_, record)| record.standing == wanted).map(|(device, _)| *device).collect::<Vec<_>>()
        };
        let (pending, releasing) = (standing(Standing::Pending), standing(Standing::Releasing));
        let now = bindings(self.worker.host(), pending.iter().copied());
        self.change(move |ledger| {
            pending.iter().for_each(|device| ledger.settle(*device, &now));
            let quarantined = ledger.quarantines.keys().copied().collect::<BTreeSet<_>>();
            let is_kept = |claim: &ClaimRecord| claim.devices.iter().any(|device| quarantined.contains(device));
            ledger.claims.retain(|_, claim| claim.standing != Standing::Pending || is_kept(claim));
            ledger.vfs.keys().copied().collect::<Vec<_>>().into_iter().for_each(|device| ledger.undo_vfs(device));
        })?;
        self.release_again(&releasing)
    }

    // A reset was cut off, or a device died while nobody looked: what is free has to answer. One whose power is cut cannot, and is woken
    // before it is handed out.
    fn look_at_the_pool(&mut self) -> Result<(), Failure> {
        let (host, deadlines) = (self.worker.host(), self.worker.deadlines());
        let inventory = Inventory::observe(host, 0);
        let is_free = |function: &&Function| {
            let record = self.ledger.record_of(function).filter(|record| record.standing == Standing::Active && !record.lent);
            let is_kept = self.ledger.quarantines.contains_key(&function.address) || self.ledger.claim_on(function.address).is_some();
            record.is_some() && !is_kept && plan::is_in_pool(function) && function.power.state.as_deref() != Some("D3cold")
        };
        let silent = inventory.devices.values().filter(is_free).filter_map(|function| {
            let error = reset::look(host, deadlines, function).err()?;
            Some((function.address, format!("{} {}", function.address, one_line(&Failure::of(ErrorKind::Internal, &error)))))
        });
        for (device, reason) in silent.collect::<Vec<_>>() {
            let devices = inventory.bundle(device).map_or_else(|| vec![device], |bundle| bundle.devices);
            let detail = BTreeMap::from([("reason".into(), reason.clone())]);
            self.outcome.events.push((EventKind::Quarantined, Subject::Device(device), detail));
            self.change(move |ledger| ledger.quarantine(&devices, &reason, (now(), false)))?;
        }
        Ok(())
    }

    // Each step of a release may be repeated: it starts from what is. One that is held stays `releasing`.
    fn release_again(&mut self, releasing: &[PciAddress]) -> Result<(), Failure> {
        let mut left: BTreeSet<_> = releasing.iter().copied().collect();
        while let Some(device) = left.pop_first() {
            if let Err(failure) = release_bundle(self.worker, &self.ledger, (device, false)) {
                tracing::error!("{device} is not back on the host: {}", one_line(&failure));
            }
            self.ledger = *self.worker.record(|_| {})?;
            left.retain(|other| self.ledger.devices.contains_key(other));
        }
        Ok(())
    }

    fn give_up(&mut self, journal: &Left, bundle: &Move, failure: &Failure) -> Result<(), Failure> {
        let devices = bundle.devices.clone();
        let stuck = failure.kind == ErrorKind::Stuck;
        let reason = format!("job {} was cut off and could not be undone: {}", journal.header.job, one_line(failure));
        tracing::error!("{}: {reason}", list(&devices));
        for device in &devices {
            let detail = BTreeMap::from([("reason".into(), reason.clone())]);
            self.outcome.events.push((EventKind::Quarantined, Subject::Device(*device), detail));
        }
        self.change(move |ledger| ledger.quarantine(&devices, &reason, (now(), stuck)))
    }

    fn quietly(&self) -> Run<'_> {
        let worker = self.worker;
        Run { host: worker.host(), deadlines: worker.deadlines(), parallel: worker.parallel, is_canceled: &|| false, on_step: &|_, _| {} }
    }
}

fn list(devices: &[PciAddress]) -> String {
    devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
