//! What may be asked of the engine.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use vfio::{Identity, PciAddress};

use crate::failure::Failure;
use crate::id::{ClaimId, JobId, MachineId, TenantId};
use crate::preflight::Case;
use crate::spec::{ClaimSpec, MachineSpec, TenantSpec};

/// One wish about a device: what `Plan` and `Apply` take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Goal {
    /// From the host into the pool.
    Assign {
        /// Any device of the bundle.
        device: PciAddress,
        /// Also where it is the boot display or the only console (polkit action `force`).
        force: bool,
    },
    /// From the pool back to its own driver.
    Release {
        /// Any device of the bundle.
        device: PciAddress,
    },
    /// A physical function has so many virtual functions.
    Vfs {
        /// The physical function.
        device: PciAddress,
        /// How many; 0 for none.
        count: u16,
    },
}

impl Goal {
    /// The device it is about.
    pub fn device(&self) -> PciAddress {
        match self {
            Self::Assign { device, .. } | Self::Release { device } | Self::Vfs { device, .. } => *device,
        }
    }
}

/// A change asked for. Each becomes a job.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// Carries out goals together; refused where the plan has another digest than the one given.
    Apply {
        /// What is wished.
        goals: Vec<Goal>,
        /// The digest of the plan that was looked at.
        plan_digest: Option<String>,
    },
    /// Makes, changes or removes a tenant.
    Tenant(TenantChange),
    /// Records a machine, off. Boxed: a specification is large.
    CreateMachine {
        /// Whose.
        tenant: TenantId,
        /// What it is to be.
        spec: Box<MachineSpec>,
    },
    /// Claims its devices and starts its domain.
    StartMachine(MachineId),
    /// Asks the guest to shut down; kills it after its deadline where its specification says so.
    StopMachine(MachineId),
    /// Ends the domain at once.
    KillMachine(MachineId),
    /// Asks the guest to reboot.
    RebootMachine(MachineId),
    /// Forgets a machine that is off.
    RemoveMachine(MachineId),
    /// Claims devices for a domain that another manager runs.
    Claim {
        /// Whose it is.
        tenant: TenantId,
        /// What is claimed, and until when.
        spec: ClaimSpec,
        /// The connection that asks, as the bus knows it.
        client: String,
    },
    /// Ends a claim that no machine of gpuward's holds.
    ReleaseClaim {
        /// The claim.
        claim: ClaimId,
        /// The epoch that the caller knows it by: a late release never clears the next owner's device.
        epoch: u64,
    },
    /// Resets a device of the pool, with its bundle, and looks whether it comes back.
    Reset(PciAddress),
    /// A person has looked: the device's bundle is reset, and leaves its quarantine where it answers.
    ClearQuarantine(PciAddress),
    /// Takes a device in quarantine off the bus, with its bundle, and has it found again.
    Recover(PciAddress),
    /// Observes the host anew.
    Rescan,
}

/// A change of a tenant. Boxed: a specification is large.
#[derive(Clone, Debug, PartialEq)]
pub enum TenantChange {
    /// Records it.
    Create {
        /// Its id; a new one where the caller names none.
        tenant: TenantId,
        /// What it is to be.
        spec: Box<TenantSpec>,
    },
    /// Gives it another specification, with the same name.
    Set {
        /// The tenant.
        tenant: TenantId,
        /// What it is to be.
        spec: Box<TenantSpec>,
    },
    /// Forgets one that has neither machines nor claims.
    Remove(TenantId),
}

/// A request with who asks and on which conditions.
#[derive(Clone, Debug, PartialEq)]
pub struct Submission {
    /// What is asked.
    pub request: Request,
    /// Who asks.
    pub uid: u32,
    /// The caller's name for it: the same name, request and uid give the same job for 24 hours. Empty: none.
    pub request_id: String,
    /// Refused with `Conflict` where the view has moved on.
    pub if_generation: Option<u64>,
}

/// How the engine answers: called once, from the engine's thread, so it must not block.
pub type Reply<T> = Box<dyn FnOnce(Result<T, Failure>) + Send>;

/// What `Plan` answers: nothing was changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanReport {
    /// What would be done, in order.
    pub steps: Vec<PlanStep>,
    /// Why goals cannot be met; with any, `Apply` would refuse.
    pub refusals: Vec<Failure>,
    /// Names this plan: give it to `Apply` to have exactly this done.
    pub digest: String,
}

/// One change of a plan, for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanStep {
    /// Stages run in order; steps of one stage run side by side.
    pub stage: u32,
    /// What it changes.
    pub device: PciAddress,
    /// The knob (`driver`, `power/control`).
    pub knob: String,
    /// The value it has.
    pub from: String,
    /// The value it is to have.
    pub to: String,
}

/// A start that is only thought of.
#[derive(Clone, Debug, PartialEq)]
pub enum Planned {
    /// Of a machine that there is.
    Machine(MachineId),
    /// Of one that could be made.
    Spec {
        /// Whose.
        tenant: TenantId,
        /// What it would be.
        spec: Box<MachineSpec>,
    },
}

/// What the engine's thread is asked.
pub enum Ask {
    /// A change; answered with its job as soon as it is admitted.
    Submit(Submission, Reply<JobId>),
    /// What would be done.
    Plan(Vec<Goal>, Reply<PlanReport>),
    /// What a pre-flight has to look at; nothing is claimed.
    Preflight(Planned, Reply<Case>),
    /// Where the history of a device is kept, and under which identity.
    History(PciAddress, Reply<(PathBuf, Identity)>),
    /// Stops a job before its next change and rolls it back.
    Cancel(JobId, Reply<()>),
    /// Opens the console of a machine: answered from another thread, with a stream socket.
    Console(MachineId, Reply<OwnedFd>),
}

impl fmt::Debug for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Submit(submission, _) => f.debug_tuple("Submit").field(submission).finish(),
            Self::Preflight(planned, _) => f.debug_tuple("Preflight").field(planned).finish(),
            Self::History(device, _) => f.debug_tuple("History").field(device).finish(),
            Self::Plan(goals, _) => f.debug_tuple("Plan").field(goals).finish(),
            Self::Console(machine, _) => f.debug_tuple("Console").field(machine).finish(),
            Self::Cancel(job, _) => f.debug_tuple("Cancel").field(job).finish(),
        }
    }
}
