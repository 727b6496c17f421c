//! Models that one of their resets does harm to: data, a line each with its source.

use super::Method;
use crate::Ids;

/// What is known of some models.
struct Known {
    vendor: u16,
    devices: Devices,
    verdict: Verdict,
    why: &'static str,
}

enum Devices {
    These(&'static [u16]),
    Masked { mask: u16, value: u16 },
}

enum Verdict {
    /// Everything but this.
    Not(Method),
    /// Nothing but this.
    Only(Method),
    /// Reported once: this where there is no other way.
    Doubtful(Method),
}

const NVIDIA: u16 = 0x10de;
const AMD: u16 = 0x1002;

const NO_RETURN: &str = "does not come back from it";
const NO_START: &str = "does not start again after it; vendor-reset knows how";

const KNOWN: [Known; 6] = [
    // Linux 5.14, drivers/pci/quirks.c, quirk_nvidia_no_bus_reset: GH100 with a chip-to-chip link.
    Known { vendor: NVIDIA, devices: Devices::Masked { mask: 0xffc0, value: 0x2340 }, verdict: Verdict::Not(Method::Bus), why: NO_RETURN },
    // Linux 6.4, the same: T4.
    Known { vendor: NVIDIA, devices: Devices::These(&[0x1eb8]), verdict: Verdict::Not(Method::Bus), why: NO_RETURN },
    // GB202 of GeForce RTX 5090, 5090 D and 5090 D v2: configuration space stays ffff0001 (tinygrad/tinygrad#18199, which also says
    // that Linux has the quirk by now; dualeai/exec-sandbox#8).
    Known { vendor: NVIDIA, devices: Devices::These(&[0x2b85, 0x2b87, 0x2b8c]), verdict: Verdict::Not(Method::Flr), why: NO_RETURN },
    // GB202GL of RTX PRO 6000 Blackwell (Workstation, Max-Q, Server): one report, of cards that died after days (dualeai/exec-sandbox#8).
    Known { vendor: NVIDIA, devices: Devices::These(&[0x2bb1, 0x2bb4, 0x2bb5]), verdict: Verdict::Doubtful(Method::Flr), why: "" },
    // Polaris 10, 11 and 12: gnif/vendor-reset, src/device-db.h; its issues 38, 66 and 108.
    Known { vendor: AMD, devices: Devices::These(&POLARIS), verdict: Verdict::Only(Method::DeviceSpecific), why: NO_START },
    // Vega 10 and 20: the same.
    Known { vendor: AMD, devices: Devices::These(&VEGA), verdict: Verdict::Only(Method::DeviceSpecific), why: NO_START },
];

const POLARIS: [u16; 30] = [
    0x67c0, 0x67c1, 0x67c2, 0x67c4, 0x67c7, 0x67c8, 0x67c9, 0x67ca, 0x67cc, 0x67cf, 0x67d0, 0x67df, 0x6fdf, // 10
    0x67e0, 0x67e1, 0x67e3, 0x67e7, 0x67e8, 0x67e9, 0x67eb, 0x67ef, 0x67ff, // 11
    0x6980, 0x6981, 0x6985, 0x6986, 0x6987, 0x6995, 0x6997, 0x699f, // 12
];

const VEGA: [u16; 22] = [
    0x6860, 0x6861, 0x6862, 0x6863, 0x6864, 0x6867, 0x6868, 0x6869, 0x686a, 0x686b, 0x686c, 0x686d, 0x686e, 0x686f, 0x687f, // 10
    0x66a0, 0x66a1, 0x66a2, 0x66a3, 0x66a4, 0x66a7, 0x66af, // 20
];

fn of(ids: Ids) -> impl Iterator<Item = &'static Known> {
    KNOWN.iter().filter(move |known| {
        known.vendor == ids.vendor
            && match known.devices {
                Devices::These(devices) => devices.contains(&ids.device),
                Devices::Masked { mask, value } => ids.device & mask == value,
            }
    })
}

/// What this reset does to this model, where it is known to do harm.
pub(super) fn harm(ids: Ids, method: Method) -> Option<&'static str> {
    let harms = |known: &&Known| match known.verdict {
        Verdict::Not(harmful) => harmful == method,
        Verdict::Only(harmless) => harmless != method,
        Verdict::Doubtful(_) => false,
    };
    of(ids).find(harms).map(|known| known.why)
}

/// Whether this reset is to be the last resort for this model.
pub(super) fn is_doubtful(ids: Ids, method: Method) -> bool {
    of(ids).any(|known| matches!(known.verdict, Verdict::Doubtful(doubtful) if doubtful == method))
}
