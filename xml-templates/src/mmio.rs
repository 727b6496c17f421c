//! Room above 4 GiB for the BARs of the devices given to a guest.
//!
//! OVMF sizes its 64-bit window from the guest's physical address width: an eighth of the address space, of 46 bits at most
//! unless it may use more (`OvmfPkg/Library/PlatformInitLib/MemDetect.c`, `PlatformDynamicMmioWindow`). With `host-passthrough` and
//! `<maxphysaddr mode='passthrough'/>` that is enough for all but the largest boards; only where it is not, OVMF is told by
//! `-fw_cfg`, which taints the domain. SeaBIOS and the kernel take `pcihole64`.

/// The size of one memory BAR, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarSize(pub u64);

/// Room for BARs above 4 GiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mmio64 {
    /// Bytes that the devices need, aligned and rounded up to a power of two; 0 where nothing is needed.
    pub needed: u64,
    /// `pcihole64` of the root complex in KiB.
    pub pcihole64_kib: Option<u64>,
    /// OVMF's window in MiB, given by `-fw_cfg`: the domain is tainted.
    pub ovmf_mib: Option<u64>,
}

impl Mmio64 {
    /// Whether libvirt will mark the domain as tainted (`custom-argv`).
    pub fn taints(&self) -> bool {
        self.ovmf_mib.is_some()
    }
}

/// Below this a guest's default window does.
const DEFAULT_WINDOW: u64 = 32 << 30;
/// The widest address OVMF sizes its window by.
const OVMF_WIDEST: u32 = 46;

/// Room for `bars` in a guest with `address_bits` of physical address; `uefi` where OVMF boots it.
pub fn mmio64(bars: &[BarSize], address_bits: u32, uefi: bool) -> Mmio64 {
    // Each BAR is aligned to its size; laid largest first there are no gaps, and a root port's window is aligned to its
    // largest BAR, so that a device may waste as much again.
    let sum = bars.iter().fold(0u64, |sum, bar| sum.saturating_add(bar.0.checked_next_power_of_two().unwrap_or(u64::MAX)));
    let needed = if sum == 0 { 0 } else { sum.saturating_mul(2).checked_next_power_of_two().unwrap_or(1 << 63) };
    if needed <= DEFAULT_WINDOW {
        return Mmio64 { needed, pcihole64_kib: None, ovmf_mib: None };
    }
    let ovmf_window = (1u64 << address_bits.clamp(36, OVMF_WIDEST)) / 8;
    Mmio64 { needed, pcihole64_kib: Some(needed >> 10), ovmf_mib: (uefi && needed > ovmf_window).then_some(needed >> 20) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn window(count: usize, gib: u64, bits: u32) -> Mmio64 {
        mmio64(&vec![BarSize(gib * GIB); count], bits, true)
    }

    #[test]
    fn small_bars_need_no_word() {
        assert_eq!(window(1, 16, 46), Mmio64 { needed: 32 * GIB, pcihole64_kib: None, ovmf_mib: None });
        assert_eq!(mmio64(&[], 46, true), Mmio64::default());
    }

    /// P77.
    #[test]
    fn eight_gpus_of_128_gib_fit_ovmfs_own_window() {
        let window = window(8, 128, 46);
        assert_eq!((window.needed, window.pcihole64_kib, window.taints()), (2048 * GIB, Some(2 << 30), false));
    }

    /// P78: 8 TiB at 46 bits are one eighth.
    #[test]
    fn what_exceeds_ovmfs_window_is_told_to_it() {
        assert!(!window(8, 512, 46).taints());
        assert_eq!(window(16, 512, 46).ovmf_mib, Some(16 << 20));
        assert_eq!(window(1, 128, 39).ovmf_mib, Some(256 << 10));
    }

    #[test]
    fn seabios_is_told_by_the_hole_alone() {
        assert_eq!(mmio64(&[BarSize(512 * GIB); 16], 46, false).ovmf_mib, None);
    }

    #[test]
    fn absurd_bars_do_not_overflow() {
        assert_eq!(mmio64(&[BarSize(u64::MAX), BarSize(u64::MAX)], 52, true).needed, 1 << 63);
    }
}
