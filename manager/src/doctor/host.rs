//! Checks of the host as a whole.

use vfio::{Function, Iommu};

use super::{Finding, Patient, Readings, Severity};

/// The fewest address bits of an IOMMU that are enough for guests with large BARs: 46 is what most processors have.
const ADDRESS_BITS: u64 = 46;

/// The first kernel that maps huge BARs in huge pages, from VFIO down to the IOMMU.
const HUGE_MAPPINGS: (u32, u32) = (6, 15);

/// BARs from this size on take long to map page by page: about a second for each 32 GiB.
const HUGE_BAR: u64 = 32 << 30;

/// Most DMA mappings of a container by default (`drivers/vfio/vfio_iommu_type1.c`).
const DMA_ENTRIES: u64 = 65535;

pub(super) fn judge(patient: Patient<'_>) -> Vec<Finding> {
    let readings = patient.readings;
    let checks = [
        Some(iommu(patient)),
        interrupt_remapping(readings),
        address_width(readings),
        unsafe_noiommu(readings),
        acs_override(readings),
        bindings_by_id(readings),
        dma_entry_limit(readings),
        vfio_node(readings),
        kvm(readings),
        lockdown(readings),
        huge_bars(patient),
        hook(readings),
        locked_memory(readings),
    ];
    checks.into_iter().flatten().collect()
}

fn iommu(patient: Patient<'_>) -> Finding {
    match patient.inventory.iommu {
        Iommu::On => Finding::of_host("iommu", Severity::Ok, "the kernel isolates devices"),
        Iommu::Off => Finding::of_host("iommu", Severity::Problem, "the kernel runs without an IOMMU: nothing can be handed out safely")
            .because("/sys/kernel/iommu_groups is empty")
            .because(format!("/proc/cmdline: {}", patient.readings.kernel_line))
            .remedy("switch on VT-d or AMD-Vi in the firmware, and intel_iommu=on on the kernel's command line for Intel"),
    }
}

// Bit 3 of the extended capability register: interrupt remapping (VT-d specification 11.4.3). AMD's units do not say in sysfs.
fn interrupt_remapping(readings: &Readings) -> Option<Finding> {
    const CHECK: &str = "interrupt-remapping";
    if readings.unsafe_interrupts {
        let message = "VFIO accepts an IOMMU without interrupt remapping: a guest may send the host any interrupt";
        let finding = Finding::of_host(CHECK, Severity::Problem, message);
        let fact = "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts is Y";
        return Some(finding.because(fact).remedy("load vfio_iommu_type1 without allow_unsafe_interrupts"));
    }
    if let Some(word) = readings.kernel_line.split_whitespace().find(|word| matches!(*word, "intremap=off" | "nointremap")) {
        let finding = Finding::of_host(CHECK, Severity::Problem, "interrupt remapping is switched off: VFIO refuses devices");
        return Some(finding.because(format!("/proc/cmdline: {word}")).remedy("remove it from the kernel's command line"));
    }
    let known: Vec<_> = readings.iommus.iter().filter_map(|unit| Some((unit, unit.extended?))).collect();
    let lacking = known.iter().find(|(_, extended)| extended & 0b1000 == 0);
    match lacking {
        Some((unit, extended)) => Some(
            Finding::of_host(CHECK, Severity::Warning, format!("{} cannot remap interrupts: VFIO refuses devices behind it", unit.name))
                .because(format!("/sys/class/iommu/{}/intel-iommu/ecap: {extended:x}", unit.name))
                .remedy("switch on interrupt remapping (x2APIC, VT-d) in the firmware"),
        ),
        None if known.is_empty() => None,
        None => Some(Finding::of_host(CHECK, Severity::Ok, "every IOMMU can remap interrupts")),
    }
}

// Bits 21 to 16 of the capability register: maximum guest address width less one (VT-d specification 11.4.2).
fn address_width(readings: &Readings) -> Option<Finding> {
    let width = |unit: &super::readings::IommuUnit| Some(((unit.capability? >> 16) & 0x3f) + 1);
    let (unit, bits) = readings.iommus.iter().filter_map(|unit| Some((unit, width(unit)?))).min_by_key(|(_, bits)| *bits)?;
    if bits >= ADDRESS_BITS {
        return Some(Finding::of_host("iommu-width", Severity::Ok, format!("IOMMUs translate {bits} address bits or more")));
    }
    Some(
        Finding::of_host(
            "iommu-width",
            Severity::Warning,
            format!("{} translates {bits} address bits: mapping beyond them fails", unit.name),
        )
        .because(format!("/sys/class/iommu/{}/intel-iommu/cap: {:x}", unit.name, unit.capability.unwrap_or_default()))
        .remedy(format!("give guests no more than {bits} physical address bits (<maxphysaddr bits='{bits}'/>)")),
    )
}

fn unsafe_noiommu(readings: &Readings) -> Option<Finding> {
    let finding = || {
        Finding::of_host("unsafe-noiommu", Severity::Problem, "VFIO runs in its unsafe no-IOMMU mode: what it hands out is not isolated")
    };
    readings.unsafe_noiommu.then(|| {
        let fact = "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode is Y";
        finding().because(fact).remedy("load vfio without enable_unsafe_noiommu_mode")
    })
}

fn acs_override(readings: &Readings) -> Option<Finding> {
    let word = readings.kernel_line.split_whitespace().find(|word| word.starts_with("pcie_acs_override="))?;
    let message = "IOMMU groups are smaller than the hardware isolates: devices of one may reach each other past the IOMMU";
    let finding = Finding::of_host("acs-override", Severity::Warning, message).because(format!("/proc/cmdline: {word}"));
    Some(finding.remedy("remove it, and move the cards to slots whose ports have ACS"))
}

fn bindings_by_id(readings: &Readings) -> Option<Finding> {
    let is_binding = |word: &&str| word.starts_with("vfio-pci.ids=") || word.starts_with("vfio_pci.ids=");
    let on_line = readings.kernel_line.split_whitespace().filter(is_binding).map(|word| format!("/proc/cmdline: {word}"));
    let evidence: Vec<_> = on_line.chain(readings.bindings_by_id.iter().cloned()).collect();
    if evidence.is_empty() {
        return None;
    }
    let message = "vfio-pci takes devices by their ids at boot, every one of that model, past gpuward";
    let finding = Finding::of_host("bindings-by-id", Severity::Warning, message);
    Some(
        evidence
            .into_iter()
            .fold(finding, Finding::because)
            .remedy("remove the ids; gpuward pins its own devices one by one (docs/boot.md)"),
    )
}

fn dma_entry_limit(readings: &Readings) -> Option<Finding> {
    let limit = readings.dma_entry_limit.filter(|limit| *limit < DMA_ENTRIES)?;
    let finding =
        Finding::of_host("dma-entry-limit", Severity::Warning, format!("a guest may have {limit} DMA mappings, fewer than by default"));
    let fact = format!("/sys/module/vfio_iommu_type1/parameters/dma_entry_limit: {limit}");
    Some(finding.because(fact).remedy(format!("options vfio_iommu_type1 dma_entry_limit={DMA_ENTRIES} in /etc/modprobe.d")))
}

fn vfio_node(readings: &Readings) -> Option<Finding> {
    (readings.vfio_node == Some(false)).then(|| {
        let finding = Finding::of_host("vfio", Severity::Problem, "VFIO is not there: /dev/vfio/vfio is missing");
        finding.remedy("modprobe vfio-pci; a file in /etc/modules-load.d loads it at boot")
    })
}

fn kvm(readings: &Readings) -> Option<Finding> {
    (readings.kvm_node == Some(false)).then(|| {
        let finding = Finding::of_host("kvm", Severity::Warning, "there is no /dev/kvm: machines cannot run");
        finding.remedy("switch on VT-x or SVM in the firmware, and load kvm_intel or kvm_amd")
    })
}

fn lockdown(readings: &Readings) -> Option<Finding> {
    let mode = readings.lockdown.as_deref().filter(|mode| *mode != "none")?;
    let message = format!("the kernel is locked down ({mode}): configuration space and BARs cannot be written from the host");
    let finding = Finding::of_host("lockdown", Severity::Note, message).because(format!("/sys/kernel/security/lockdown: [{mode}]"));
    Some(finding.remedy("nothing, as long as no vendor tool has to set modes of the GPU from the host"))
}

fn huge_bars(patient: Patient<'_>) -> Option<Finding> {
    let version = kernel_version(&patient.readings.release).filter(|version| *version < HUGE_MAPPINGS)?;
    let largest =
        |function: &Function| function.bars.iter().filter(|bar| bar.memory).map(|bar| bar.size).max().filter(|size| *size >= HUGE_BAR);
    let huge: Vec<_> = patient.devices().filter_map(|function| Some((function.address, largest(function)?))).collect();
    if huge.is_empty() {
        return None;
    }
    let message = "huge BARs are mapped page by page: guests with them start slowly";
    let finding = Finding::of_host("huge-bars", Severity::Note, message).because(format!("the kernel is {}.{}", version.0, version.1));
    let finding = huge.iter().fold(finding, |finding, (device, size)| finding.because(format!("{device} has a BAR of {} GiB", size >> 30)));
    Some(finding.remedy("a kernel from 6.15 on, with QEMU from 9.2 on"))
}

/// Major and minor of a kernel's release.
pub(crate) fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(['.', '-']).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

fn hook(readings: &Readings) -> Option<Finding> {
    (readings.has_libvirt && !readings.hook).then(|| {
        let message = "libvirt does not ask gpuward before a domain starts: others' domains may take its devices";
        let finding = Finding::of_host("libvirt-hook", Severity::Warning, message);
        let fact = "/etc/libvirt/hooks/qemu.d/50-gpuward is missing or may not be run";
        finding.because(fact).remedy("install it with mode 755 and restart libvirtd, which looks for hooks when it starts")
    })
}

fn locked_memory(readings: &Readings) -> Option<Finding> {
    let (daemon, limit, may_raise) = readings.libvirt_daemon.as_ref()?;
    let limit = limit.filter(|_| !may_raise)?;
    let message =
        format!("{daemon} may lock {} MiB of memory and cannot raise that: guests with devices need all of theirs locked", limit >> 20);
    let finding = Finding::of_host("locked-memory", Severity::Problem, message);
    Some(
        finding
            .because(format!("/proc/<pid of {daemon}>/limits, and no CAP_SYS_RESOURCE"))
            .remedy(format!("LimitMEMLOCK=infinity for {daemon}.service")),
    )
}
