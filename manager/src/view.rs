//! What is published: an immutable value the engine makes after each change, from what was observed.
//!
//! The bus compares the last view with the new one and says what changed. Nothing else gets state out of the engine.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vfio::{Inventory, PciAddress};

use crate::config::Use;
use crate::failure::Failure;
use crate::id::{ClaimId, JobId, MachineId, TenantId};
use crate::ledger::Usage;
use crate::machine::Deadline;
use crate::spec::TenantSpec;

/// Everything that clients may see, at one moment.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Grows with each published view.
    pub generation: u64,
    /// Whether the host takes changes.
    pub host_state: HostState,
    /// What was observed last.
    pub inventory: Arc<Inventory>,
    /// Devices: those observed, and claimed ones that have left.
    pub devices: BTreeMap<PciAddress, DeviceView>,
    /// Live claims.
    pub claims: BTreeMap<ClaimId, ClaimView>,
    /// Tenants.
    pub tenants: BTreeMap<TenantId, TenantView>,
    /// Machines.
    pub machines: BTreeMap<MachineId, MachineView>,
    /// What became of devices that were held in an earlier boot, once that is known.
    pub restored: BTreeMap<PciAddress, Restored>,
    /// Jobs queued and running, and the last ones that ended (`limits.jobs-kept`).
    pub jobs: BTreeMap<JobId, JobView>,
}

impl View {
    /// Whether a user with these groups may act for a tenant.
    pub fn is_owner(&self, tenant: TenantId, uid: u32, groups: &[u32]) -> bool {
        self.tenants.get(&tenant).is_some_and(|tenant| tenant.spec.is_owned_by(uid, groups))
    }

    /// The tenant with this name.
    pub fn tenant_called(&self, name: &str) -> Option<TenantId> {
        self.tenants.iter().find(|(_, tenant)| tenant.spec.name == name).map(|(id, _)| *id)
    }
}

/// What became of a device that was held before this boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Restored {
    /// It is bound again.
    Again,
    /// It was bound already: kept at boot, or by an earlier start.
    WasThere,
    /// What it was held for ended with its boot, and the host's driver has it.
    GivenBack,
    /// Somebody uses it.
    InUse(String),
    /// It could not be bound.
    Failed(String),
    /// It is not on the host, or another device is in its slot.
    Left(String),
    /// It is in quarantine.
    KeptOut(String),
}

impl Restored {
    /// Its word.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Again => "restored",
            Self::WasThere => "already there",
            Self::GivenBack => "given back",
            Self::InUse(_) => "in use",
            Self::Failed(_) => "not restored",
            Self::Left(_) => "left the host",
            Self::KeptOut(_) => "in quarantine",
        }
    }

    /// The reason as the end of a sentence; empty where there is none.
    pub fn text(&self) -> String {
        match self {
            Self::Again | Self::WasThere | Self::GivenBack => String::new(),
            Self::InUse(why) | Self::Failed(why) | Self::Left(why) | Self::KeptOut(why) => format!(": {why}"),
        }
    }

    /// Whether nobody need look at it: a quarantine has been told of before.
    pub fn is_as_it_was(&self) -> bool {
        match self {
            Self::Again | Self::WasThere | Self::GivenBack | Self::KeptOut(_) => true,
            Self::InUse(_) | Self::Failed(_) | Self::Left(_) => false,
        }
    }
}

/// Whether the host takes changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HostState {
    /// Started; reads are answered, changes answer `HostNotReady`.
    #[default]
    Recovering,
    /// Takes changes.
    Ready,
    /// Read-only: a file of gpuward's own cannot be used.
    Degraded {
        /// What is wrong with which file, and what to do.
        reason: String,
    },
}

impl HostState {
    /// Its word on the bus.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Recovering => "recovering",
            Self::Ready => "ready",
            Self::Degraded { .. } => "degraded",
        }
    }
}

/// What gpuward adds to a function observed in `View::inventory`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceView {
    /// The devices that move with it, itself included, in the order they bind.
    pub bundle: Vec<PciAddress>,
    /// What the configuration allows with it.
    pub use_: Use,
    /// Where it is in its life.
    pub state: DeviceState,
    /// Why it is there, for a person; empty where the state says it all.
    pub reason: String,
    /// The claim on it.
    pub claim: Option<ClaimId>,
    /// The generation of the view in which it last changed.
    pub generation: u64,
}

/// Where a device is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)] // the words are those of docs/glossary.md
pub enum DeviceState {
    Host,
    Assigning,
    Free,
    Claimed,
    Running,
    Sanitising,
    Releasing,
    Drifted,
    Lent,
    Quarantined,
    Stuck,
    Gone,
}

/// A live claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimView {
    /// Whose.
    pub tenant: TenantId,
    /// For which machine; `None` where another manager runs the domain.
    pub machine: Option<MachineId>,
    /// The domain that may use the devices.
    pub domain: Uuid,
    /// Where it is in its life.
    pub state: ClaimState,
    /// Why it is there, for a person; empty where the state says it all.
    pub reason: String,
    /// What ends it (`machine`, `manual`, `domain-stopped`, `client-gone`).
    pub release_on: &'static str,
    /// The connection whose end ends it; empty for all others.
    pub client: String,
    /// When it ends in any case, in seconds since 1970; 0: never.
    pub expires: u64,
    /// Its devices, in the order they bind.
    pub devices: Vec<PciAddress>,
    /// Isolation level (`whole-gpu`, `vf`).
    pub isolation_level: &'static str,
    /// Seconds since 1970.
    pub since: u64,
    /// Grows with each claim ever made: an old one never releases the next owner's device.
    pub epoch: u64,
}

/// Where a claim is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the words are those of docs/glossary.md
pub enum ClaimState {
    #[default]
    Pending,
    Active,
    Releasing,
    Gone,
}

impl ClaimState {
    /// Its word on the bus.
    pub fn word(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Active => "active",
            Self::Releasing => "releasing",
            Self::Gone => "gone",
        }
    }
}

/// A tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantView {
    /// What it is to be.
    pub spec: TenantSpec,
    /// What it has.
    pub usage: Usage,
    /// The generation of the view in which it last changed.
    pub generation: u64,
}

/// A machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineView {
    /// Unique within its tenant.
    pub name: String,
    /// Whose.
    pub tenant: TenantId,
    /// Where it is in its life.
    pub state: MachineState,
    /// Why, for a person.
    pub reason: String,
    /// Its live claims.
    pub claims: Vec<ClaimId>,
    /// The least of its claims' isolation levels; empty without a claim.
    pub isolation_level: &'static str,
    /// Process id of QEMU; 0 where there is none.
    pub leader: u32,
    /// What is known of the guest from outside (`unknown`, `started`, `agent-connected`, `agent-lost`, `asleep`).
    pub guest_state: &'static str,
    /// How often the guest was reset since the daemon saw it first; 0 while nothing of it runs.
    pub reboots: u32,
    /// Its claims' devices.
    pub devices: Vec<GivenView>,
    /// How long what is being done to it may take.
    pub deadline: Option<Deadline>,
    /// The last failure, cleared by the next start.
    pub error: Option<Failure>,
    /// The libvirt XML it runs with; empty while off.
    pub domain_xml: String,
    /// The generation of the view in which it last changed.
    pub generation: u64,
}

/// A device of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GivenView {
    /// Where it sits on the host.
    pub device: PciAddress,
    /// The claim that it belongs to.
    pub claim: ClaimId,
    /// Where the guest finds it; `None` while its domain does not have it.
    pub guest: Option<PciAddress>,
}

/// Where a machine is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)] // the words are those of docs/glossary.md
pub enum MachineState {
    #[default]
    Off,
    Preparing,
    Starting,
    Running,
    Paused,
    Stopping,
    Failed,
    Unknown,
}

/// A request being carried out, or carried out.
#[derive(Clone, Debug, PartialEq)]
pub struct JobView {
    /// What it does (`assign`, `machine-start`).
    pub kind: &'static str,
    /// Where it is.
    pub state: JobState,
    /// 0 to 1.
    pub progress: f64,
    /// What it is doing now, for a person.
    pub step: String,
    /// Devices it is about.
    pub devices: Vec<PciAddress>,
    /// The machine it is about.
    pub machine: Option<MachineId>,
    /// Whose it is; `None` where it is no tenant's.
    pub tenant: Option<TenantId>,
    /// Claims it made.
    pub claims: Vec<ClaimId>,
    /// Why it failed.
    pub error: Option<Failure>,
    /// The caller's name for the request; empty where none was given.
    pub request_id: String,
    /// Who asked; 0 for the daemon itself.
    pub started_by_uid: u32,
    /// Seconds since 1970.
    pub started_at: u64,
    /// Whether `Cancel` would still be obeyed.
    pub cancelable: bool,
}

/// Where a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)] // the words are those of docs/glossary.md
pub enum JobState {
    Queued,
    Running,
    RollingBack,
    Done,
    Failed,
    Canceled,
    RollbackFailed,
}

impl JobState {
    /// Whether it will not change any more.
    pub fn is_over(self) -> bool {
        match self {
            Self::Queued | Self::Running | Self::RollingBack => false,
            Self::Done | Self::Failed | Self::Canceled | Self::RollbackFailed => true,
        }
    }
}

/// What happened, beside properties that changed: one `Event` signal each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Grows by one with each event of this start.
    pub seq: u64,
    /// What happened.
    pub kind: EventKind,
    /// The device, claim or machine it happened to.
    pub subject: Subject,
    /// Details, for a person.
    pub detail: BTreeMap<String, String>,
}

/// What an event happened to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Subject {
    Device(PciAddress),
    Claim(ClaimId),
    Machine(MachineId),
}

/// The closed list of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)] // the words are those of docs/glossary.md
pub enum EventKind {
    ClaimMade,
    ClaimReleased,
    Sanitised,
    Quarantined,
    Drifted,
    Stuck,
    DeviceGone,
    MachineStarted,
    MachineStopped,
}

/// What the engine hands to its publisher, in order.
#[derive(Clone, Debug)]
pub struct Update {
    /// The state after it.
    pub view: Arc<View>,
    /// What happened, oldest first.
    pub events: Vec<Event>,
    /// Jobs that ended with this view: their `JobRemoved` goes out last.
    pub ended: Vec<JobId>,
}
