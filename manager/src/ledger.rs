//! The ledger: the durable record of intents and claims.
//!
//! What is written here is true before the host is changed and stays true until the host was changed back. It is one JSON file,
//! replaced as a whole ([`store`]); addresses in it are where a device was last seen, its identity says which device it is.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vfio::{Binding, Function, Identity, PciAddress};

use crate::id::{ClaimId, JobId, MachineId, TenantId};
use crate::spec::{MachineSpec, TenantSpec};
use crate::view::MachineState;

pub mod moves;
pub mod store;
mod tenants;
mod vfs;

pub use tenants::Usage;

/// Everything that is recorded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Ledger {
    /// The format it is written in.
    pub format: Format,
    /// The boot in which it was written last (`/proc/sys/kernel/random/boot_id`).
    #[serde(default)]
    pub boot: String,
    /// The next job's number.
    pub next_job: u64,
    /// The next claim's epoch.
    pub next_epoch: u64,
    /// Devices that gpuward took from the host.
    pub devices: BTreeMap<PciAddress, DeviceRecord>,
    /// Live claims.
    pub claims: BTreeMap<ClaimId, ClaimRecord>,
    /// Tenants; the built-in one is always among them.
    #[serde(default = "tenants::built_in")]
    pub tenants: BTreeMap<TenantId, TenantSpec>,
    /// Machines.
    pub machines: BTreeMap<MachineId, MachineRecord>,
    /// Physical functions that are to have virtual ones.
    #[serde(default)]
    pub vfs: BTreeMap<PciAddress, VfIntent>,
    /// Devices that did not come back clean.
    pub quarantines: BTreeMap<PciAddress, Quarantine>,
    /// Requests of the last 24 hours that their callers named.
    pub requests: Vec<NamedRequest>,
}

/// Major and minor version of a file's format: the next minor one may be read, so that an upgrade can be taken back; anything newer
/// may not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Format {
    /// Grows with changes that older versions would misread.
    pub major: u32,
    /// Grows with additions.
    pub minor: u32,
}

/// The format this version writes.
pub const FORMAT: Format = Format { major: 1, minor: 2 };

impl Default for Ledger {
    fn default() -> Self {
        Self {
            format: FORMAT,
            boot: String::new(),
            next_job: 1,
            next_epoch: 1,
            devices: BTreeMap::new(),
            claims: BTreeMap::new(),
            tenants: tenants::built_in(),
            machines: BTreeMap::new(),
            vfs: BTreeMap::new(),
            quarantines: BTreeMap::new(),
            requests: Vec::new(),
        }
    }
}

/// How far a record's effect on the host is: written before the change it announces, and after the change it confirms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// Being taken.
    Pending,
    /// Held.
    Active,
    /// Being given back.
    Releasing,
}

/// A device that gpuward took from the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DeviceRecord {
    /// Which device it is.
    pub identity: Identity,
    /// How far it is.
    pub standing: Standing,
    /// The boot in which it was taken (again).
    #[serde(default)]
    pub boot: String,
    /// What it had before, and gets back.
    pub original: Original,
    /// It was held before and is bound again: where that fails it is still held.
    #[serde(default)]
    pub again: bool,
    /// It was taken for another manager: never placed, claimed or reset, and its domains may start with it.
    #[serde(default)]
    pub lent: bool,
}

impl DeviceRecord {
    /// Whether another manager has it now.
    pub fn is_lent(&self) -> bool {
        self.lent && self.standing == Standing::Active
    }
}

/// How many virtual functions a physical function is to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct VfIntent {
    /// Which device it is.
    pub identity: Identity,
    /// How many it was given; 0 where it had none of gpuward's before.
    pub count: u16,
    /// How many it is being given.
    #[serde(default)]
    pub wished: Option<u16>,
    /// The boot in which it was given them.
    #[serde(default)]
    pub boot: String,
    /// Whether host drivers took new ones before: `sriov_drivers_autoprobe` gets it back with the last of them.
    #[serde(default)]
    pub autoprobe: bool,
}

/// What a device had before gpuward took it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Original {
    /// Its driver and override.
    pub binding: Binding,
    /// `power/control`, where it has one.
    pub power_control: Option<String>,
    /// `d3cold_allowed`, where it has one.
    pub d3cold_allowed: Option<bool>,
    /// `reset_method`; not recorded by versions that let it be.
    #[serde(default)]
    pub reset_method: Option<String>,
}

/// A claim: one machine's hold on one bundle, or that of a manager which runs its own domains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ClaimRecord {
    /// How far it is.
    pub standing: Standing,
    /// Whose.
    pub tenant: TenantId,
    /// For which machine; `None` where another manager runs the domain, and `terms` say when the claim ends.
    pub machine: Option<MachineId>,
    /// The domain that may use the devices.
    pub domain: Uuid,
    /// The devices, in the order they bind.
    pub devices: Vec<PciAddress>,
    /// What the guest is protected by.
    pub isolation: Isolation,
    /// Seconds since 1970.
    pub since: u64,
    /// Grows with each claim ever made.
    pub epoch: u64,
    /// Taken from the host for this claim: given back with it.
    pub on_demand: bool,
    /// The boot in which its devices were bound for it (again); empty where an older version wrote it.
    #[serde(default)]
    pub boot: String,
    /// When it ends, where no machine of gpuward's says so.
    #[serde(default)]
    pub terms: Option<Terms>,
}

impl ClaimRecord {
    /// Whether it ends with this connection.
    pub fn is_of_client(&self, client: &str) -> bool {
        self.terms.as_ref().is_some_and(|terms| terms.release == ReleaseOn::ClientGone && terms.client == client)
    }
}

/// When the claim of a manager that runs its own domains ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Terms {
    /// What ends it, beside a release that somebody asks for.
    pub release: ReleaseOn,
    /// The connection that made it, where it ends with that one; else empty. Only the bus can read it.
    pub client: String,
    /// When it ends in any case, in seconds since 1970; 0: never.
    pub expires: u64,
    /// Its domain was seen running.
    pub was_running: bool,
}

/// What ends a claim that no machine of gpuward's holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReleaseOn {
    /// Only a release that is asked for: its domain may stop, be undefined and be defined again.
    Manual,
    /// Its domain ran and is gone.
    DomainStopped,
    /// The connection that made it has left the bus.
    ClientGone,
}

impl ReleaseOn {
    /// Its word on the bus.
    pub fn word(self) -> &'static str {
        match self {
            Self::Manual => "manual",
            Self::DomainStopped => "domain-stopped",
            Self::ClientGone => "client-gone",
        }
    }
}

/// What stands between a claim and other tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Isolation {
    /// A virtual function: the device itself keeps its functions apart.
    Vf,
    /// Whole functions behind the IOMMU.
    WholeGpu,
}

impl Isolation {
    /// Its word on the bus.
    pub fn word(self) -> &'static str {
        match self {
            Self::Vf => "vf",
            Self::WholeGpu => "whole-gpu",
        }
    }
}

/// A machine and what was last known of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MachineRecord {
    /// What it is to be.
    pub spec: MachineSpec,
    /// Whose.
    pub tenant: TenantId,
    /// What it was last.
    pub state: MachineState,
    /// Why, for a person.
    pub reason: String,
}

/// Why a device is kept out of every plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Quarantine {
    /// Which device it is.
    pub identity: Identity,
    /// What happened, for a person.
    pub reason: String,
    /// Seconds since 1970.
    pub since: u64,
    /// A store into it had not returned: its effect may still come.
    #[serde(default)]
    pub stuck: bool,
}

/// A request that its caller named, so that asking again gives the same job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NamedRequest {
    /// The caller's name for it.
    pub id: String,
    /// The caller.
    pub uid: u32,
    /// SHA-256 of what was asked.
    pub digest: String,
    /// Its job.
    pub job: JobId,
    /// Seconds since 1970.
    pub at: u64,
}

impl Ledger {
    /// The record of a function; `None` where another device sits at its address now.
    pub fn record_of(&self, function: &Function) -> Option<&DeviceRecord> {
        self.devices.get(&function.address).filter(|record| record.identity.matches(&function.identity))
    }

    /// The live claim on a device.
    pub fn claim_on(&self, device: PciAddress) -> Option<(ClaimId, &ClaimRecord)> {
        self.claims.iter().find(|(_, claim)| claim.devices.contains(&device)).map(|(id, claim)| (*id, claim))
    }

    /// Who may use each device of ours, for the libvirt hook: the claim's domain until the claim is being released, or nobody (the
    /// nil UUID). What is lent is for its owner to guard.
    pub fn owners(&self) -> BTreeMap<PciAddress, Uuid> {
        let mut owners: BTreeMap<_, _> =
            self.devices.iter().filter(|(_, record)| !record.is_lent()).map(|(device, _)| (*device, Uuid::nil())).collect();
        owners.extend(self.quarantines.keys().map(|device| (*device, Uuid::nil())));
        for claim in self.claims.values().filter(|claim| claim.standing != Standing::Releasing) {
            owners.extend(claim.devices.iter().map(|device| (*device, claim.domain)));
        }
        owners
    }

    /// Whether a claim is of an earlier boot: whatever used its devices ended with that.
    pub fn is_of_an_earlier_boot(&self, claim: &ClaimRecord) -> bool {
        let of_device = || claim.devices.iter().find_map(|device| self.devices.get(device)).map(|record| &record.boot);
        // Older versions did not write it.
        let boot = if claim.boot.is_empty() { of_device() } else { Some(&claim.boot) };
        boot.is_some_and(|boot| !boot.is_empty() && *boot != self.boot)
    }

    /// The next epoch, used up.
    pub fn take_epoch(&mut self) -> u64 {
        let epoch = self.next_epoch;
        self.next_epoch += 1;
        epoch
    }
}
