//! Checks of each device that the configuration lets gpuward have.

use vfio::{AcsCapability, Function, Kind, PortAcs, reset};

use super::{Finding, Patient, Severity};

pub(super) fn judge(patient: Patient<'_>, function: &Function) -> Vec<Finding> {
    if function.kind == Kind::PhysicalFunction {
        return Vec::new();
    }
    let checks = [
        driver(patient, function),
        group(patient, function),
        reserved_region(patient, function),
        no_reset(patient, function),
        other_managers(patient, function),
        unreadable(function),
    ];
    checks.into_iter().flatten().collect()
}

fn driver(patient: Patient<'_>, function: &Function) -> Option<Finding> {
    let driver = &function.vfio_driver;
    let drivers = &patient.readings.drivers;
    (!drivers.is_empty() && !drivers.contains(driver)).then(|| {
        Finding::of(function, "vfio-driver", Severity::Problem, format!("its VFIO driver {driver} is not loaded"))
            .because(format!("/sys/bus/pci/drivers/{driver} is missing"))
            .remedy(format!("modprobe {driver}; a file in /etc/modules-load.d loads it at boot"))
    })
}

fn group(patient: Patient<'_>, function: &Function) -> Option<Finding> {
    let id = function.group?;
    let bundle = patient.inventory.bundle(function.address)?;
    let group = patient.inventory.groups.get(&id)?;
    let foreign = bundle.foreign.iter().find(|member| group.members.contains(member) && member.is_in_the_way())?;
    let message = format!("it shares IOMMU group {id} with {} ({}), which is not part of its bundle", foreign.address, foreign.description);
    let finding = Finding::of(function, "group-shared", Severity::Problem, message);
    let finding = group.acs.iter().map(lack).fold(finding, Finding::because);
    Some(finding.remedy(format!("move {} to another slot, or the device below a port with ACS", foreign.address)))
}

fn lack(port: &PortAcs) -> String {
    match port.capability {
        AcsCapability::Present => format!("port {} lacks ACS {}", port.port, port.missing.join(" and ")),
        AcsCapability::Absent => format!("port {} has no ACS", port.port),
        AcsCapability::Unreadable => format!("port {} may have no ACS (its configuration space needs CAP_SYS_ADMIN)", port.port),
    }
}

fn reserved_region(patient: Patient<'_>, function: &Function) -> Option<Finding> {
    let group = patient.inventory.groups.get(&function.group?).filter(|group| group.reserved_direct)?;
    let finding = Finding::of(function, "reserved-region", Severity::Problem, "the firmware uses its DMA: the kernel refuses it to guests");
    let fact = format!("/sys/kernel/iommu_groups/{}/reserved_regions has a direct region (RMRR)", group.id);
    Some(finding.because(fact).remedy("switch off the firmware's use of the card (legacy USB, shared management), or ask its vendor"))
}

fn no_reset(patient: Patient<'_>, function: &Function) -> Option<Finding> {
    let bundle = patient.inventory.bundle(function.address)?;
    let why = reset::way(function, &bundle.devices).err()?;
    let finding = Finding::of(function, "no-reset", Severity::Warning, "no reset may be used on it: it cannot be cleaned between tenants");
    Some(finding.because(why.to_string()).remedy("a kernel module with a reset for its model, or one tenant only for this device"))
}

fn other_managers(patient: Patient<'_>, function: &Function) -> Option<Finding> {
    let address = function.address.to_string();
    let of_driverctl =
        patient.readings.driverctl.iter().filter(|name| name.ends_with(&address)).map(|name| format!("/etc/driverctl.d/{name}"));
    let of_mdevctl = patient.readings.mdevctl.iter().filter(|name| **name == address).map(|name| format!("/etc/mdevctl.d/{name}"));
    let evidence: Vec<_> = of_driverctl.chain(of_mdevctl).collect();
    if evidence.is_empty() {
        return None;
    }
    let finding = Finding::of(function, "other-manager", Severity::Warning, "another manager has plans with it at boot");
    let remedy = "let one of the two have it: driverctl unset-override, mdevctl undefine, or use = \"observe\" in gpuward.toml";
    Some(evidence.into_iter().fold(finding, Finding::because).remedy(remedy))
}

fn unreadable(function: &Function) -> Option<Finding> {
    let first = function.unreadable.first()?;
    let message = format!("{} of its attributes cannot be read", function.unreadable.len());
    let finding = Finding::of(function, "unreadable", Severity::Note, message);
    Some(finding.because(first.clone()).remedy("run as root; where it is, the kernel's log may say why"))
}
