//! What speaks against moving a bundle.

use vfio::{Bundle, Change, Function, Holder, Iommu, Kind, PciAddress, VgpuInterface};

use super::{Refusal, Situation, functions};
use crate::config::Use;

/// Against taking a bundle from the host. A bundle that is where it is wished is refused nothing.
pub(super) fn assign(situation: &Situation<'_>, bundle: &Bundle, force: bool, lane: &[Change]) -> Vec<Refusal> {
    let mut refusals = ownership(situation, &bundle.devices);
    refusals.extend(functions(situation, bundle).filter(|function| function.kind == Kind::PhysicalFunction).map(never_moves));
    refusals.extend(functions(situation, bundle).filter_map(|function| another_device(situation, function)));
    for function in functions(situation, bundle) {
        match situation.config.use_in(situation.inventory, function) {
            Use::Pool | Use::OnDemand if is_lent(situation, function) => refusals.push(Refusal::WasLent { device: function.address }),
            Use::Pool | Use::OnDemand | Use::Lend { .. } => {}
            use_ @ Use::Observe => refusals.push(Refusal::NotAllowed { device: function.address, use_ }),
        }
    }
    let is_ours = functions(situation, bundle).all(|function| situation.ledger.record_of(function).is_some());
    if lane.is_empty() && is_ours {
        return refusals;
    }
    refusals.extend(isolation(situation, bundle));
    for function in functions(situation, bundle) {
        refusals.extend(against(situation, function, force));
    }
    refusals.extend(held(situation, &bundle.devices, lane));
    refusals
}

// P26: the record at its address is about another one, which has left or sits elsewhere.
fn another_device(situation: &Situation<'_>, function: &Function) -> Option<Refusal> {
    let record = situation.ledger.devices.get(&function.address)?;
    let is = function.identity.clone();
    (!record.identity.matches(&is)).then(|| Refusal::AnotherDevice { device: function.address, was: record.identity.clone(), is })
}

fn is_lent(situation: &Situation<'_>, function: &Function) -> bool {
    situation.ledger.record_of(function).is_some_and(|record| record.lent)
}

/// Against giving a bundle back to the host.
pub(super) fn release(situation: &Situation<'_>, bundle: &Bundle, lane: &[Change]) -> Vec<Refusal> {
    let mut refusals = ownership(situation, &bundle.devices);
    if !lane.is_empty() {
        // Also a VFIO driver may have made some (vfio-pci's enable_sriov).
        refusals.extend(functions(situation, bundle).filter_map(live_functions));
    }
    refusals.extend(held(situation, &bundle.devices, lane));
    refusals
}

fn never_moves(function: &Function) -> Refusal {
    Refusal::NeverMoves { device: function.address }
}

/// Against changing what is not the host's, or not gpuward's, to make of a physical function.
pub(super) fn allowance(situation: &Situation<'_>, function: &Function) -> Option<Refusal> {
    match situation.config.use_in(situation.inventory, function) {
        Use::Pool | Use::OnDemand => None,
        use_ @ (Use::Observe | Use::Lend { .. }) => Some(Refusal::NotAllowed { device: function.address, use_ }),
    }
}

/// Against touching devices that somebody has.
pub(super) fn ownership(situation: &Situation<'_>, devices: &[PciAddress]) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    for &device in devices {
        if let Some((claim, record)) = situation.ledger.claim_on(device) {
            refusals.push(Refusal::Claimed { device, claim, machine: record.machine });
        } else if let Some(domain) = situation.surroundings.domains.get(&device) {
            refusals.push(Refusal::UsedByDomain { device, domain: domain.clone() });
        }
        if let Some(quarantine) = situation.ledger.quarantines.get(&device) {
            refusals.push(Refusal::Quarantined { device, reason: quarantine.reason.clone() });
        }
        if let Some(function) = situation.inventory.devices.get(&device).filter(|function| function.locked) {
            refusals.push(Refusal::Locked { device, driver: function.driver.clone() });
        }
        if let Some((job, kind)) = situation.surroundings.busy.get(&device) {
            refusals.push(Refusal::Busy { device, job: *job, kind });
        }
    }
    refusals
}

fn isolation(situation: &Situation<'_>, bundle: &Bundle) -> Vec<Refusal> {
    let Some(device) = bundle.main() else { return Vec::new() };
    let inventory = situation.inventory;
    if inventory.iommu == Iommu::Off {
        return vec![Refusal::IommuOff { device }];
    }
    if situation.surroundings.unsafe_noiommu {
        return vec![Refusal::UnsafeNoIommu { device }];
    }
    let mut refusals = Vec::new();
    for function in functions(situation, bundle).filter(|function| function.group.is_none()) {
        refusals.push(Refusal::NoGroup { device: function.address });
    }
    for &id in &bundle.groups {
        let Some(group) = inventory.groups.get(&id) else { continue };
        if group.reserved_direct {
            refusals.push(Refusal::ReservedRegion { device, group: id });
        }
        let better = || inventory.ports.iter().filter(|port| port.isolates()).map(|port| port.port).collect();
        let foreign = bundle.foreign.iter().filter(|member| group.members.contains(member) && member.is_in_the_way());
        refusals.extend(foreign.map(|other| Refusal::Foreign {
            device,
            group: id,
            other: other.clone(),
            acs: group.acs.clone(),
            better: better(),
        }));
    }
    refusals
}

fn against(situation: &Situation<'_>, function: &Function, force: bool) -> Vec<Refusal> {
    let device = function.address;
    let mut refusals = Vec::new();
    if (function.boot_vga || !function.bar_claimants.is_empty()) && !force {
        refusals.push(Refusal::Display { device, boot_vga: function.boot_vga, claimants: function.bar_claimants.clone() });
    }
    refusals.extend(live_functions(function));
    if function.vgpu == Some(VgpuInterface::VendorVfio) && function.physical_function.is_some() {
        refusals.push(Refusal::VendorVfio { device, driver: function.driver.clone() });
    }
    if !situation.surroundings.drivers.contains(&function.vfio_driver) {
        refusals.push(Refusal::NoDriver { device, driver: function.vfio_driver.clone() });
    }
    refusals
}

fn live_functions(function: &Function) -> Option<Refusal> {
    let sriov = function.sriov.as_ref().filter(|sriov| sriov.enabled > 0)?;
    Some(Refusal::LiveFunctions { device: function.address, count: sriov.enabled, functions: sriov.functions.clone() })
}

/// Against taking devices from drivers while processes that may not be paused hold them.
pub(super) fn held(situation: &Situation<'_>, devices: &[PciAddress], lane: &[Change]) -> Vec<Refusal> {
    if !lane.iter().any(takes_from_driver) {
        return Vec::new();
    }
    let pausable = &situation.config.policy.pause_units;
    let held = devices.iter().filter_map(|device| Some((*device, situation.surroundings.holders.get(device)?)));
    let held = held.filter(|(_, holders)| holders.iter().any(|holder| !may_be_paused(holder, pausable)));
    held.map(|(device, holders)| Refusal::Held { device, holders: holders.clone(), pausable: pausable.clone() }).collect()
}

fn may_be_paused(holder: &Holder, pausable: &[String]) -> bool {
    holder.unit.as_ref().is_some_and(|unit| pausable.contains(unit))
}

// NVIDIA's tool takes the physical function from its driver to make virtual ones.
fn takes_from_driver(change: &Change) -> bool {
    matches!(change, Change::Binding { .. } | Change::VfCount { .. })
}

/// Units that are to be paused for devices to change their drivers, each with a device that it holds.
pub(super) fn pauses(situation: &Situation<'_>, devices: &[PciAddress], lane: &[Change]) -> Vec<(String, PciAddress)> {
    if !lane.iter().any(takes_from_driver) {
        return Vec::new();
    }
    let holders = devices.iter().filter_map(|device| situation.surroundings.holders.get(device)).flatten();
    let pausable = &situation.config.policy.pause_units;
    let units = holders.filter(|holder| may_be_paused(holder, pausable)).filter_map(|holder| Some((holder.unit.clone()?, holder.device)));
    units.collect()
}
