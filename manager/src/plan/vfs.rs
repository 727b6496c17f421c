//! How many virtual functions a physical function is to have. They are made with host drivers kept from them (P56), and never taken
//! away while one is claimed, in the pool or held (P43, P51).

use vfio::{Change, Function, PciAddress};

use super::check::{self, allowance, ownership};
use super::{Refusal, Situation};

/// The changes from what there is to `count`; none where it is so already.
pub(super) fn lane(situation: &Situation<'_>, device: PciAddress, count: u16) -> Vec<Change> {
    let Some(function) = situation.inventory.devices.get(&device) else { return Vec::new() };
    let Some(sriov) = function.sriov.as_ref().filter(|sriov| sriov.enabled != count) else { return Vec::new() };
    let number = Change::VfCount { device, from: sriov.enabled, to: count };
    // NVIDIA's tool binds what it makes to its own driver, which is their VFIO driver.
    if is_nvidia(function) {
        return vec![number];
    }
    let recorded = situation.ledger.vfs.get(&device).map(|intent| intent.autoprobe);
    let was_on = recorded.unwrap_or(sriov.autoprobe);
    let off = Change::VfAutoprobe { device, from: true, to: false };
    let on = off.clone().swapped();
    // It stays off while there are any: a host driver that is loaded later would take them. Off also before they are taken away,
    // because what undoes that makes them.
    let before = sriov.autoprobe.then_some(off);
    let after = (count == 0 && was_on).then_some(on);
    before.into_iter().chain([number]).chain(after).collect()
}

/// What speaks against it.
pub(super) fn against(situation: &Situation<'_>, device: PciAddress, count: u16, lane: &[Change]) -> Vec<Refusal> {
    let function = situation.inventory.devices.get(&device);
    let Some((function, sriov)) = function.and_then(|function| Some((function, function.sriov.as_ref()?))) else {
        return vec![Refusal::NoVirtualFunctions { device }];
    };
    if count > sriov.total {
        return vec![Refusal::TooManyFunctions { device, count, total: sriov.total }];
    }
    let mut refusals: Vec<_> = allowance(situation, function).into_iter().collect();
    if lane.is_empty() {
        return refusals;
    }
    if function.driver.is_none() || function.is_on_vfio() {
        refusals.push(Refusal::NoHostDriver { device, driver: function.driver.clone() });
    }
    if is_nvidia(function) {
        refusals.extend(against_nvidia(situation, device, (count, sriov.total)));
        refusals.extend(check::held(situation, &[device], lane));
    }
    refusals.extend(ownership(situation, &[device]));
    refusals.extend(sriov.functions.iter().flat_map(|virtual_function| in_use(situation, (device, function), *virtual_function)));
    refusals
}

/// Units that are to be paused for it: NVIDIA's tool unbinds the physical function, which nobody may hold (P43).
pub(super) fn pauses(situation: &Situation<'_>, device: PciAddress, lane: &[Change]) -> Vec<(String, PciAddress)> {
    if situation.inventory.devices.get(&device).is_some_and(is_nvidia) { check::pauses(situation, &[device], lane) } else { Vec::new() }
}

fn is_nvidia(function: &Function) -> bool {
    function.driver.as_deref() == Some("nvidia")
}

// All or none, and by its own tool only: it refuses what is stored into `sriov_numvfs`.
fn against_nvidia(situation: &Situation<'_>, device: PciAddress, (count, total): (u16, u16)) -> Vec<Refusal> {
    if !situation.surroundings.sriov_manage {
        return vec![Refusal::NoVendorTool { device }];
    }
    if count == 0 || count == total { Vec::new() } else { vec![Refusal::AllOrNone { device, count, total }] }
}

fn in_use(situation: &Situation<'_>, (device, parent): (PciAddress, &Function), function: PciAddress) -> Vec<Refusal> {
    let mut refusals = ownership(situation, &[function]);
    // NVIDIA's tool binds those that it makes to its own driver: only another one has taken it.
    let is_foreign = |driver: &String| !is_nvidia(parent) || driver != "nvidia";
    let driver = situation.inventory.devices.get(&function).and_then(|function| function.driver.clone()).filter(is_foreign);
    if refusals.is_empty() && situation.ledger.devices.contains_key(&function) {
        refusals.push(Refusal::FunctionInPool { device, function });
    } else if let Some(driver) = driver {
        refusals.push(Refusal::FunctionInUse { device, function, driver });
    }
    let holders = situation.surroundings.holders.get(&function).filter(|holders| !holders.is_empty());
    refusals.extend(holders.map(|holders| Refusal::Held { device: function, holders: holders.clone(), pausable: Vec::new() }));
    refusals
}
