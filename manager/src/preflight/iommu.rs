//! What the IOMMU can translate, and how many mappings it takes.

use vfio::Function;

use super::{Facts, Finding, Severity, Subject, size};
use crate::doctor::{IommuUnit, kernel_version};
use crate::libvirt::{DomainType, HostFacts};
use crate::machine::wide_bars;
use crate::spec::Firmware;

pub(super) fn judge(subject: Subject<'_>) -> Vec<Finding> {
    if !subject.is_pinned() {
        return Vec::new();
    }
    let mut findings: Vec<_> = subject.devices.iter().filter_map(|function| width(subject, function)).collect();
    findings.extend(dma_entry_limit(subject));
    findings
}

/// Where the guest's RAM ends on q35: what is beyond 2 GiB lies above 4 GiB.
pub(super) fn end_of_ram(memory: u64) -> u64 {
    (4u64 << 30).saturating_add(memory.saturating_sub(2 << 30))
}

/// P53.
fn width(subject: Subject<'_>, function: &Function) -> Option<Finding> {
    const CODE: &str = "iommu-width";
    let Subject { spec, host, facts, .. } = subject;
    let (unit, bits, evidence) = match bits_for(facts, function) {
        Ok(known) => known,
        Err(why) => {
            let message = "how many address bits its IOMMU translates is not known";
            return Some(Finding { subject: function.address.to_string(), ..Finding::unknown(CODE, message, why) });
        }
    };
    let end = end_of_ram(spec.memory);
    let finding = |severity, message: String| Some(Finding::of(function, CODE, severity, message).because(evidence.clone()));
    if bits < u64::BITS && end > 1 << bits {
        let message = format!("{unit} translates {bits} address bits, and the guest's memory ends at {}", size(end));
        return Some(finding(Severity::Error, message)?.remedy(format!("give it less than {} of memory", size(1 << bits))));
    }
    if is_beyond(host, spec.firmware, bits) && has_wide_bar(function) {
        let guest = host.address_bits;
        let message =
            format!("{unit} translates {bits} address bits, and the guest has {guest}: BARs that OVMF lays beyond them are not mapped");
        return Some(
            finding(Severity::Warning, message)?
                .remedy("expect no transfers between devices (peer to peer), or use a host with a wider IOMMU"),
        );
    }
    None
}

// OVMF lays its window at the top of the guest's addresses.
fn is_beyond(host: &HostFacts, firmware: Firmware, bits: u32) -> bool {
    host.domain_type != DomainType::Test && firmware != Firmware::Bios && host.address_bits > bits
}

fn has_wide_bar(function: &Function) -> bool {
    wide_bars(std::slice::from_ref(function)).next().is_some()
}

/// The unit of a device, its address bits and where they are from; or why they are not known.
fn bits_for<'a>(facts: &'a Facts, function: &Function) -> Result<(&'a str, u32, String), String> {
    let link = format!("/sys/bus/pci/devices/{}/iommu", function.address);
    let name = facts.units.get(&function.address).ok_or(format!("{link} is missing"))?;
    let unit = facts.readings.iommus.iter().find(|unit| unit.name == *name);
    let known = unit.and_then(|unit| of_intel(unit).or_else(|| of_amd(unit, &facts.readings.release)));
    let (bits, evidence) = known.ok_or(format!("/sys/class/iommu/{name} has neither intel-iommu/cap nor amd-iommu/features"))?;
    Ok((name, bits, evidence))
}

// VT-d specification 11.4.2: bits 21 to 16 are the guest address width less one, bits 12 to 8 the depths of page tables: 39, 48, 57 bits.
fn of_intel(unit: &IommuUnit) -> Option<(u32, String)> {
    let capability = unit.capability?;
    let most = ((capability >> 16) & 0x3f) + 1;
    let depths = (capability >> 8) & 0x1f;
    let deepest = [(0b1000, 57), (0b100, 48), (0b10, 39)].into_iter().find(|(bit, _)| depths & bit != 0).map_or(most, |(_, bits)| bits);
    let bits = u32::try_from(most.min(deepest)).ok()?;
    Some((bits, format!("/sys/class/iommu/{}/intel-iommu/cap: {capability:x}", unit.name)))
}

// AMD I/O virtualization specification, extended features: bits 11 to 10 are the host's depth of page tables: 4, 5 or 6 levels.
fn of_amd(unit: &IommuUnit, release: &str) -> Option<(u32, String)> {
    let text = unit.features.as_deref()?;
    let features = u64::from_str_radix(extended_features(text, release)?, 16).ok()?;
    let bits = match (features >> 10) & 0b11 {
        0 => 48,
        1 => 57,
        2 => 64,
        _ => return None,
    };
    Some((bits, format!("/sys/class/iommu/{}/amd-iommu/features: {text}", unit.name)))
}

// Up to Linux 5.10 the register alone; then `second:first`, and since 6.7 `first:second` (drivers/iommu/amd/init.c).
fn extended_features<'a>(text: &'a str, release: &str) -> Option<&'a str> {
    let Some((left, right)) = text.split_once(':') else { return Some(text) };
    Some(if kernel_version(release)? >= (6, 7) { left } else { right })
}

/// Mappings of a guest without a virtual IOMMU: its RAM in a few pieces, ROMs, and the regions of devices.
const FEWEST_MAPPINGS: u64 = 64;
/// By default (`drivers/vfio/vfio_iommu_type1.c`).
const DEFAULT_MAPPINGS: u64 = 65535;

fn dma_entry_limit(subject: Subject<'_>) -> Option<Finding> {
    const CODE: &str = "dma-entry-limit";
    const FILE: &str = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";
    let Some(limit) = subject.facts.readings.dma_entry_limit else {
        let message = "how many DMA mappings a guest may have is not known";
        return Some(Finding::unknown(CODE, message, format!("{FILE} is missing: the module is not loaded yet, or built in")));
    };
    let regions: usize = subject.devices.iter().map(|function| function.bars.len()).sum();
    let needed = FEWEST_MAPPINGS + regions as u64;
    let severity = if limit < needed { Severity::Error } else { Severity::Warning };
    if limit >= DEFAULT_MAPPINGS {
        return None;
    }
    let message = format!("a guest may have {limit} DMA mappings, fewer than by default; this one needs about {needed}");
    let finding = Finding::new(CODE, severity, message).because(format!("{FILE}: {limit}"));
    Some(finding.remedy(format!("options vfio_iommu_type1 dma_entry_limit={DEFAULT_MAPPINGS} in /etc/modprobe.d, and load it anew")))
}
