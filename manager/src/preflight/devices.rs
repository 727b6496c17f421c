//! The devices that a machine gets: room for their BARs, their nodes, and what they keep a guest from.

use vfio::Function;
use xml_templates::{BarSize, Mmio64, mmio64};

use super::iommu::end_of_ram;
use super::{Finding, Severity, Subject, size};
use crate::doctor::kernel_version;
use crate::libvirt::{DomainType, Told};
use crate::machine::wide_bars;
use crate::spec::Firmware;

pub(super) fn judge(subject: Subject<'_>) -> Vec<Finding> {
    if subject.devices.is_empty() {
        return Vec::new();
    }
    let mut findings = window(subject);
    findings.extend(container(subject));
    findings.extend(subject.devices.iter().filter_map(|function| node(subject, function)));
    findings.extend(huge_bars(subject));
    findings.push(bound(subject));
    findings
}

/// P77, P78.
fn window(subject: Subject<'_>) -> Vec<Finding> {
    const CODE: &str = "mmio-window";
    let Subject { spec, devices, host, .. } = subject;
    let mut findings: Vec<_> = devices.iter().filter(|function| function.bars.is_empty()).map(no_bars).collect();
    if host.domain_type == DomainType::Test {
        findings.push(Finding::unknown(CODE, "whether its BARs fit is not known", "libvirt's test driver runs no guest"));
        return findings;
    }
    let bars: Vec<_> = wide_bars(devices).collect();
    let sizes: Vec<_> = bars.iter().map(|bar| BarSize(bar.size)).collect();
    let room = mmio64(&sizes, host.address_bits, spec.firmware != Firmware::Bios);
    let space = 1u64 << host.address_bits.min(63);
    let evidence = |finding: Finding| {
        let sum = bars.iter().fold(0u64, |sum, bar| sum.saturating_add(bar.size));
        finding.because(format!("BARs of {} in all, memory of {}", size(sum), size(spec.memory))).because(format!(
            "the guest has {} physical address bits: {}",
            host.address_bits,
            size(space)
        ))
    };
    if end_of_window(room, spec.memory).is_none_or(|end| end > space) {
        let message =
            format!("BARs of its devices need a window of {}, which does not fit into the guest's physical addresses", size(room.needed));
        let finding = evidence(Finding::new(CODE, Severity::Error, message));
        findings.push(finding.remedy("give it fewer devices, or a host whose processors have more physical address bits"));
    } else if let Mmio64 { needed, ovmf_mib: Some(_), .. } = room {
        let message =
            format!("OVMF's own window for BARs is too small: it is told to make one of {}, which libvirt calls tainted", size(needed));
        findings.push(evidence(Finding::new(CODE, Severity::Warning, message)).remedy("nothing: it is told so by -fw_cfg"));
    }
    findings
}

fn no_bars(function: &Function) -> Finding {
    let unread = function.unreadable.first().cloned();
    let why = unread.unwrap_or_else(|| format!("/sys/bus/pci/devices/{}/resource shows no region", function.address));
    Finding { subject: function.address.to_string(), ..Finding::unknown("mmio-window", "its BARs are not known", why) }
}

// QEMU lays its hole above RAM (`pc_pci_hole64_start`), and does not start where that ends beyond the guest's addresses; OVMF aligns
// the window that it is told to its size (`PlatformGetFirstNonAddress`).
fn end_of_window(room: Mmio64, memory: u64) -> Option<u64> {
    let alignment = match (room.pcihole64_kib, room.ovmf_mib) {
        (None, None) => return Some(0),
        (Some(_), None) => 1 << 30,
        (_, Some(_)) => room.needed,
    };
    end_of_ram(memory).checked_next_multiple_of(alignment)?.checked_add(room.needed)
}

fn container(subject: Subject<'_>) -> Option<Finding> {
    const CODE: &str = "vfio-container";
    match (subject.facts.readings.vfio_node, subject.facts.container_mode) {
        (None, _) => Some(Finding::unknown(CODE, "whether VFIO has its node is not known", "there is no /dev to look at")),
        (Some(false), _) => Some(
            Finding::new(CODE, Severity::Error, "VFIO has no node: no guest can get a device")
                .because("/dev/vfio/vfio is missing")
                .remedy("modprobe vfio-pci; a file in /etc/modules-load.d loads it at boot"),
        ),
        (Some(true), Some(mode)) if mode & 0o006 != 0o006 => Some(
            Finding::new(CODE, Severity::Warning, "QEMU's user may not be able to open VFIO's node")
                .because(format!("/dev/vfio/vfio has mode {mode:03o}; udev's own rule gives it 666"))
                .remedy("remove the udev rule that narrows it: it gives access to no device by itself"),
        ),
        (Some(true), Some(_)) => None,
        (Some(true), None) => {
            Some(Finding::unknown(CODE, "the permissions of VFIO's node are not known", "/dev/vfio/vfio cannot be looked at"))
        }
    }
}

/// P69. Who holds a node is looked at again right before the domain is created.
fn node(subject: Subject<'_>, function: &Function) -> Option<Finding> {
    const CODE: &str = "vfio-node";
    if !function.is_on_vfio() {
        let message = "it is with the host: its node is made when it is taken, and is not known before";
        let driver = function.driver.as_deref().unwrap_or("none");
        let unknown = Finding::unknown(CODE, message, format!("its driver is {driver}"));
        return Some(Finding { subject: function.address.to_string(), ..unknown });
    }
    let group = function.group?;
    (!subject.facts.group_nodes.contains(&function.address)).then(|| {
        Finding::of(function, CODE, Severity::Error, "its IOMMU group has no node, although a VFIO driver has it")
            .because(format!("/dev/vfio/{group} is missing"))
            .remedy("udevadm settle; a device without a node after that has to be released and assigned again")
    })
}

/// The first kernel that maps huge BARs in huge pages, from VFIO down to the IOMMU.
const HUGE_MAPPINGS: (u32, u32) = (6, 15);
/// The first QEMU that aligns them so that the kernel can.
const HUGE_ALIGNED: u32 = 9_002_000;
/// Older ones take about a second for so much.
const A_SECONDS: u64 = 32 << 30;

fn huge_bars(subject: Subject<'_>) -> Option<Finding> {
    const CODE: &str = "huge-bars";
    let bytes: u64 = wide_bars(subject.devices).map(|bar| bar.size).filter(|size| *size >= A_SECONDS).fold(0, u64::saturating_add);
    if bytes == 0 {
        return None;
    }
    let release = &subject.facts.readings.release;
    let Some(kernel) = kernel_version(release) else {
        let why = format!("/proc/sys/kernel/osrelease: {release:?}");
        return Some(Finding::unknown(CODE, "whether the kernel maps huge BARs in huge pages is not known", why));
    };
    let qemu = match subject.told {
        Told::Can(can) => can.version,
        Told::Unknown(_) => None,
        // No QEMU at all is a finding of its own.
        Told::Cannot(_) => Some(u32::MAX),
    };
    let old =
        |version: u32| format!("QEMU is {}.{}, the first that aligns them for it is 9.2", version / 1_000_000, version / 1_000 % 1_000);
    let of_kernel = (kernel < HUGE_MAPPINGS).then(|| format!("the kernel is {}.{}, the first that does it is 6.15", kernel.0, kernel.1));
    let of_qemu = qemu.filter(|version| *version < HUGE_ALIGNED).map(old);
    let evidence: Vec<_> = of_kernel.into_iter().chain(of_qemu).collect();
    if evidence.is_empty() {
        return qemu
            .is_none()
            .then(|| Finding::unknown(CODE, "whether QEMU aligns huge BARs is not known", "libvirt does not tell its version"));
    }
    let message =
        format!("its BARs of {} are not mapped in huge pages: that takes about {} s at its start", size(bytes), bytes / A_SECONDS);
    let finding = evidence.into_iter().fold(Finding::new(CODE, Severity::Warning, message), Finding::because);
    Some(finding.remedy("a kernel from 6.15 on, with QEMU from 9.2 on; a start-deadline that leaves time for it"))
}

fn bound(subject: Subject<'_>) -> Finding {
    let message = "with devices it can be neither suspended, saved, snapshot with its memory nor migrated, and the host must not sleep";
    let line = |function: &Function| format!("{} is given to it by {}", function.address, function.vfio_driver);
    subject.devices.iter().map(line).fold(Finding::new("no-migration", Severity::Info, message), Finding::because)
}
