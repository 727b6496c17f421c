//! The narrow seam through which a host is changed: stores into attributes, and its service manager.
//!
//! Whatever may wait for a driver has a deadline here. A store that does not return in time is *stuck*: it is never tried again
//! while it lives, never killed, and its end is told when it comes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::PciAddress;

/// What answers stores into kernel attributes: the Linux of this host, or a simulated kernel.
pub trait Kernel: Send + Sync {
    /// Stores `value` in `attribute`, a path below the host's root (`sys/bus/pci/drivers_probe`).
    ///
    /// Gives up at `deadline` with [`StoreError::Stuck`], leaving the caller alive.
    ///
    /// # Errors
    /// The errno the kernel answered the write with, or `Stuck`.
    fn store(&self, attribute: &Path, value: &str, deadline: Instant) -> Result<(), StoreError>;

    /// Reads the file at `path` on this machine, whose reader takes a lock that a stuck driver may hold: `driver_override_show`
    /// (drivers/pci/pci-sysfs.c), `sriov_numvfs_show` (drivers/pci/iov.c), `/proc/<pid>/maps` (fs/proc/task_mmu.c).
    ///
    /// # Errors
    /// The file system's; `WouldBlock` where the lock is not free until `deadline`.
    fn read_locked(&self, path: &Path, deadline: Instant) -> io::Result<Vec<u8>> {
        let _ = deadline;
        fs::read(path)
    }

    /// Stores that have not returned, also those of a process that has ended.
    fn stuck_stores(&self) -> Vec<StuckStore> {
        Vec::new()
    }

    /// Has `hook` called, from another thread, for each store that returns after its deadline.
    fn on_late_store(&self, hook: LateHook) {
        drop(hook);
    }

    /// Whether a unit of the host's service manager is active (`ActiveState` of systemd).
    ///
    /// # Errors
    /// It cannot be asked.
    fn unit_is_active(&self, unit: &str, deadline: Instant) -> Result<bool, UnitError> {
        let _ = deadline;
        Err(UnitError::none(unit))
    }

    /// Whether the host shuts down (`SystemState` of systemd is `stopping`, from the moment that a shutdown is queued).
    ///
    /// # Errors
    /// It cannot be asked.
    fn is_shutting_down(&self, deadline: Instant) -> Result<bool, UnitError> {
        let _ = deadline;
        Ok(false)
    }

    /// Asks the host's service manager for a change, and waits until it is made.
    ///
    /// # Errors
    /// It cannot be asked, the unit failed, or it was not done at `deadline`.
    fn unit(&self, ask: &UnitAsk, deadline: Instant) -> Result<(), UnitError> {
        let _ = deadline;
        Err(UnitError::none(ask.unit()))
    }
}

/// Why a store into a kernel attribute failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The kernel refused the write.
    #[error("the kernel refused {value:?} in {}", attribute.display())]
    Refused {
        /// The attribute, below the host's root.
        attribute: PathBuf,
        /// What was to be stored.
        value: String,
        /// The errno.
        #[source]
        source: io::Error,
    },
    /// The write did not return before its deadline. Its effect may still come.
    #[error("storing {value:?} in {} has not returned; the driver is stuck in the kernel", attribute.display())]
    Stuck {
        /// The attribute, below the host's root.
        attribute: PathBuf,
        /// What was to be stored.
        value: String,
    },
}

impl StoreError {
    /// NVIDIA's driver says that the GPU is in use: it could not be kept from its users.
    pub fn is_in_use(&self) -> bool {
        matches!(self, Self::Refused { attribute, .. } if attribute.ends_with("unbindLock"))
    }

    /// The errno the kernel answered with; `None` where it has not answered.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused { source, .. } => source.raw_os_error(),
            Self::Stuck { .. } => None,
        }
    }
}

/// A store that has not returned before its deadline. Its effect may still come.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StuckStore {
    /// The attribute, below the host's root.
    pub attribute: PathBuf,
    /// What is stored.
    pub value: String,
    /// The process that stores it; 0 where it is none of its own.
    pub pid: u32,
}

impl StuckStore {
    /// The device it is about: named by the attribute's directory, or by the value.
    pub fn device(&self) -> Option<PciAddress> {
        let named = self.attribute.iter().filter_map(|name| name.to_str()?.parse().ok()).next_back();
        named.or_else(|| self.value.trim().parse().ok())
    }
}

/// How a stuck store ended after all.
#[derive(Clone, Debug)]
pub struct LateStore {
    /// Which.
    pub store: StuckStore,
    /// What the kernel answered: 0 or an errno; `None` where its process left no answer, or answers to a daemon that has ended.
    pub errno: Option<i32>,
}

/// Told of stores that return late.
pub type LateHook = Arc<dyn Fn(LateStore) + Send + Sync>;

/// What the service manager is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnitAsk {
    /// Stops a unit.
    Stop(String),
    /// Starts a unit.
    Start(String),
    /// Runs a program to its end in a unit of its own, outside the daemon's sandbox.
    Run {
        /// The unit's name (`gpuward-sriov-41-00.0.service`).
        unit: String,
        /// The program's path and its arguments.
        command: Vec<String>,
    },
}

impl UnitAsk {
    /// The unit it is about.
    pub fn unit(&self) -> &str {
        match self {
            Self::Stop(unit) | Self::Start(unit) | Self::Run { unit, .. } => unit,
        }
    }
}

/// A unit that could not be asked for, or has failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} {unit}")]
pub struct UnitError {
    /// "stop", "start", "run", "look at".
    pub verb: &'static str,
    /// The unit.
    pub unit: String,
    /// Why.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl UnitError {
    fn none(unit: &str) -> Self {
        Self { verb: "ask for", unit: unit.into(), source: "there is no service manager".into() }
    }
}

/// The kernel of a captured tree: it refuses every store.
#[derive(Debug)]
pub struct ReadOnly;

impl Kernel for ReadOnly {
    fn store(&self, attribute: &Path, value: &str, _deadline: Instant) -> Result<(), StoreError> {
        let source = io::Error::from(io::ErrorKind::ReadOnlyFilesystem);
        Err(StoreError::Refused { attribute: attribute.into(), value: value.into(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_about_the_device_in_its_path_or_in_its_value() {
        let store = |attribute: &str, value: &str| StuckStore { attribute: attribute.into(), value: value.into(), pid: 1 };
        let device = Some("0000:41:00.0".parse().unwrap());
        assert_eq!(store("sys/bus/pci/devices/0000:41:00.0/driver/unbind", "0000:41:00.0").device(), device);
        assert_eq!(store("sys/bus/pci/devices/0000:41:00.0/sriov_numvfs", "4").device(), device);
        assert_eq!(store("sys/bus/pci/drivers_probe", "0000:41:00.0").device(), device);
        assert_eq!(store("sys/bus/pci/rescan", "1").device(), None);
    }
}
