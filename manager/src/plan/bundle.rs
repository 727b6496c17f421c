//! Bundles: devices that must move together.

use std::collections::BTreeSet;

use vfio::{Function, Inventory, Kind, PciAddress};

/// The bundle of `device`: its slot's GPU and companions, closed over their IOMMU groups, companions first and the GPU last.
///
/// Only devices belong to a bundle; a group's other members are in its way or are not (P22, P28).
pub fn of(inventory: &Inventory, device: PciAddress) -> Vec<PciAddress> {
    let mut bundle = BTreeSet::from([device]);
    loop {
        let more = inventory.devices.values().filter(|other| belongs(inventory, &bundle, other)).map(|other| other.address);
        let more: Vec<_> = more.collect();
        let before = bundle.len();
        bundle.extend(more);
        if bundle.len() == before {
            break;
        }
    }
    let mut ordered: Vec<_> = bundle.into_iter().collect();
    ordered.sort_by_key(|address| (inventory.devices.get(address).map(|function| rank(function.kind)), *address));
    ordered
}

fn belongs(inventory: &Inventory, bundle: &BTreeSet<PciAddress>, other: &Function) -> bool {
    bundle.iter().filter_map(|address| inventory.devices.get(address)).any(|member| {
        let same_group = member.group.is_some() && member.group == other.group;
        same_group || same_slot(member, other)
    })
}

// A virtual function can share the slot of its physical function: it moves alone.
fn same_slot(one: &Function, other: &Function) -> bool {
    let slot = |function: &Function| (function.address.domain(), function.address.bus(), function.address.device());
    let whole = |function: &Function| matches!(function.kind, Kind::Gpu | Kind::Companion);
    slot(one) == slot(other) && whole(one) && whole(other)
}

// Companions first, the GPU last: a GPU whose audio function is still on the host wakes with it.
fn rank(kind: Kind) -> u8 {
    match kind {
        Kind::Companion | Kind::Bridge | Kind::Other => 0,
        Kind::Switch => 1,
        Kind::VirtualFunction => 2,
        Kind::Gpu => 3,
    }
}
