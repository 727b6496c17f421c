//! The parts of PCI configuration space that sysfs has no attribute for: serial number and access control services.
//!
//! Layouts: PCI Express Base Specification 6.0, 7.5.3 (PCI Express capability), 7.7.11 (ACS) and 7.9.3 (Device Serial Number).
//! Without CAP_SYS_ADMIN the kernel gives the first 64 bytes only (`drivers/pci/pci-sysfs.c`, `pci_read_config`).

/// The bytes that could be read, 64 to 4096.
pub(crate) struct ConfigSpace(Vec<u8>);

const CAP_EXPRESS: u8 = 0x10;
const EXT_SERIAL: u16 = 0x0003;
const EXT_ACS: u16 = 0x000d;
const EXTENDED: usize = 0x100;

/// A PCIe port's place, from its PCI Express capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Port {
    Root,
    Downstream,
    Other,
}

impl ConfigSpace {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// Whether more than the part that everybody may read is there.
    pub(crate) fn is_whole(&self) -> bool {
        self.0.len() > EXTENDED
    }

    fn u16(&self, at: usize) -> Option<u16> {
        Some(u16::from_le_bytes(self.0.get(at..at + 2)?.try_into().ok()?))
    }

    fn u32(&self, at: usize) -> Option<u32> {
        Some(u32::from_le_bytes(self.0.get(at..at + 4)?.try_into().ok()?))
    }

    // Both lists come from hardware: a loop or a pointer into nowhere ends the walk.
    fn capability(&self, id: u8) -> Option<usize> {
        let mut at = usize::from(*self.0.get(0x34)? & !3);
        for _ in 0..48 {
            if at < 0x40 {
                return None;
            }
            if *self.0.get(at)? == id {
                return Some(at);
            }
            at = usize::from(*self.0.get(at + 1)? & !3);
        }
        None
    }

    fn extended(&self, id: u16) -> Option<usize> {
        let mut at = EXTENDED;
        for _ in 0..960 {
            let header = self.u32(at)?;
            if header == 0 || header == u32::MAX {
                return None;
            }
            if header as u16 == id {
                return Some(at);
            }
            at = (header >> 20) as usize & !3;
            if at < EXTENDED {
                return None;
            }
        }
        None
    }

    /// The Device Serial Number; all zeros and all ones are none.
    pub(crate) fn serial(&self) -> Option<u64> {
        let at = self.extended(EXT_SERIAL)?;
        let serial = u64::from(self.u32(at + 4)?) | u64::from(self.u32(at + 8)?) << 32;
        (serial != 0 && serial != u64::MAX).then_some(serial)
    }

    /// The bytes, without the Device Serial Number.
    pub(crate) fn without_serial(mut self) -> Vec<u8> {
        let serial = self.extended(EXT_SERIAL).and_then(|at| self.0.get_mut(at + 4..at + 12));
        serial.into_iter().for_each(|bytes| bytes.fill(0));
        self.0
    }

    /// What kind of port it is.
    pub(crate) fn port(&self) -> Port {
        match self.capability(CAP_EXPRESS).and_then(|at| self.u16(at + 2)).map(|flags| (flags >> 4) & 0xf) {
            Some(4) => Port::Root,
            Some(6) => Port::Downstream,
            Some(_) | None => Port::Other,
        }
    }

    /// The enabled bits of the ACS control register; `None` without the capability.
    pub(crate) fn acs_control(&self) -> Option<u16> {
        self.u16(self.extended(EXT_ACS)? + 6)
    }
}

/// What the kernel wants of every port to tell functions apart (`REQ_ACS_FLAGS` in `drivers/iommu/iommu.c`).
pub(crate) const REQUIRED_ACS: [(u16, &str); 4] =
    [(0x01, "source validation"), (0x04, "request redirect"), (0x08, "completion redirect"), (0x10, "upstream forwarding")];

#[cfg(test)]
mod tests {
    use super::*;

    fn with(parts: &[(usize, u32)]) -> ConfigSpace {
        let mut bytes = vec![0; 4096];
        for (at, value) in parts {
            bytes[*at..*at + 4].copy_from_slice(&value.to_le_bytes());
        }
        ConfigSpace::new(bytes)
    }

    #[test]
    fn the_serial_number_is_found_behind_other_capabilities() {
        let config = with(&[(0x100, 0x1502_0001), (0x150, 0x0001_0003), (0x154, 0x8967_4523), (0x158, 0x0123_cdab)]);
        assert_eq!(config.serial(), Some(0x0123_cdab_8967_4523));
    }

    #[test]
    fn a_serial_number_of_zeros_or_ones_is_none() {
        assert_eq!(with(&[(0x100, 0x0001_0003)]).serial(), None);
        assert_eq!(with(&[(0x100, 0x0001_0003), (0x104, u32::MAX), (0x108, u32::MAX)]).serial(), None);
    }

    #[test]
    fn a_capability_list_that_loops_ends() {
        assert_eq!(with(&[(0x100, 0x1001_0001)]).serial(), None);
        assert_eq!(with(&[(0x34, 0x40), (0x40, 0x4001)]).port(), Port::Other);
    }

    #[test]
    fn ports_and_their_acs_control_are_read() {
        let root = with(&[(0x34, 0x40), (0x40, 0x0042_0010), (0x100, 0x0001_000d), (0x104, 0x001d_005f)]);
        assert_eq!((root.port(), root.acs_control()), (Port::Root, Some(0x1d)));
        let downstream = with(&[(0x34, 0x40), (0x40, 0x0062_0010)]);
        assert_eq!((downstream.port(), downstream.acs_control()), (Port::Downstream, None));
    }

    #[test]
    fn a_short_space_has_nothing_and_does_not_panic() {
        for length in 0..80 {
            let config = ConfigSpace::new(vec![0xff; length]);
            assert_eq!((config.serial(), config.acs_control(), config.port()), (None, None, Port::Other));
        }
    }
}
