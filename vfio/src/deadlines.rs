//! How long the kernel and the service manager may take, as data.

use std::path::Path;
use std::time::Duration;

/// How long a store may take before it counts as stuck, and a read-back before it counts as failed.
///
/// `bind` and `drivers_probe` run the driver's probe: nvgrace-gpu-vfio-pci alone waits 30 s for its memory.
/// `unbind` waits for the driver's users. `reset` waits up to 65.5 s for a function to come back before the kernel itself gives up
/// (`pci_dev_wait`, "not ready 65535ms after", P37). The others only set a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// `drivers/*/bind`, `drivers_probe` and `rescan`.
    pub bind: Duration,
    /// `driver/unbind` and `remove`.
    pub unbind: Duration,
    /// `reset`.
    pub reset: Duration,
    /// Until a function that was woken is awake.
    pub wake: Duration,
    /// Until a function that was reset answers as itself, its regions in place.
    pub settle: Duration,
    /// `sriov_numvfs`, and NVIDIA's tool in its place: drivers make virtual functions one after the other (i40e: 64 in 22 s).
    pub sriov: Duration,
    /// Until virtual functions that were made have appeared (125 in 65 s were seen).
    pub appear: Duration,
    /// Until a unit of the host has stopped or started (systemd's own limit is 90 s).
    pub unit: Duration,
    /// Every other attribute.
    pub other: Duration,
    /// Until a value read back is the one stored.
    pub read_back: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            bind: seconds(60),
            unbind: seconds(30),
            reset: seconds(90),
            wake: seconds(10),
            settle: seconds(5),
            sriov: seconds(120),
            appear: seconds(90),
            unit: seconds(100),
            other: seconds(5),
            read_back: seconds(2),
        }
    }
}

impl Deadlines {
    /// How long a store into `attribute` may take.
    pub fn of(&self, attribute: &Path) -> Duration {
        match attribute.file_name().and_then(|name| name.to_str()) {
            // A rescan probes what it finds, a remove waits for the driver's users.
            Some("bind" | "drivers_probe" | "rescan") => self.bind,
            Some("unbind" | "remove") => self.unbind,
            Some("reset" | "reset_subordinate") => self.reset,
            Some("sriov_numvfs") => self.sriov,
            Some(_) | None => self.other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute;

    #[test]
    fn only_what_runs_driver_code_gets_a_long_deadline() {
        let deadlines = Deadlines::default();
        assert_eq!(deadlines.of(Path::new("sys/bus/pci/drivers/vfio-pci/bind")), deadlines.bind);
        assert_eq!(deadlines.of(Path::new("sys/bus/pci/drivers_probe")), deadlines.bind);
        assert_eq!(deadlines.of(&attribute("0000:41:00.0".parse().unwrap(), "driver/unbind")), deadlines.unbind);
        assert_eq!(deadlines.of(&attribute("0000:41:00.0".parse().unwrap(), "driver_override")), deadlines.other);
    }
}
