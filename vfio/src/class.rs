//! What a function is, from its class code, vendor and neighbours.
//!
//! Classes are matched exactly, base class and subclass: a mask that takes `0600` for `0680` drops NVSwitches.

use crate::Kind;

const NVIDIA: u16 = 0x10de;
/// Vendors whose processing accelerators (class `1200`) are GPUs: AMD's Instinct, NVIDIA, Intel's Data Center GPU Max.
const GPU_VENDORS: [u16; 3] = [0x1002, NVIDIA, 0x8086];

/// Vendors of management controllers (ASPEED, Matrox): their display is the machine's own console, not a GPU to hand out.
const MANAGEMENT_CONTROLLERS: [u16; 2] = [0x1a03, 0x102b];

/// What the class code and vendor say alone; companions need to know their slot, see [`is_companion`].
pub(crate) fn kind(class: u32, vendor: u16, is_virtual: bool) -> Kind {
    if is_virtual {
        return Kind::VirtualFunction;
    }
    match class >> 8 {
        0x0300..=0x0302 | 0x0380 if !MANAGEMENT_CONTROLLERS.contains(&vendor) => Kind::Gpu,
        0x1200 if GPU_VENDORS.contains(&vendor) => Kind::Gpu,
        0x0680 if vendor == NVIDIA => Kind::Switch,
        0x0604 | 0x0609 => Kind::Bridge,
        _ => Kind::Other,
    }
}

/// Whether a function of this class is a companion when a GPU is in its slot: audio, USB host controller, USB-C.
pub(crate) fn is_companion(class: u32) -> bool {
    matches!(class >> 8, 0x0403 | 0x0c03 | 0x0c80)
}

/// The class in words, by pci-ids (`Non-Volatile memory controller`).
pub(crate) fn describe(class: u32) -> String {
    let [_, base, sub, _] = class.to_be_bytes();
    let known = pci_ids::Subclass::from_cid_sid(base, sub).map(|subclass| subclass.name().to_owned());
    known.unwrap_or_else(|| format!("class {:04x}", class >> 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// P25: every class code, not a mask.
    #[test]
    fn only_exact_classes_are_devices() {
        let mut devices = Vec::new();
        for code in 0..=0xffffu32 {
            if kind(code << 8, NVIDIA, false) != Kind::Other {
                devices.push(code);
            }
        }
        assert_eq!(devices, [0x0300, 0x0301, 0x0302, 0x0380, 0x0604, 0x0609, 0x0680, 0x1200]);
    }

    #[test]
    fn a_bridge_of_another_kind_is_no_nvswitch() {
        assert_eq!(kind(0x068000, NVIDIA, false), Kind::Switch);
        assert_eq!(kind(0x068000, 0x8086, false), Kind::Other);
        assert_eq!(kind(0x060000, NVIDIA, false), Kind::Other);
        assert_eq!(kind(0x060400, NVIDIA, false), Kind::Bridge);
    }

    #[test]
    fn the_console_of_a_management_controller_is_no_gpu() {
        assert_eq!(kind(0x030000, 0x1a03, false), Kind::Other);
    }

    #[test]
    fn a_virtual_function_is_one_whatever_its_class() {
        assert_eq!(kind(0x030200, NVIDIA, true), Kind::VirtualFunction);
        assert_eq!(kind(0x020000, 0x8086, true), Kind::VirtualFunction);
    }

    #[test]
    fn unknown_classes_are_described_by_number() {
        assert_eq!(describe(0x010802), "Non-Volatile memory controller");
        assert_eq!(describe(0xfe4200), "class fe42");
    }
}
