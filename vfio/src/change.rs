//! One knob of the host, with the value it has and the value it is to have.
//!
//! A change is data: swapped, it is its own undo. What the kernel couples is one knob: `driver_override` decides which driver may
//! bind, so the two are one [`Binding`]. A change succeeded where the read-back says so, whatever the stores answered.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::{Binding, Deadlines, Host, HostError, PciAddress, StoreError, nvidia, sriov};

/// One knob with the value it has and the value it is to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "knob", rename_all = "kebab-case")]
pub enum Change {
    /// The driver of a function and its `driver_override`.
    Binding {
        /// The function.
        device: PciAddress,
        /// What it has.
        from: Binding,
        /// What it is to have.
        to: Binding,
    },
    /// `power/control`: `on` keeps a function awake, `auto` lets it sleep.
    PowerControl {
        /// The function.
        device: PciAddress,
        /// What it has.
        from: String,
        /// What it is to have.
        to: String,
    },
    /// `d3cold_allowed`: whether its power may be cut.
    D3cold {
        /// The function.
        device: PciAddress,
        /// What it has.
        from: bool,
        /// What it is to have.
        to: bool,
    },
    /// `sriov_numvfs`: how many virtual functions a function has.
    VfCount {
        /// The physical function.
        device: PciAddress,
        /// What it has.
        from: u16,
        /// What it is to have.
        to: u16,
    },
    /// `sriov_drivers_autoprobe`: whether host drivers take virtual functions that are made.
    VfAutoprobe {
        /// The physical function.
        device: PciAddress,
        /// What it has.
        from: bool,
        /// What it is to have.
        to: bool,
    },
    /// `reset_method`: the ways to reset a function, in the order tried; with none it cannot be reset.
    ResetMethod {
        /// The function.
        device: PciAddress,
        /// What it has.
        from: String,
        /// What it is to have.
        to: String,
    },
}

/// How long a change waits for a device's lock to see what it has: longer than an observation, it stands between two stores.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why a change was not made.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// The function is not there any more.
    #[error("{device} has left the host")]
    Gone {
        /// The function.
        device: PciAddress,
    },
    /// The knob has not the value it was planned from: somebody else turned it.
    #[error("{knob} of {device} is {found}, not {expected} as planned; somebody else changed it")]
    Moved {
        /// The function.
        device: PciAddress,
        /// The knob.
        knob: &'static str,
        /// What was planned from.
        expected: String,
        /// What is.
        found: String,
    },
    /// The kernel refused a store, or has not answered it.
    #[error("cannot set {knob} of {device} to {to}")]
    Store {
        /// The function.
        device: PciAddress,
        /// The knob.
        knob: &'static str,
        /// What it was to have.
        to: String,
        /// What the kernel said.
        #[source]
        source: StoreError,
    },
    /// Every store succeeded, and yet the knob has another value.
    #[error("{knob} of {device} was set to {to} and is {found}")]
    NotTaken {
        /// The function.
        device: PciAddress,
        /// The knob.
        knob: &'static str,
        /// What it was to have.
        to: String,
        /// What it has.
        found: String,
    },
    /// The knob cannot be read.
    #[error("cannot tell what {device} has now")]
    Unreadable {
        /// The function.
        device: PciAddress,
        /// Why.
        #[source]
        source: HostError,
    },
}

impl ChangeError {
    /// The function that a driver was asked to take and did not.
    pub fn driver_refused(&self) -> Option<PciAddress> {
        match self {
            Self::Store { device, source: StoreError::Refused { attribute, .. }, .. } => {
                let asks = attribute.file_name().is_some_and(|name| name == "bind" || name == "drivers_probe");
                asks.then_some(*device)
            }
            Self::NotTaken { device, knob: "driver", .. } => Some(*device),
            Self::Gone { .. } | Self::Moved { .. } | Self::Store { .. } | Self::NotTaken { .. } | Self::Unreadable { .. } => None,
        }
    }

    /// Whether a store has not returned: its effect may still come.
    pub fn is_stuck(&self) -> bool {
        matches!(self, Self::Store { source: StoreError::Stuck { .. }, .. })
    }
}

/// The path of an attribute of a function, below the host's root.
pub fn attribute(device: PciAddress, name: &str) -> PathBuf {
    PathBuf::from(format!("sys/bus/pci/devices/{device}/{name}"))
}

impl Binding {
    /// Bound to `driver` because its override names it.
    pub fn overridden(driver: &str) -> Self {
        Self { driver: Some(driver.into()), driver_override: Some(driver.into()) }
    }

    /// What a function has now; `None` where there is no such function.
    ///
    /// # Errors
    /// An attribute that is there and cannot be read.
    pub fn read(host: &Host, device: PciAddress) -> Result<Option<Self>, HostError> {
        if !host.exists(attribute(device, "")) {
            return Ok(None);
        }
        let driver = host.link_name(attribute(device, "driver"))?;
        let driver_override = host.read_locked_within(attribute(device, "driver_override"), PATIENCE)?;
        // The kernel prints an override that is not set as `(null)`.
        let driver_override = driver_override.filter(|name| !name.is_empty() && name != "(null)");
        Ok(Some(Self { driver, driver_override }))
    }
}

fn text(binding: &Binding) -> String {
    let driver = binding.driver.as_deref().unwrap_or("no driver");
    match &binding.driver_override {
        Some(name) if binding.driver.as_ref() != Some(name) => format!("{driver} (override {name})"),
        Some(_) | None => driver.into(),
    }
}

impl Change {
    /// The function it is about.
    pub fn device(&self) -> PciAddress {
        match self {
            Self::Binding { device, .. }
            | Self::PowerControl { device, .. }
            | Self::D3cold { device, .. }
            | Self::VfCount { device, .. }
            | Self::VfAutoprobe { device, .. }
            | Self::ResetMethod { device, .. } => *device,
        }
    }

    /// The knob, as users read it.
    pub fn knob(&self) -> &'static str {
        match self {
            Self::Binding { .. } => "driver",
            Self::PowerControl { .. } => "power/control",
            Self::D3cold { .. } => "d3cold_allowed",
            Self::VfCount { .. } => "sriov_numvfs",
            Self::VfAutoprobe { .. } => "sriov_drivers_autoprobe",
            Self::ResetMethod { .. } => "reset_method",
        }
    }

    /// The value it has, as users read it.
    pub fn from(&self) -> String {
        self.clone().swapped().to()
    }

    /// The value it is to have, as users read it.
    pub fn to(&self) -> String {
        match self {
            Self::Binding { to, .. } => text(to),
            Self::PowerControl { to, .. } | Self::ResetMethod { to, .. } => to.clone(),
            Self::D3cold { to, .. } | Self::VfAutoprobe { to, .. } => u8::from(*to).to_string(),
            Self::VfCount { to, .. } => to.to_string(),
        }
    }

    /// Its undo.
    #[must_use]
    pub fn swapped(self) -> Self {
        match self {
            Self::Binding { device, from, to } => Self::Binding { device, from: to, to: from },
            Self::PowerControl { device, from, to } => Self::PowerControl { device, from: to, to: from },
            Self::D3cold { device, from, to } => Self::D3cold { device, from: to, to: from },
            Self::VfCount { device, from, to } => Self::VfCount { device, from: to, to: from },
            Self::VfAutoprobe { device, from, to } => Self::VfAutoprobe { device, from: to, to: from },
            Self::ResetMethod { device, from, to } => Self::ResetMethod { device, from: to, to: from },
        }
    }

    /// The same change from the value the knob has now.
    ///
    /// # Errors
    /// The function has left, or the knob cannot be read.
    pub fn from_now(&self, host: &Host) -> Result<Self, ChangeError> {
        let device = self.device();
        let unreadable = |source| ChangeError::Unreadable { device, source };
        let gone = ChangeError::Gone { device };
        Ok(match self {
            Self::Binding { to, .. } => {
                let from = Binding::read(host, device).map_err(unreadable)?.ok_or(gone)?;
                Self::Binding { device, from, to: to.clone() }
            }
            Self::PowerControl { to, .. } => {
                let from = host.read(attribute(device, "power/control")).map_err(unreadable)?.ok_or(gone)?;
                Self::PowerControl { device, from, to: to.clone() }
            }
            Self::D3cold { to, .. } => {
                let now = host.read(attribute(device, "d3cold_allowed")).map_err(unreadable)?.ok_or(gone)?;
                Self::D3cold { device, from: now != "0", to: *to }
            }
            Self::VfCount { to, .. } => {
                let from = sriov::count(host, device).map_err(unreadable)?.ok_or(gone)?;
                Self::VfCount { device, from, to: *to }
            }
            Self::VfAutoprobe { to, .. } => {
                let now = host.read(attribute(device, "sriov_drivers_autoprobe")).map_err(unreadable)?.ok_or(gone)?;
                Self::VfAutoprobe { device, from: now != "0", to: *to }
            }
            Self::ResetMethod { to, .. } => {
                let from = host.read(attribute(device, "reset_method")).map_err(unreadable)?.ok_or(gone)?;
                Self::ResetMethod { device, from, to: to.clone() }
            }
        })
    }

    /// Whether both values are the same: nothing would be stored.
    pub fn is_nothing(&self) -> bool {
        match self {
            Self::Binding { from, to, .. } => from == to,
            Self::PowerControl { from, to, .. } => from == to,
            Self::D3cold { from, to, .. } | Self::VfAutoprobe { from, to, .. } => from == to,
            Self::VfCount { from, to, .. } => from == to,
            Self::ResetMethod { from, to, .. } => from == to,
        }
    }

    /// Whether the knob has the value it is to have.
    ///
    /// # Errors
    /// The function has left, or the knob cannot be read.
    pub fn is_made(&self, host: &Host) -> Result<bool, ChangeError> {
        let is_whole = || match self {
            Self::Binding { device, .. } => !nvidia::is_kept(host, *device),
            Self::VfCount { device, to, .. } => sriov::is_whole(host, *device, *to),
            Self::PowerControl { .. } | Self::D3cold { .. } | Self::VfAutoprobe { .. } | Self::ResetMethod { .. } => true,
        };
        Ok(self.from_now(host)?.is_nothing() && is_whole())
    }

    /// Refuses where the knob has not the value it was planned from.
    ///
    /// Power policy is not checked: drivers set it as they bind (vfio-pci allows sleep, and forbids it as it leaves), so a plan
    /// that binds cannot know which value it will meet.
    ///
    /// # Errors
    /// [`ChangeError::Moved`]; the function has left, or the knob cannot be read.
    pub fn check(&self, host: &Host) -> Result<(), ChangeError> {
        let now = self.from_now(host)?;
        match self {
            Self::Binding { device, .. } | Self::VfCount { device, .. } if now != *self && !now.is_nothing() => {
                Err(ChangeError::Moved { device: *device, knob: self.knob(), expected: self.from(), found: now.from() })
            }
            Self::Binding { .. }
            | Self::PowerControl { .. }
            | Self::D3cold { .. }
            | Self::VfCount { .. }
            | Self::VfAutoprobe { .. }
            | Self::ResetMethod { .. } => Ok(()),
        }
    }

    /// Turns the knob from whatever it is now, and reads it back. Stores nothing where it is there already.
    ///
    /// # Errors
    /// What the kernel refused, or what the knob has instead.
    pub fn make(&self, host: &Host, deadlines: &Deadlines) -> Result<(), ChangeError> {
        if self.is_made(host)? {
            return Ok(());
        }
        let stored = match self {
            Self::Binding { device, to, .. } => bind(host, *device, to, deadlines),
            Self::PowerControl { device, to, .. } => store(host, &attribute(*device, "power/control"), to, deadlines),
            Self::D3cold { device, to, .. } => store(host, &attribute(*device, "d3cold_allowed"), if *to { "1" } else { "0" }, deadlines),
            Self::VfCount { device, to, .. } => sriov::make(host, *device, *to, deadlines),
            Self::VfAutoprobe { device, to, .. } => {
                store(host, &attribute(*device, "sriov_drivers_autoprobe"), if *to { "1" } else { "0" }, deadlines)
            }
            // An empty line takes all methods away; nothing written reaches no attribute.
            Self::ResetMethod { device, to, .. } => {
                store(host, &attribute(*device, "reset_method"), if to.is_empty() { "\n" } else { to }, deadlines)
            }
        };
        self.read_back(host, deadlines, stored)
    }

    fn read_back(&self, host: &Host, deadlines: &Deadlines, stored: Result<(), StoreError>) -> Result<(), ChangeError> {
        let (device, knob, to) = (self.device(), self.knob(), self.to());
        // A store that has not returned may still act: what is read now proves nothing.
        if let Err(source @ StoreError::Stuck { .. }) = stored {
            return Err(ChangeError::Store { device, knob, to, source });
        }
        let until = Instant::now() + deadlines.read_back;
        loop {
            let now = self.from_now(host)?;
            match &stored {
                _ if now.is_nothing() && self.is_made(host)? => return Ok(()),
                Err(_) => break,
                Ok(()) if Instant::now() >= until => return Err(ChangeError::NotTaken { device, knob, to, found: now.from() }),
                Ok(()) => thread::sleep(Duration::from_millis(5)),
            }
        }
        stored.map_err(|source| ChangeError::Store { device, knob, to, source })
    }
}

fn store(host: &Host, attribute: &Path, value: &str, deadlines: &Deadlines) -> Result<(), StoreError> {
    host.store(attribute, value, Instant::now() + deadlines.of(attribute))
}

// The override first, in both directions: between unbind and probe any driver may come, and only the override keeps it out.
fn bind(host: &Host, device: PciAddress, to: &Binding, deadlines: &Deadlines) -> Result<(), StoreError> {
    let now = || Binding::read(host, device).ok().flatten().unwrap_or_default();
    let address = device.to_string();
    let unbind = || match now().driver {
        Some(driver) if Some(&driver) != to.driver.as_ref() => {
            nvidia::take(host, device, deadlines)?;
            let stored = store(host, &attribute(device, "driver/unbind"), &address, deadlines);
            // A stuck driver holds the device's lock, and reading the override takes it too (`driver_override_show`).
            if matches!(stored, Err(StoreError::Stuck { .. })) {
                return stored;
            }
            // Somebody else may have unbound it meanwhile; what counts is that it is free.
            if now().driver.as_ref() == Some(&driver) { stored } else { Ok(()) }
        }
        Some(_) | None => Ok(()),
    };
    nvidia::give_back(host, device, deadlines)?;
    if now().driver_override != to.driver_override {
        let name = to.driver_override.as_deref().unwrap_or("\n");
        store(host, &attribute(device, "driver_override"), name, deadlines)?;
    }
    unbind()?;
    let Some(driver) = &to.driver else { return Ok(()) };
    if now().driver.as_ref() == Some(driver) {
        return Ok(());
    }
    let probed = store(host, Path::new("sys/bus/pci/drivers_probe"), &address, deadlines);
    if matches!(probed, Err(StoreError::Stuck { .. })) {
        return probed;
    }
    if now().driver.as_ref() == Some(driver) {
        return Ok(());
    }
    // A probe can fail or take another driver (P13); asked by name, the driver at least says why not.
    unbind()?;
    store(host, &PathBuf::from(format!("sys/bus/pci/drivers/{driver}/bind")), &address, deadlines)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rebind() -> Change {
        let from = Binding { driver: Some("nvidia".into()), driver_override: None };
        Change::Binding { device: "0000:41:00.0".parse().unwrap(), from, to: Binding::overridden("vfio-pci") }
    }

    #[test]
    fn swapped_twice_it_is_itself() {
        assert_ne!(rebind().swapped(), rebind());
        assert_eq!(rebind().swapped().swapped(), rebind());
    }

    #[test]
    fn a_person_reads_the_driver_and_only_a_strange_override() {
        assert_eq!((rebind().from(), rebind().to()), ("nvidia".into(), "vfio-pci".into()));
        let none = Binding { driver: None, driver_override: Some("none".into()) };
        assert_eq!(text(&none), "no driver (override none)");
        assert_eq!(text(&Binding::default()), "no driver");
    }

    #[test]
    fn a_function_that_is_not_there_is_gone_not_unreadable() {
        let root = std::env::temp_dir().join("gpuward-no-such-root");
        let error = rebind().make(&Host::captured(root), &Deadlines::default()).unwrap_err();
        assert!(matches!(error, ChangeError::Gone { .. }), "{error}");
    }
}
