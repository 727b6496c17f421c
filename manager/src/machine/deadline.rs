//! How long what waits for libvirt and QEMU may take: a formula for each, as data.

use std::time::Duration;

use crate::spec::MachineSpec;

/// Seconds: a base, and so many for each GiB of the guest's memory that is pinned and for each device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Formula {
    base: u32,
    per_gib: u32,
    per_device: u32,
}

/// Creating a domain: libvirt answers when QEMU has pinned the guest's whole memory, some GiB a second, and reset each device.
const START: Formula = Formula { base: 60, per_gib: 2, per_device: 15 };
/// From libvirt's word that QEMU is ended until nothing is left of it: the kernel unpins its memory page by page, and closes each device.
const END: Formula = Formula { base: 60, per_gib: 1, per_device: 15 };

/// How long something may take, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadline {
    /// Seconds.
    pub seconds: u32,
    /// How they are made up, for a person.
    pub why: String,
}

impl Deadline {
    /// For libvirt to create the machine's domain with so many devices; `start-deadline` overrides the formula.
    pub fn to_start(spec: &MachineSpec, devices: usize) -> Self {
        match spec.start_deadline {
            0 => START.of(spec, devices),
            seconds => Self { seconds, why: "start-deadline of its specification".into() },
        }
    }

    /// For the guest to shut down.
    pub fn to_stop(spec: &MachineSpec) -> Self {
        Self { seconds: spec.stop_deadline, why: "stop-deadline of its specification".into() }
    }

    /// For everything of the machine to be gone after libvirt has ended it.
    pub fn to_vanish(spec: &MachineSpec, devices: usize) -> Self {
        END.of(spec, devices)
    }

    /// The same as a duration.
    pub fn within(&self) -> Duration {
        Duration::from_secs(self.seconds.into())
    }
}

impl Formula {
    // Without a device nothing is pinned: QEMU touches memory as the guest does.
    fn of(self, spec: &MachineSpec, devices: usize) -> Deadline {
        let devices = u32::try_from(devices).unwrap_or(u32::MAX);
        let pinned = if devices == 0 { 0 } else { u32::try_from(spec.memory.div_ceil(1 << 30)).unwrap_or(u32::MAX) };
        let seconds = self.base.saturating_add(self.per_gib.saturating_mul(pinned)).saturating_add(self.per_device.saturating_mul(devices));
        let Self { base, per_gib, per_device } = self;
        Deadline { seconds, why: format!("{base} s + {pinned} GiB pinned × {per_gib} s + {devices} devices × {per_device} s") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Node;

    fn spec(keys: &str) -> MachineSpec {
        let text = format!("format = 1\nname = \"a\"\nvcpus = 1\n{keys}\n[[disk]]\nvolume = \"a/b\"\n");
        MachineSpec::parse(Node::from_toml(&text).unwrap()).unwrap()
    }

    #[test]
    fn a_start_has_time_for_what_is_pinned_and_for_each_device() {
        let large = spec("memory = \"2048GiB\"");
        let deadline = Deadline::to_start(&large, 8);
        assert_eq!((deadline.seconds, deadline.why.as_str()), (4276, "60 s + 2048 GiB pinned × 2 s + 8 devices × 15 s"));
        assert_eq!(Deadline::to_start(&large, 0).seconds, 60, "nothing is pinned");
        assert_eq!(Deadline::to_vanish(&large, 8).seconds, 2228);
        assert_eq!(Deadline::to_start(&spec("memory = \"1537MiB\""), 1).seconds, 79, "a part of a GiB counts whole");
    }

    #[test]
    fn the_specification_overrides_the_formula() {
        let deadline = Deadline::to_start(&spec("memory = \"64GiB\"\nstart-deadline = 7"), 4);
        assert_eq!((deadline.seconds, deadline.why.as_str()), (7, "start-deadline of its specification"));
        assert_eq!(Deadline::to_stop(&spec("memory = \"1GiB\"\nstop-deadline = 5")).within(), Duration::from_secs(5));
    }

    #[test]
    fn absurd_sizes_do_not_overflow() {
        let spec = MachineSpec { memory: u64::MAX, ..spec("memory = \"1GiB\"") };
        assert_eq!(Deadline::to_start(&spec, usize::MAX).seconds, u32::MAX);
    }
}
