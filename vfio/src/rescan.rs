//! Taking functions off the bus and having the kernel find them again: what is left where neither reset nor driver helps (P13).
//!
//! The kernel forgets everything it knew of a function: override, power policy, reset methods, IOMMU group. A driver that matches may
//! take it as soon as it is found. Only functions named go: never a bridge, and nothing below one.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::reset::Step;
use crate::{Deadlines, Host, Identity, Inventory, PciAddress, StoreError, attribute};

/// What was done, and where the functions are now.
#[derive(Debug)]
pub struct Rescan {
    /// In order; the last one is the one that failed.
    pub steps: Vec<Step>,
    /// Where they are now, in the order asked for.
    pub outcome: Result<Vec<PciAddress>, RescanError>,
}

/// Why functions are not back.
#[derive(Debug, thiserror::Error)]
pub enum RescanError {
    /// The kernel refused, or has not answered.
    #[error("cannot be removed and found again")]
    Store(#[source] StoreError),
    /// The kernel took the store, and yet it is there.
    #[error("{device} was removed and is still there")]
    NotRemoved {
        /// Which.
        device: PciAddress,
    },
    /// It does not answer on the bus any more.
    #[error("{identity} was not found again")]
    NotBack {
        /// Which.
        identity: Identity,
    },
}

impl RescanError {
    /// Whether a store has not returned: its effect may still come.
    pub fn is_stuck(&self) -> bool {
        matches!(self, Self::Store(StoreError::Stuck { .. }))
    }
}

/// How long between two looks for functions.
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

/// Removes functions, has all buses looked at, and waits until each is back. Those that are not there are only looked for.
pub fn remove_and_rescan(host: &Host, deadlines: &Deadlines, functions: &[(PciAddress, Identity)]) -> Rescan {
    let mut steps = Vec::new();
    let removed = functions.iter().try_for_each(|(device, _)| timed(&mut steps, "remove", || remove(host, deadlines, *device)));
    // What was removed before one failed has to come back too.
    let rescanned = timed(&mut steps, "rescan", || {
        let stored = store(host, Path::new("sys/bus/pci/rescan"), deadlines);
        stored.map(|()| ((), "all buses".into()))
    });
    let outcome = removed.and(rescanned).and_then(|()| {
        timed(&mut steps, "back", || {
            let found = wait_for(host, deadlines, functions)?;
            let told = found.iter().map(PciAddress::to_string).collect::<Vec<_>>().join(", ");
            Ok((found, told))
        })
    });
    Rescan { steps, outcome }
}

type Told<T> = Result<(T, String), RescanError>;

fn timed<T>(steps: &mut Vec<Step>, name: &'static str, work: impl FnOnce() -> Told<T>) -> Result<T, RescanError> {
    let begun = Instant::now();
    let done = work();
    let result = done.as_ref().map_or_else(ToString::to_string, |(_, told)| told.clone());
    steps.push(Step { name, result, took: begun.elapsed() });
    done.map(|(value, _)| value)
}

fn remove(host: &Host, deadlines: &Deadlines, device: PciAddress) -> Told<()> {
    if !host.exists(attribute(device, "")) {
        return Ok(((), format!("{device} is not there")));
    }
    store(host, &attribute(device, "remove"), deadlines)?;
    let until = Instant::now() + deadlines.read_back;
    while host.exists(attribute(device, "")) {
        if Instant::now() >= until {
            return Err(RescanError::NotRemoved { device });
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(((), device.to_string()))
}

fn wait_for(host: &Host, deadlines: &Deadlines, functions: &[(PciAddress, Identity)]) -> Result<Vec<PciAddress>, RescanError> {
    let until = Instant::now() + deadlines.settle;
    loop {
        let inventory = Inventory::observe(host, 0);
        let find = |identity: &Identity| inventory.devices.values().find(|function| identity.matches(&function.identity));
        let found: Result<Vec<_>, _> =
            functions.iter().map(|(_, identity)| find(identity).map(|function| function.address).ok_or(identity)).collect();
        match found {
            Ok(found) => return Ok(found),
            Err(identity) if Instant::now() >= until => return Err(RescanError::NotBack { identity: identity.clone() }),
            Err(_) => thread::sleep(BETWEEN_LOOKS),
        }
    }
}

fn store(host: &Host, attribute: &Path, deadlines: &Deadlines) -> Result<(), RescanError> {
    host.store(attribute, "1", Instant::now() + deadlines.of(attribute)).map_err(RescanError::Store)
}
