//! Jobs on devices: bundles move between host and pool.

use super::Engine;
use super::jobs::{Concern, Work};
use crate::failure::{ErrorKind, Failure};
use crate::id::JobId;
use crate::request::{Goal, PlanReport};

/// Whether goals may become a job, and what that is about.
pub(super) fn admit(_engine: &mut Engine, _goals: &[Goal], _digest: Option<&str>) -> Result<Concern, Failure> {
    Err(Failure::new(ErrorKind::NotSupported, "assign and release are not built yet"))
}

/// Records what is about to happen and gives what is to run.
pub(super) fn begin(_engine: &mut Engine, _job: JobId, _goals: &[Goal], _digest: Option<&str>) -> Result<Work, Failure> {
    Err(Failure::new(ErrorKind::NotSupported, "assign and release are not built yet"))
}

impl Engine {
    /// What would be done for goals.
    pub(super) fn report(&mut self, _goals: &[Goal]) -> Result<PlanReport, Failure> {
        Err(Failure::new(ErrorKind::NotSupported, "plans are not built yet"))
    }

    /// The first job of this start: mends what the last one left.
    pub(super) fn begin_recovery(&mut self) {
        self.recovered = self.ledger_fault.is_none();
        self.publish();
    }

    pub(super) fn recovery(&self) -> Option<JobId> {
        None
    }
}
