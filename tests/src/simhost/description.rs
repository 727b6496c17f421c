//! A host as data: what `tests/hosts/<name>.toml` holds.
//!
//! A model is written once, functions are places where one is plugged in. A place is the path of bridges as sysfs has it, so that
//! a description reads like `ls -l /sys/bus/pci/devices`.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::Deserialize;
use vfio::PciAddress;

/// A whole host.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Description {
    /// What it is and what it is for, for a person.
    pub summary: String,
    /// Whether the kernel runs with an IOMMU; without one there are no groups.
    #[serde(default = "yes")]
    pub iommu: bool,
    /// Bytes of RAM in GiB.
    #[serde(default = "default_memory")]
    pub memory_gib: u64,
    /// CPUs, spread over the NUMA nodes.
    #[serde(default = "default_cpus")]
    pub cpus: u32,
    /// NUMA nodes.
    #[serde(default = "one")]
    pub numa_nodes: u32,
    /// What can be plugged in, by name.
    pub model: BTreeMap<String, Model>,
    /// What is plugged in where.
    pub function: Vec<Placed>,
    /// Processes that hold device nodes.
    #[serde(default)]
    pub process: Vec<Process>,
    /// Mounted file systems, as lines of `/proc/mounts`.
    #[serde(default)]
    pub mounts: Vec<String>,
}

/// A kind of function.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Model {
    /// `vendor:device` in hexadecimal.
    pub id: IdPair,
    /// `vendor:device` of the subsystem.
    #[serde(default)]
    pub subsystem: IdPair,
    /// Base class, subclass and interface as six hexadecimal digits.
    pub class: String,
    /// Revision id.
    #[serde(default)]
    pub revision: u8,
    /// Regions, as `<index> <size> <kind>`: `0 16MiB mem64 pref`.
    #[serde(default)]
    pub bars: Vec<BarSpec>,
    /// For bridges: what sort of PCIe port.
    pub port: Option<Port>,
    /// Access control services of a port, of `SV TB RR CR UF EC DT`; `None`: no such capability.
    pub acs: Option<String>,
    /// The driver it is bound to when the host has booted.
    pub driver: Option<String>,
    /// Reset methods in the kernel's order; empty: none, so no `reset` attribute.
    #[serde(default)]
    pub reset: String,
    /// Speed of its link and lanes, as `32.0 GT/s PCIe x16`.
    pub link: Option<String>,
    /// Its virtual functions.
    pub sriov: Option<SriovModel>,
}

/// The SR-IOV capability of a model.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct SriovModel {
    /// Most virtual functions.
    pub total: u16,
    /// Routing id of the first one, relative to the physical function.
    pub offset: u16,
    /// Distance between two of them.
    pub stride: u16,
    /// The model of each.
    pub model: String,
}

/// A function in its place.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Placed {
    /// Below `sys/devices`: `pci0000:15/0000:15:01.0/0000:16:00.0`.
    pub path: String,
    /// Name of its model.
    pub model: String,
    /// Its IOMMU group; not given: the next free one, alone.
    pub group: Option<u32>,
    /// NUMA node; -1: the firmware names none.
    #[serde(default = "no_node")]
    pub numa: i32,
    /// Device Serial Number.
    pub serial: Option<u64>,
    /// Whether the firmware showed its console on it.
    pub boot_vga: Option<bool>,
    /// Who claims the beginning of a region in `/proc/iomem`, by index of the region.
    #[serde(default)]
    pub claimed: BTreeMap<String, String>,
    /// A driver other than the model's; empty: none.
    pub driver: Option<String>,
    /// How many virtual functions are enabled.
    #[serde(default)]
    pub vfs: u16,
    /// More files below the function, by name.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
}

/// A process of the host, for `/proc`.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Process {
    /// Its process id.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// Its arguments.
    pub cmdline: Vec<String>,
    /// Its control group (`/system.slice/nvidia-persistenced.service`).
    pub cgroup: String,
    /// Nodes it has open.
    #[serde(default)]
    pub opens: Vec<String>,
    /// Nodes it has mapped.
    #[serde(default)]
    pub maps: Vec<String>,
}

/// A vendor and a device id.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(try_from = "String")]
pub struct IdPair(pub u16, pub u16);

/// A region of a model.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct BarSpec {
    /// 0 to 6.
    pub index: u8,
    /// Bytes.
    pub size: u64,
    /// Memory rather than I/O ports.
    pub memory: bool,
    /// 64 bits wide.
    pub wide: bool,
    /// Prefetchable.
    pub prefetchable: bool,
}

/// A sort of PCIe port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Port {
    /// Below the root complex.
    Root,
    /// Of a switch, towards the root.
    Upstream,
    /// Of a switch, towards a device.
    Downstream,
}

/// A description that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadDescription(pub String);

impl Description {
    /// Reads a description.
    ///
    /// # Errors
    /// Text that is no description, with its line.
    pub fn parse(text: &str) -> Result<Self, BadDescription> {
        toml::from_str(text).map_err(|error| BadDescription(error.to_string()))
    }

    /// The model of a placed function.
    ///
    /// # Errors
    /// No model of that name.
    pub fn model_of(&self, name: &str) -> Result<&Model, BadDescription> {
        self.model.get(name).ok_or_else(|| BadDescription(format!("there is no model {name}")))
    }
}

impl Placed {
    /// A function of `model` at `path`, with nothing else said about it.
    pub fn new(path: impl Into<String>, model: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            model: model.into(),
            group: None,
            numa: no_node(),
            serial: None,
            boot_vga: None,
            claimed: BTreeMap::new(),
            driver: None,
            vfs: 0,
            files: BTreeMap::new(),
        }
    }

    /// Its address: the last element of its path.
    ///
    /// # Errors
    /// A path that does not end in an address.
    pub fn address(&self) -> Result<PciAddress, BadDescription> {
        let name = self.path.rsplit('/').next().unwrap_or_default();
        name.parse().map_err(|_| BadDescription(format!("{} does not end in a PCI address", self.path)))
    }
}

impl TryFrom<String> for IdPair {
    type Error = BadDescription;

    fn try_from(text: String) -> Result<Self, BadDescription> {
        let parse = || {
            let (vendor, device) = text.split_once(':')?;
            Some(Self(u16::from_str_radix(vendor, 16).ok()?, u16::from_str_radix(device, 16).ok()?))
        };
        parse().ok_or_else(|| BadDescription(format!("{text:?} is no vendor:device")))
    }
}

impl TryFrom<String> for BarSpec {
    type Error = BadDescription;

    fn try_from(text: String) -> Result<Self, BadDescription> {
        text.parse()
    }
}

impl FromStr for BarSpec {
    type Err = BadDescription;

    fn from_str(text: &str) -> Result<Self, BadDescription> {
        let bad = || BadDescription(format!("{text:?} is no region; write `0 16MiB mem64 pref`"));
        let mut words = text.split(' ');
        let index = words.next().and_then(|word| word.parse().ok()).ok_or_else(bad)?;
        let size = words.next().and_then(parse_size).ok_or_else(bad)?;
        let kind = words.next().ok_or_else(bad)?;
        if !["mem64", "mem32", "io"].contains(&kind) {
            return Err(bad());
        }
        let prefetchable = words.next() == Some("pref");
        Ok(Self { index, size, memory: kind != "io", wide: kind == "mem64", prefetchable })
    }
}

fn parse_size(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit {
        "" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    Some(number.parse::<u64>().ok()? << shift)
}

fn yes() -> bool {
    true
}

fn one() -> u32 {
    1
}

fn no_node() -> i32 {
    -1
}

fn default_memory() -> u64 {
    64
}

fn default_cpus() -> u32 {
    16
}
