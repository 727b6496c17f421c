//! Carrying out a plan: each change journaled, checked, made and read back; the first failure undoes all from what is.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;

use vfio::{Change, ChangeError, Deadlines, Host, PciAddress};

use crate::failure::{ErrorKind, Failure};
use crate::journal::{Journal, JournalError};
use crate::plan::Plan;

/// Why changes were not made or not undone.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The kernel did not do it.
    #[error(transparent)]
    Change(#[from] ChangeError),
    /// It could not be journaled, so it was not done.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// Somebody holds a device, or its unit could not be paused.
    #[error("{0}")]
    Held(Box<Failure>),
    /// Somebody canceled the job.
    #[error("canceled")]
    Canceled,
}

impl ApplyError {
    /// Whether a store has not returned.
    pub fn is_stuck(&self) -> bool {
        match self {
            Self::Change(error) => error.is_stuck(),
            Self::Journal(_) | Self::Held(_) | Self::Canceled => false,
        }
    }

    /// The device that a driver did not take.
    pub fn driver_refused(&self) -> Option<PciAddress> {
        if let Self::Change(error) = self { error.driver_refused() } else { None }
    }

    /// As users meet it.
    pub fn failure(&self) -> Failure {
        match self {
            Self::Change(error) if error.is_stuck() => {
                Failure::of(ErrorKind::Stuck, error).remedy("the driver may still answer; restart the host where it does not")
            }
            Self::Change(error @ ChangeError::Store { source, .. }) if source.is_in_use() => Failure::of(ErrorKind::Held, error)
                .remedy("stop what uses the GPU: nvidia-persistenced, DCGM, anything that has NVML or CUDA open"),
            Self::Change(error @ ChangeError::Moved { .. }) => Failure::of(ErrorKind::Conflict, error).remedy("look again, then ask again"),
            Self::Change(error @ ChangeError::Gone { .. }) => Failure::of(ErrorKind::NoSuchDevice, error),
            Self::Change(error @ (ChangeError::Store { .. } | ChangeError::NotTaken { .. } | ChangeError::Unreadable { .. })) => {
                Failure::of(ErrorKind::Internal, error).remedy("the kernel's log says what the driver met")
            }
            Self::Journal(error) => Failure::of(ErrorKind::Internal, error),
            Self::Held(failure) => (**failure).clone(),
            Self::Canceled => Failure::new(ErrorKind::Canceled, "canceled; what had been done was undone"),
        }
    }
}

/// How a plan is carried out.
pub struct Run<'a> {
    /// The host.
    pub host: &'a Host,
    /// How long stores may take.
    pub deadlines: &'a Deadlines,
    /// Changes made at once.
    pub parallel: usize,
    /// Asked before each change.
    pub is_canceled: &'a (dyn Fn() -> bool + Sync),
    /// Told before each change: its number from 0, and the change.
    pub on_step: &'a (dyn Fn(usize, &Change) + Sync),
}

/// What came of it.
pub struct Applied {
    /// The first failure.
    pub result: Result<(), ApplyError>,
    /// Changes that were begun, in order.
    pub begun: Vec<Change>,
    /// Devices with a store that has not returned: nothing may be stored into them.
    pub stuck: Vec<PciAddress>,
}

impl Run<'_> {
    /// Makes the changes of `plan`, stage by stage, until one fails. Nothing is undone here.
    ///
    /// Drivers set power policy as they bind and leave, so it is looked at once more at the end.
    pub fn apply(&self, plan: &Plan, journal: &mut Journal) -> Applied {
        let log = Mutex::new(Log { journal, begun: Vec::new(), stuck: Vec::new() });
        let mut result = Ok(());
        for stage in &plan.stages {
            for side_by_side in stage.chunks(self.parallel.max(1)) {
                result = result.and_then(|()| self.together(side_by_side, &log));
            }
        }
        for change in plan.changes().filter(|change| is_power(change)) {
            result = result.and_then(|()| self.make(change, &log));
        }
        let Log { begun, stuck, .. } = log.into_inner().unwrap_or_else(PoisonError::into_inner);
        Applied { result, begun, stuck }
    }

    fn together(&self, changes: &[Change], log: &Mutex<Log<'_>>) -> Result<(), ApplyError> {
        if let [change] = changes {
            return self.one(change, log);
        }
        thread::scope(|scope| {
            let running: Vec<_> = changes.iter().map(|change| scope.spawn(|| self.one(change, log))).collect();
            let ended: Vec<_> = running.into_iter().map(|thread| thread.join()).collect();
            ended.into_iter().try_for_each(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    fn one(&self, change: &Change, log: &Mutex<Log<'_>>) -> Result<(), ApplyError> {
        if (self.is_canceled)() {
            return Err(ApplyError::Canceled);
        }
        change.check(self.host)?;
        {
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            (self.on_step)(log.begun.len(), change);
            log.journal.begin(change)?;
            log.begun.push(change.clone());
        }
        self.make(change, log)
    }

    fn make(&self, change: &Change, log: &Mutex<Log<'_>>) -> Result<(), ApplyError> {
        let made = change.make(self.host, self.deadlines);
        if made.as_ref().is_err_and(ChangeError::is_stuck) {
            log.lock().unwrap_or_else(PoisonError::into_inner).stuck.push(change.device());
        }
        Ok(made?)
    }

    /// Undoes changes that were begun, last first, from whatever the knobs have now; then power policy, also as `planned` for
    /// these devices: it may have moved with a driver although its own change had not begun.
    ///
    /// # Errors
    /// The first knob that does not go back; the others are tried all the same.
    pub fn roll_back(&self, begun: &[Change], planned: &Plan) -> Result<(), ApplyError> {
        let mut result = Ok(());
        for change in begun.iter().rev() {
            result = result.and(self.undo(change));
        }
        let moved = |change: &&Change| begun.iter().any(|other| other.device() == change.device());
        for change in begun.iter().chain(planned.changes().filter(moved)).filter(|change| is_power(change)) {
            result = result.and_then(|()| self.undo(change));
        }
        result
    }

    // A device that has left has nothing to be undone.
    fn undo(&self, change: &Change) -> Result<(), ApplyError> {
        match change.clone().swapped().make(self.host, self.deadlines) {
            Ok(()) | Err(ChangeError::Gone { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn is_power(change: &Change) -> bool {
    match change {
        Change::PowerControl { .. } | Change::D3cold { .. } => true,
        Change::Binding { .. } | Change::VfCount { .. } | Change::VfAutoprobe { .. } | Change::ResetMethod { .. } => false,
    }
}

struct Log<'a> {
    journal: &'a mut Journal,
    begun: Vec<Change>,
    stuck: Vec<PciAddress>,
}

/// The id of this boot; empty where the host does not say.
pub fn boot_id(host: &Host) -> String {
    host.read(Path::new("proc/sys/kernel/random/boot_id")).ok().flatten().unwrap_or_default()
}
