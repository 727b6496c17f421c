//! Giving bundles back to the host: they are reset before their drivers come (P16), and where a driver does not take its device there
//! is a way on (P13): once more after another reset, then off the bus and found again, then quarantine. Never quietly back into the pool.

use vfio::{Identity, Inventory, PciAddress};

use super::carry::{self, Task};
use super::now;
use super::quarantine::{bring_back, keep_out};
use super::sanitise::{self, Cleaning, Dirty, How};
use super::worker::{Outcome, Worker};
use crate::ledger::Ledger;
use crate::ledger::moves::bindings;
use crate::plan::{Move, Plan, Side};
use crate::view::JobState;

/// A plan whose beginning is in the ledger, some of whose bundles go to the host.
pub(super) struct GivingBack {
    /// What is to be changed.
    pub plan: Plan,
    /// What is recorded.
    pub ledger: Ledger,
    /// The bundles have been reset just now.
    pub are_clean: bool,
}

impl GivingBack {
    /// Carries it out. On failure everything was undone, or a bundle is in quarantine: the outcome says which.
    ///
    /// # Errors
    /// How the job ends.
    pub(super) fn run(self, worker: &Worker) -> Result<(), Box<Outcome>> {
        // A unit that is to be paused still has it open.
        if !self.are_clean && self.plan.pauses.is_empty() {
            self.reset_all(worker)?;
        }
        let Err(first) = carry::carry_out(worker, Task::of(self.plan.clone())) else { return Ok(()) };
        let Some(bundle) = self.refused(&first) else { return Err(first) };
        tracing::warn!("{}: its driver did not take it: {first:?}", list(bundle));
        self.reset(worker, bundle)?;
        self.begin_again(worker)?;
        let Err(second) = carry::carry_out(worker, Task::of(self.plan.clone())) else { return Ok(()) };
        match self.refused(&second) {
            Some(bundle) => self.find_again(worker, bundle, *second),
            None => Err(second),
        }
    }

    fn to_host(&self) -> impl Iterator<Item = &Move> {
        self.plan.moves.iter().filter(|bundle| bundle.to == Side::Host)
    }

    /// The bundle that goes to the host and has a device that its driver did not take.
    fn refused(&self, outcome: &Outcome) -> Option<&Move> {
        let device = outcome.driver_refused.filter(|_| outcome.state == JobState::Failed)?;
        self.to_host().find(|bundle| bundle.devices.contains(&device))
    }

    // What is lent is its owner's to clean.
    fn reset_all(&self, worker: &Worker) -> Result<(), Box<Outcome>> {
        let is_lent =
            |bundle: &&Move| bundle.devices.iter().any(|device| self.ledger.devices.get(device).is_some_and(|record| record.lent));
        self.to_host().filter(|bundle| !is_lent(bundle)).try_for_each(|bundle| self.reset(worker, bundle))
    }

    fn cleaning(&self, worker: &Worker) -> Cleaning {
        Cleaning { how: How::ResetIfPossible, occasion: vec![("job", worker.job.to_string())], ledger: self.ledger.clone() }
    }

    fn reset(&self, worker: &Worker, bundle: &Move) -> Result<(), Box<Outcome>> {
        worker.step(format!("resetting {} before its driver comes", list(bundle)), 0.0);
        // Where one has left, another device may sit at its address.
        let inventory = Inventory::observe(worker.host(), 0);
        let is_there =
            |device: &&PciAddress| inventory.devices.get(device).is_some_and(|function| self.ledger.record_of(function).is_some());
        let ours: Vec<_> = bundle.devices.iter().filter(is_there).copied().collect();
        let Err(dirty) = sanitise::clean(worker, &ours, &self.cleaning(worker)) else { return Ok(()) };
        Err(Box::new(self.keep_out(worker, bundle, dirty)))
    }

    // Nothing of the plan is begun at this moment: the other bundles are where they were.
    fn keep_out(&self, worker: &Worker, bundle: &Move, dirty: Dirty) -> Outcome {
        let (moves, vfs) = (self.plan.moves.clone(), self.plan.vfs.clone());
        let bound = bindings(worker.host(), self.plan.devices());
        let (devices, reason, stuck) = (bundle.devices.clone(), dirty.reason.clone(), dirty.stuck);
        let undone = worker.commit(move |ledger| {
            ledger.undo_moves(&moves, &bound);
            vfs.iter().for_each(|vfs| ledger.undo_vfs(vfs.device));
            ledger.quarantine(&devices, &reason, (now(), stuck));
        });
        undone.map_or_else(Outcome::failed, |()| keep_out(worker, &bundle.devices, dirty))
    }

    fn begin_again(&self, worker: &Worker) -> Result<(), Box<Outcome>> {
        let standings: Vec<_> = self.ledger.devices.iter().map(|(device, record)| (*device, record.standing)).collect();
        let devices = self.plan.devices();
        let begun = worker.commit(move |ledger| {
            for (device, standing) in standings.into_iter().filter(|(device, _)| devices.contains(device)) {
                if let Some(record) = ledger.devices.get_mut(&device) {
                    record.standing = standing;
                }
            }
        });
        begun.map_err(|failure| Box::new(Outcome::failed(failure)))
    }

    // In quarantine from the start: a daemon that dies on the way finds it there.
    fn find_again(&self, worker: &Worker, bundle: &Move, refused: Outcome) -> Result<(), Box<Outcome>> {
        let reason = refused.error.as_ref().map(carry::one_line).unwrap_or_default();
        let reason = format!("its driver does not take it back, also after a reset: {reason}");
        let kept = self.keep_out(worker, bundle, Dirty { reason, stuck: false });
        if !worker.remove_rescan || self.is_virtual(worker, bundle) {
            return Err(Box::new(kept));
        }
        let identity = |device: &PciAddress| Some((*device, self.ledger.devices.get(device)?.identity.clone()));
        let functions: Vec<(PciAddress, Identity)> = bundle.devices.iter().filter_map(identity).collect();
        let back = bring_back(worker, (&bundle.devices, &functions), &self.cleaning(worker));
        match back.state {
            JobState::Done if self.plan.moves.len() == 1 => Ok(()),
            JobState::Done => Err(Box::new(refused)),
            JobState::Queued
            | JobState::Running
            | JobState::RollingBack
            | JobState::Failed
            | JobState::Canceled
            | JobState::RollbackFailed => Err(Box::new(back)),
        }
    }

    fn is_virtual(&self, worker: &Worker, bundle: &Move) -> bool {
        bundle.devices.iter().any(|device| worker.host().exists(vfio::attribute(*device, "physfn")))
    }
}

fn list(bundle: &Move) -> String {
    bundle.devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
