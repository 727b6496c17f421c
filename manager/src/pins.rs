//! Pins: which functions no driver of the host may have at boot.
//!
//! Before any module is loaded a script (`data/boot/pin`) gives each function that a pin names its override. Pins are made from the ledger and
//! written whenever they change; the initramfs has a copy, which may be older. The script notes what it has done, so that [`noted`]
//! says which functions that old copy kept for nobody.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::str::FromStr;

use vfio::{Function, Identity, Ids, Inventory};

use crate::config::{Config, Use};
use crate::ledger::store::{self, StoreFailed};
use crate::ledger::{DeviceRecord, Ledger, Standing};

/// A function that is kept for a driver. Serial numbers are in no pin: a script cannot read them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Where it sits, as in its identity.
    pub slot: String,
    /// What it is.
    pub ids: Ids,
    /// Its VFIO driver.
    pub driver: String,
}

impl Pin {
    /// Whether it is for this function.
    pub fn names(&self, identity: &Identity) -> bool {
        self.slot == identity.slot && self.ids == identity.ids
    }
}

/// As the script reads it: `pci0000:40/01.0/00.0 10de:2330:10de:16c1 vfio-pci`.
impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids = self.ids;
        write!(f, "{} {ids}:{:04x}:{:04x} {}", self.slot, ids.subsystem_vendor, ids.subsystem_device, self.driver)
    }
}

/// A line that is no pin.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no pin")]
pub struct NoPin(String);

impl FromStr for Pin {
    type Err = NoPin;

    fn from_str(line: &str) -> Result<Self, NoPin> {
        let words: Vec<_> = line.split_whitespace().collect();
        let pin = match words.as_slice() {
            [slot, ids, driver] => parse_ids(ids).map(|ids| Self { slot: (*slot).into(), ids, driver: (*driver).into() }),
            _ => None,
        };
        pin.ok_or_else(|| NoPin(line.into()))
    }
}

fn parse_ids(text: &str) -> Option<Ids> {
    let ids: Option<Vec<_>> = text.split(':').map(|id| u16::from_str_radix(id, 16).ok()).collect();
    match ids?.as_slice() {
        &[vendor, device, subsystem_vendor, subsystem_device] => Some(Ids { vendor, device, subsystem_vendor, subsystem_device }),
        _ => None,
    }
}

/// What is to be kept at the next boot: what gpuward owns and may use.
///
/// Not what is in quarantine, as whatever went wrong with it must not go wrong in the way of a boot; not the host's console; and not what was
/// taken for one run of a machine, which ends with the boot.
pub fn of(ledger: &Ledger, config: &Config, inventory: &Inventory) -> Vec<Pin> {
    let owned = inventory.devices.values().filter(|function| ledger.record_of(function).is_some_and(is_held));
    let kept = owned.filter(|function| {
        let for_one_run = ledger.claim_on(function.address).is_some_and(|(_, claim)| claim.on_demand && claim.machine.is_some());
        let is_allowed = config.use_in(inventory, function) != Use::Observe;
        is_allowed && !for_one_run && !function.boot_vga && !ledger.quarantines.contains_key(&function.address)
    });
    let pin = |function: &Function| {
        let identity = &function.identity;
        Pin { slot: identity.slot.clone(), ids: identity.ids, driver: function.vfio_driver.clone() }
    };
    kept.map(pin).collect()
}

fn is_held(record: &DeviceRecord) -> bool {
    match record.standing {
        Standing::Active => true,
        Standing::Pending | Standing::Releasing => false,
    }
}

/// As they lie in `pins` of the state directory.
pub fn text(pins: &[Pin]) -> String {
    pins.iter().map(|pin| format!("{pin}\n")).collect()
}

/// The pins that lie in `state_dir`; empty where there are none.
///
/// # Errors
/// They cannot be read.
pub fn load(state_dir: &Path) -> io::Result<String> {
    read(&state_dir.join("pins"))
}

/// Replaces the pins in `state_dir`.
///
/// # Errors
/// The file could not be replaced; the old one is still there.
pub fn save(state_dir: &Path, text: &str) -> Result<(), StoreFailed> {
    store::replace_text(&state_dir.join("pins"), text)
}

/// What was kept in this boot, as the script noted it in `run_dir`.
///
/// # Errors
/// The note cannot be read. A line that is no pin is passed over.
pub fn noted(run_dir: &Path) -> io::Result<Vec<Pin>> {
    let text = read(&run_dir.join("pinned"))?;
    let pins = text.lines().filter_map(|line| line.parse().map_err(|error| tracing::warn!("{}/pinned: {error}", run_dir.display())).ok());
    Ok(pins.collect())
}

/// Removes the note: what it said was looked at.
///
/// # Errors
/// The file system's.
pub fn forget_noted(run_dir: &Path) -> io::Result<()> {
    match fs::remove_file(run_dir.join("pinned")) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn read(path: &Path) -> io::Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        read => read,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_is_read_as_it_was_written() {
        let line = "pci0000:40/01.0/00.0 10de:2330:10de:16c1 vfio-pci";
        assert_eq!(line.parse::<Pin>().unwrap().to_string(), line);
        for bad in ["", "a b", "pci0000:40/01.0 10de:2330 vfio-pci", "slot 10de:2330:10de:xyz vfio-pci", "slot 1:2:3:4 vfio-pci more"] {
            assert!(bad.parse::<Pin>().is_err(), "{bad:?}");
        }
    }
}
