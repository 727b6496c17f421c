//! One PCI function as sysfs shows it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{GroupId, PciAddress};

/// One PCI function. Fields that could not be read are `None` or empty and named in `unreadable`.
///
/// Source of each: `Documentation/ABI/testing/sysfs-bus-pci` of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Where it sits now.
    pub address: PciAddress,
    /// What it is to gpuward.
    pub kind: Kind,
    /// Vendor, device and subsystem ids.
    pub ids: Ids,
    /// Base class, subclass and programming interface (`0x030200` is a 3D controller).
    pub class: u32,
    /// Revision id.
    pub revision: u8,
    /// Vendor's name by pci-ids.
    pub vendor_name: Option<String>,
    /// Model's name by pci-ids.
    pub model_name: Option<String>,
    /// What it is called across reboots and renumbering.
    pub identity: Identity,
    /// Memory and I/O regions with a size.
    pub bars: Vec<Bar>,
    /// PCIe link; `None` for functions without one.
    pub link: Option<Link>,
    /// NUMA node; `None` where the firmware names none.
    pub numa_node: Option<u32>,
    /// Bound driver.
    pub driver: Option<String>,
    /// `driver_override`, where set.
    pub driver_override: Option<String>,
    /// A driver has had its lock for longer than a moment: what is read under it (`driver_override`) is what was read last.
    pub locked: bool,
    /// IOMMU group.
    pub group: Option<GroupId>,
    /// Reset methods in the order the kernel tries them (`flr`, `bus`, …).
    pub reset_methods: Vec<String>,
    /// Every other function on its bus: a reset of the bus reaches them too.
    pub on_same_bus: Vec<PciAddress>,
    /// The bridge above, where it can reset that bus with all that is on it (`reset_subordinate`, Linux 6.13).
    pub bus_reset_at: Option<PciAddress>,
    /// Power state and policy.
    pub power: Power,
    /// What a physical function says of its virtual functions.
    pub sriov: Option<Sriov>,
    /// The physical function of a virtual function.
    pub physical_function: Option<PciAddress>,
    /// Which vGPU interface its driver shows, if any.
    pub vgpu: Option<VgpuInterface>,
    /// Whether the firmware showed its console on it.
    pub boot_vga: bool,
    /// Names in `/proc/iomem` that claim a part of its BARs beside PCI itself and its driver (`efifb`, `simplefb`, …).
    pub bar_claimants: Vec<String>,
    /// `vfio-dev/vfioN`, present while bound to a VFIO driver.
    pub vfio_device: Option<String>,
    /// The VFIO driver that fits best by `modules.alias`; `vfio-pci` where no variant driver does.
    pub vfio_driver: String,
    /// Fields that could not be read, as `field: reason`.
    pub unreadable: Vec<String>,
}

/// What a PCI function is to gpuward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A display or 3D controller or processing accelerator of a GPU vendor.
    Gpu,
    /// A virtual function, of a GPU or another device.
    VirtualFunction,
    /// An NVIDIA NVSwitch (class `0680`, vendor `10de`).
    Switch,
    /// A GPU's audio, USB or USB-C function in the same slot.
    Companion,
    /// A PCI or PCIe bridge: never in the way of a group's viability.
    Bridge,
    /// Anything else that can have virtual functions (a network card): it makes them, and is never handed out itself.
    PhysicalFunction,
    /// Anything else.
    Other,
}

/// The ids by which drivers match.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Ids {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Subsystem vendor id.
    pub subsystem_vendor: u16,
    /// Subsystem device id.
    pub subsystem_device: u16,
}

impl fmt::Display for Ids {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:04x}", self.vendor, self.device)
    }
}

/// What a function is called across reboots and renumbering: where it is plugged in, what it is, and its serial number.
///
/// Printed as `<slot path>/<vendor>:<device>:<subsystem vendor>:<subsystem device>[/<serial>]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Identity {
    /// The bridges above it as device and function numbers, without bus numbers: those renumber
    /// (`pci0000:40/01.0/00.0`). The last element is the function itself.
    pub slot: String,
    /// Vendor, device and subsystem.
    pub ids: Ids,
    /// Device Serial Number (PCIe extended capability 0003), where there is one and it may be read.
    pub serial: Option<u64>,
}

/// One region of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// 0 to 5; 6 is the expansion ROM.
    pub index: u8,
    /// Address, 0 where unassigned.
    pub base: u64,
    /// Size in bytes.
    pub size: u64,
    /// Memory rather than I/O ports.
    pub memory: bool,
    /// May be placed above 4 GiB.
    pub wide: bool,
    /// Reads have no side effects.
    pub prefetchable: bool,
}

/// A PCIe link. Speeds as the kernel prints them (`16.0 GT/s PCIe`, `Unknown`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Speed now.
    pub speed: String,
    /// Lanes now.
    pub width: u32,
    /// Highest speed.
    pub max_speed: String,
    /// Most lanes.
    pub max_width: u32,
}

/// Power state and policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Power {
    /// `power_state`: unknown, error, D0, D1, D2, D3hot or D3cold.
    pub state: Option<String>,
    /// `power/control`: `on` keeps it awake, `auto` lets it sleep.
    pub control: Option<String>,
    /// `d3cold_allowed`.
    pub d3cold_allowed: Option<bool>,
}

/// What a physical function says of its virtual functions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sriov {
    /// Most that it can have.
    pub total: u16,
    /// How many it has.
    pub enabled: u16,
    /// Whether host drivers take new ones.
    pub autoprobe: bool,
    /// The virtual functions by number.
    pub functions: Vec<PciAddress>,
}

/// How a driver offers virtual GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VgpuInterface {
    /// `mdev_supported_types` below the function.
    Mdev,
    /// `nvidia/current_vgpu_type` below a virtual function.
    VendorVfio,
}

/// Observed: the driver and what binds it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// Bound driver.
    pub driver: Option<String>,
    /// `driver_override`; the kernel couples it with the driver: one knob.
    #[serde(rename = "override")]
    pub driver_override: Option<String>,
}

impl Identity {
    /// Whether both name the same function; a serial number that one side could not read does not tell them apart.
    pub fn matches(&self, other: &Self) -> bool {
        let serials_agree = self.serial.is_none() || other.serial.is_none() || self.serial == other.serial;
        self.slot == other.slot && self.ids == other.ids && serials_agree
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}:{:04x}:{:04x}", self.slot, self.ids, self.ids.subsystem_vendor, self.ids.subsystem_device)?;
        self.serial.map_or(Ok(()), |serial| write!(f, "/{serial:016x}"))
    }
}

impl Function {
    /// Whether a VFIO driver has it.
    pub fn is_on_vfio(&self) -> bool {
        self.vfio_device.is_some() || self.driver.as_deref() == Some("vfio-pci")
    }

    /// The driver and override it has now.
    pub fn binding(&self) -> Binding {
        Binding { driver: self.driver.clone(), driver_override: self.driver_override.clone() }
    }

    /// The group that a program opens to use it, as `/dev/vfio/31`.
    pub fn vfio_group_node(&self) -> Option<String> {
        Some(format!("dev/vfio/{}", self.group?))
    }
}
