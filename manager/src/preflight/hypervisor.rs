//! What QEMU, libvirt and the firmware can run, by libvirt's word.

use super::{Finding, Severity, Subject};
use crate::libvirt::{Capabilities, DomainType, Told};
use crate::spec::{CpuMode, Firmware, MachineSpec};

pub(super) fn judge(subject: Subject<'_>) -> Vec<Finding> {
    let mut findings: Vec<_> = [emulation(subject), variant_driver(subject)].into_iter().flatten().collect();
    match subject.told {
        Told::Can(can) => findings.extend(needs(subject, can)),
        Told::Cannot(why) => findings.push(
            Finding::new("hypervisor", Severity::Error, "libvirt can run no such domain (x86_64, q35)")
                .because(why.clone())
                .remedy("install QEMU for x86 (qemu-system-x86) and restart libvirt's daemon, which remembers what it found"),
        ),
        Told::Unknown(why) => findings.push(Finding::unknown("hypervisor", "what QEMU and the firmware can do is not known", why.clone())),
    }
    findings
}

fn emulation(subject: Subject<'_>) -> Option<Finding> {
    match subject.host.domain_type {
        DomainType::Kvm | DomainType::Test => None,
        DomainType::Qemu => Some(
            Finding::new(
                "emulation",
                Severity::Warning,
                "there is no hardware virtualization: the guest's processors are emulated, slowly",
            )
            .because("libvirt offers no domains of type kvm")
            .remedy("switch on VT-x or AMD-V in the firmware, and modprobe kvm_intel or kvm_amd"),
        ),
    }
}

/// The first libvirt that looks at `vfio-dev` rather than at the name of the driver.
const KNOWS_VARIANTS: u32 = 10_000_000;

/// P40.
fn variant_driver(subject: Subject<'_>) -> Option<Finding> {
    let libvirt = subject.host.libvirt;
    let function = subject.devices.iter().find(|function| function.vfio_driver != "vfio-pci").filter(|_| libvirt < KNOWS_VARIANTS)?;
    let message = format!("libvirt may refuse it: its VFIO driver is {}, not vfio-pci", function.vfio_driver);
    let version = format!("libvirt is {}.{}", libvirt / 1_000_000, libvirt / 1_000 % 1_000);
    Some(Finding::of(function, "variant-driver", Severity::Warning, message).because(version).remedy("libvirt from 10.0 on"))
}

fn needs(subject: Subject<'_>, can: &Capabilities) -> Vec<Finding> {
    let spec = subject.spec;
    let devices = subject.is_pinned().then(|| host_devices(can)).flatten();
    let all = [firmware(spec, can), cpu(subject, can), vcpus(spec, can), devices];
    all.into_iter().flatten().map(|finding| finding.because(format!("libvirt's capabilities of {}", can.emulator))).collect()
}

fn firmware(spec: &MachineSpec, can: &Capabilities) -> Option<Finding> {
    const CODE: &str = "firmware";
    let has_uefi = can.firmware.iter().any(|firmware| firmware == "efi");
    let missing = match spec.firmware {
        Firmware::Bios => return None,
        Firmware::Uefi if has_uefi => return None,
        Firmware::UefiSecure if has_uefi && can.secure_boot => return None,
        Firmware::UefiSecure if has_uefi => "libvirt finds no UEFI firmware with secure boot",
        Firmware::Uefi | Firmware::UefiSecure => "libvirt finds no UEFI firmware",
    };
    let finding = Finding::new(CODE, Severity::Error, missing).because(format!("it chooses among: {}", list(&can.firmware)));
    Some(finding.remedy("install OVMF (ovmf, edk2-ovmf) and restart libvirt's daemon, which remembers what it found"))
}

// As the domain is made: emulation has no host processor to pass through.
fn cpu(subject: Subject<'_>, can: &Capabilities) -> Option<Finding> {
    let mode = match (subject.host.domain_type, subject.spec.cpu_mode) {
        (DomainType::Qemu, _) => "maximum",
        (DomainType::Kvm, CpuMode::HostPassthrough) => "host-passthrough",
        (DomainType::Kvm | DomainType::Test, _) => "host-model",
    };
    if can.cpu_modes.iter().any(|known| known == mode) {
        return None;
    }
    let finding = Finding::new("cpu-mode", Severity::Error, format!("libvirt cannot give a guest a processor of mode {mode}"));
    Some(finding.because(format!("its modes: {}", list(&can.cpu_modes))).remedy("another cpu.mode, or a newer QEMU and libvirt"))
}

fn vcpus(spec: &MachineSpec, can: &Capabilities) -> Option<Finding> {
    const CODE: &str = "vcpus";
    let Some(most) = can.most_vcpus else {
        return Some(Finding::unknown(CODE, "how many virtual CPUs QEMU can give is not known", "no <vcpu max=…> in libvirt's answer"));
    };
    let message = || format!("it has {} virtual CPUs, and QEMU gives at most {most}", spec.vcpus);
    (spec.vcpus > most).then(|| Finding::new(CODE, Severity::Error, message()).remedy("give it fewer"))
}

// A warning: libvirt remembers what it found when it was first asked, perhaps before VFIO was loaded.
fn host_devices(can: &Capabilities) -> Option<Finding> {
    if can.host_devices.iter().any(|kind| kind == "pci") {
        return None;
    }
    let finding = Finding::new("host-devices", Severity::Warning, "libvirt did not find that it can give PCI devices to guests");
    Some(
        finding
            .because(format!("it can give: {}", list(&can.host_devices)))
            .remedy("load vfio-pci, then restart libvirt's daemon: guests run on"),
    )
}

fn list(words: &[String]) -> String {
    if words.is_empty() { "none".into() } else { words.join(", ") }
}
