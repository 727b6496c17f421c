//! What a machine, a claim or a tenant is to be: parsed once, at the edge, from TOML or from `a{sv}`.
//!
//! Both become one tree, [`Node`], from which [`MachineSpec::parse`] takes what it knows and refuses the rest by its full path.

mod claim;
mod machine;
mod node;
mod tenant;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vfio::Ids;

pub use node::Node;
pub(crate) use node::parse_size;
pub(crate) use tenant::UNLIMITED;
pub use tenant::{Limit, Names, Owners, Quota, ShareGpu, TenantSpec};

use crate::ledger::{Isolation, ReleaseOn};

/// A machine specification. `docs/machine-spec.md` gives every key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct MachineSpec {
    /// `[a-z0-9][a-z0-9-]{0,62}`, unique in the tenant.
    pub name: String,
    /// Domain UUID and object path.
    pub uuid: Uuid,
    /// Number of virtual CPUs, at least 1.
    pub vcpus: u32,
    /// Bytes of RAM, a multiple of 1 MiB.
    pub memory: u64,
    /// What boots it.
    pub firmware: Firmware,
    /// When it holds its claims.
    pub hold: Hold,
    /// Seconds to start in; 0: computed.
    pub start_deadline: u32,
    /// Seconds a guest gets to shut down.
    pub stop_deadline: u32,
    /// Kill it when they are over.
    pub kill_after_deadline: bool,
    /// The least isolation it accepts.
    #[serde(default)]
    pub minimum_isolation: Option<Isolation>,
    /// Returned untouched.
    pub labels: BTreeMap<String, String>,
    /// The guest's processor.
    pub cpu_mode: CpuMode,
    /// Disks; the first is the boot disk.
    pub disks: Vec<Disk>,
    /// Network interfaces.
    pub networks: Vec<Network>,
    /// Wishes for devices.
    pub devices: Vec<Wish>,
    /// Kernel and initial RAM disk booted directly: the administrator's.
    pub direct_boot: Option<DirectBoot>,
}

/// What a manager that runs its own domains claims: `Manager.Claim` gives every key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimSpec {
    /// Name of the tenant it is for.
    pub tenant: String,
    /// Wishes for devices, at least one.
    pub devices: Vec<Wish>,
    /// UUID of the domain that may use them.
    pub domain: Uuid,
    /// What ends the claims.
    pub release: ReleaseOn,
    /// Seconds after which they end in any case; 0: never.
    pub ttl: u32,
}

/// What boots a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Firmware {
    /// OVMF.
    Uefi,
    /// OVMF with secure boot.
    UefiSecure,
    /// SeaBIOS.
    Bios,
}

/// When a machine holds its claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hold {
    /// From start until gone.
    Running,
    /// From creation until removal.
    Defined,
}

/// The guest's processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpuMode {
    /// As the host's.
    HostPassthrough,
    /// The nearest model that libvirt knows.
    HostModel,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Disk {
    /// Where its bytes are.
    pub source: DiskSource,
    /// `raw` or `qcow2`.
    pub format: DiskFormat,
    /// The guest may not write.
    pub readonly: bool,
}

/// Where a disk's bytes are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskSource {
    /// A volume of a libvirt storage pool.
    Volume {
        /// The pool.
        pool: String,
        /// The volume in it.
        volume: String,
    },
    /// A path of the host: the administrator's.
    Path(String),
}

/// How a disk's bytes are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum DiskFormat {
    Raw,
    Qcow2,
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Network {
    /// What it is plugged into.
    pub source: NetworkSource,
    /// `52:54:00:…`; `None`: derived from UUID and index.
    pub mac: Option<String>,
}

/// What an interface is plugged into.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkSource {
    /// A libvirt network.
    Network(String),
    /// A bridge of the host: the administrator's.
    Bridge(String),
}

/// A wish for devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Wish {
    /// What kind.
    pub kind: WishKind,
    /// How many.
    pub count: u32,
    /// Only this model.
    pub model: Option<Ids>,
    /// Exactly this device, by identity or address.
    pub identity: Option<String>,
    /// All on one NUMA node.
    pub same_numa: bool,
}

/// What kind of device a wish is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WishKind {
    /// A whole GPU.
    Gpu,
    /// A virtual function.
    Vf,
}

impl WishKind {
    /// What stands between such a device and other tenants.
    pub fn isolation(self) -> Isolation {
        match self {
            Self::Gpu => Isolation::WholeGpu,
            Self::Vf => Isolation::Vf,
        }
    }
}

/// A kernel booted directly.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DirectBoot {
    /// Path of the kernel on the host.
    pub kernel: String,
    /// Path of the initial RAM disk; empty: none.
    pub initrd: String,
    /// Kernel command line.
    pub cmdline: String,
}
