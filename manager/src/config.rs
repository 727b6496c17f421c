//! `gpuward.toml`: what gpuward may do with which device.
//!
//! Without a rule a device is only observed. A file that is not understood as a whole is not obeyed in part: its faults stop changes,
//! not the daemon.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use serde::{Deserialize, Serialize};
use vfio::{Function, Inventory, Kind, PciAddress};

mod keys;
mod parse;
#[cfg(test)]
mod tests;

/// What the configuration allows with a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Use {
    /// Looked at, never touched.
    #[default]
    Observe,
    /// May be taken into the pool and handed out; stays there between machines.
    Pool,
    /// Taken from the host when claimed and given back when released.
    OnDemand,
    /// Bound and watched for another manager; never placed, claimed or reset.
    Lend {
        /// Whose it is (`nova`).
        to: String,
    },
}

impl Use {
    /// Its word on the bus and in the configuration.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Observe => "observe",
            Self::Pool => "pool",
            Self::OnDemand => "on-demand",
            Self::Lend { .. } => "lend",
        }
    }
}

/// What `gpuward.toml` and its drop-ins say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// `[libvirt]`.
    pub libvirt: Libvirt,
    /// `[[devices]]`: the first rule that matches decides.
    pub devices: Vec<Rule>,
    /// `[limits]`.
    pub limits: Limits,
    /// `[policy]`.
    pub policy: Policy,
}

/// `[libvirt]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Libvirt {
    /// Where libvirt is.
    pub uri: String,
}

impl Default for Libvirt {
    fn default() -> Self {
        Self { uri: "qemu:///system".into() }
    }
}

/// One of `[[devices]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Which devices it is for.
    pub matches: Match,
    /// What may be done with them.
    pub use_: Use,
}

/// Which devices a rule is for: those that agree with everything given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// Vendor id (`10de`).
    pub vendor: Option<u16>,
    /// Device id (`2330`).
    pub device: Option<u16>,
    /// Subsystem vendor and device id (`10de:16c1`).
    pub subsystem: Option<(u16, u16)>,
    /// The first hexadecimal digits of the class (`03`, `0302`, `030200`).
    pub class: Option<String>,
    /// What it is to gpuward (`gpu`).
    pub kind: Option<Kind>,
    /// The slot path from the root, as in an identity; everything below it matches too. Bus numbers in it are passed over.
    pub slot: Option<Vec<String>>,
    /// Device serial number.
    pub serial: Option<u64>,
    /// Where it sits now.
    pub address: Option<PciAddress>,
}

/// `[limits]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bundles moved at once.
    pub parallel_bundles: usize,
    /// Ended jobs that are kept.
    pub jobs_kept: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { parallel_bundles: 8, jobs_kept: 1000 }
    }
}

/// `[policy]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Units of the host that may be paused while they hold a device.
    pub pause_units: Vec<String>,
    /// Devices in quarantine may be taken off the bus and found again.
    pub remove_rescan: bool,
}

/// One thing that is wrong with the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The file.
    pub file: PathBuf,
    /// The line, counted from 1; 0 for the file as a whole.
    pub line: usize,
    /// What is wrong, with the full path of the key.
    pub message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.file.display(), self.message),
            line => write!(f, "{}:{line}: {}", self.file.display(), self.message),
        }
    }
}

impl Config {
    /// Reads `file`, and then `*.toml` in the folder of its name with `.d`, by name. Rules add up in that order; of single values
    /// the last one counts. Without any of these files everything is only observed.
    ///
    /// # Errors
    /// Everything that is wrong with them.
    pub fn load(file: &Path) -> Result<Self, Vec<Fault>> {
        let mut config = Self::default();
        let mut faults = Vec::new();
        let files = drop_ins(file).unwrap_or_else(|fault| {
            faults.push(fault);
            Vec::new()
        });
        for file in std::iter::once(file.to_owned()).chain(files) {
            match fs::read_to_string(&file) {
                Ok(text) => faults.extend(parse::merge(&mut config, &file, &text)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => faults.push(Fault { file, line: 0, message: format!("cannot be read: {error}") }),
            }
        }
        if faults.is_empty() { Ok(config) } else { Err(faults) }
    }

    /// What the rules say of a function; observed where none matches.
    pub fn use_of(&self, function: &Function) -> Use {
        self.rule_for(function).cloned().unwrap_or_default()
    }

    /// What may be done with a device where it is: a companion that no rule names goes with the GPU in its slot.
    pub fn use_in(&self, inventory: &Inventory, function: &Function) -> Use {
        if let Some(use_) = self.rule_for(function) {
            return use_.clone();
        }
        let slot = |address: PciAddress| (address.domain(), address.bus(), address.device());
        let beside = |other: &&Function| other.kind == Kind::Gpu && slot(other.address) == slot(function.address);
        match function.kind {
            Kind::Companion => inventory.devices.values().find(beside).map(|gpu| self.use_of(gpu)).unwrap_or_default(),
            Kind::Gpu | Kind::VirtualFunction | Kind::Switch | Kind::Bridge | Kind::PhysicalFunction | Kind::Other => Use::Observe,
        }
    }

    fn rule_for(&self, function: &Function) -> Option<&Use> {
        self.devices.iter().find(|rule| rule.matches.fits(function)).map(|rule| &rule.use_)
    }
}

fn drop_ins(file: &Path) -> Result<Vec<PathBuf>, Fault> {
    let mut folder = file.as_os_str().to_owned();
    folder.push(".d");
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Fault { file: folder.into(), line: 0, message: format!("cannot be read: {error}") }),
    };
    let mut files: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    Ok(files)
}

impl Match {
    fn fits(&self, function: &Function) -> bool {
        let ids = function.ids;
        let class = format!("{:06x}", function.class);
        agrees(self.vendor, ids.vendor)
            && agrees(self.device, ids.device)
            && agrees(self.subsystem, (ids.subsystem_vendor, ids.subsystem_device))
            && agrees(self.kind, function.kind)
            && agrees(self.address, function.address)
            && self.class.as_ref().is_none_or(|wanted| class.starts_with(wanted))
            && self.serial.is_none_or(|wanted| function.identity.serial == Some(wanted))
            && self.slot.as_ref().is_none_or(|wanted| slot_path(&function.identity.slot).starts_with(wanted))
    }
}

fn agrees<T: PartialEq>(wanted: Option<T>, found: T) -> bool {
    wanted.is_none_or(|wanted| wanted == found)
}

// `pci0000:40/0000:40:01.0` as people copy it from sysfs is `pci0000:40/01.0`: bus numbers below the root renumber.
fn slot_path(text: &str) -> Vec<String> {
    let parts = text.split('/').enumerate();
    parts.map(|(index, part)| if index == 0 { part } else { part.rsplit(':').next().unwrap_or(part) }.to_owned()).collect()
}
