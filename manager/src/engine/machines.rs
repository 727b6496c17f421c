//! Jobs on machines: what they mean for the ledger, before their workers start and after they end.

use std::collections::BTreeMap;

use super::jobs::{Concern, Work};
use super::worker::Outcome;
use super::{Engine, Options as EngineOptions};
use crate::failure::{ErrorKind, Failure};
use crate::id::{JobId, MachineId};
use crate::request::{Request, Submission};
use crate::view::MachineView;

/// What machines need.
#[derive(Clone, Debug, Default)]
pub struct Options {}

/// What the engine keeps of machines beside the ledger.
#[derive(Debug, Default)]
pub struct Machines {}

/// Something happened to machines: look at them again.
#[derive(Clone, Copy, Debug)]
pub enum Hint {}

impl Machines {
    pub(super) fn new(_options: &EngineOptions) -> Self {
        Self {}
    }
}

fn not_built() -> Failure {
    Failure::new(ErrorKind::NotSupported, "machines are not built yet")
}

/// Whether a request may become a job, and what that is about.
pub(super) fn admit(_engine: &mut Engine, _submission: &Submission) -> Result<Concern, Failure> {
    Err(not_built())
}

/// Records what is about to happen and gives what is to run.
pub(super) fn begin(_engine: &mut Engine, _job: JobId, _request: Request) -> Result<Work, Failure> {
    Err(not_built())
}

/// A job ended, of any kind.
pub(super) fn ended(_engine: &mut Engine, _job: JobId, _outcome: &Outcome) {}

/// Something happened outside.
pub(super) fn hint(_engine: &mut Engine, hint: Hint) {
    match hint {}
}

/// Whether a machine's domain runs.
pub(super) fn runs(_engine: &Engine, _machine: MachineId) -> bool {
    false
}

/// What clients see of machines.
pub(super) fn views(_engine: &Engine) -> BTreeMap<MachineId, MachineView> {
    BTreeMap::new()
}

/// Devices that domains of others name, by the domain's name.
pub(super) fn foreign_domains(_engine: &Engine) -> BTreeMap<vfio::PciAddress, String> {
    BTreeMap::new()
}
