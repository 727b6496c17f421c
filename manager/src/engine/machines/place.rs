//! Which free bundles meet the wishes of a machine: pure.

use std::collections::BTreeMap;

use vfio::{Function, Inventory, Kind};

use super::super::claims::Free;
use crate::spec::{Wish, WishKind};

/// A wish that cannot be met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unmet {
    /// Its index.
    pub wish: usize,
    /// How many free bundles there would be for it, on whatever NUMA node.
    pub free: usize,
}

/// Bundles for `wishes`, in their order.
///
/// Wishes for one device come first, then those for a model: a wish for any does not take what another must have. What is in the
/// pool already comes before what would have to be taken from the host.
pub(super) fn place(wishes: &[Wish], free: &[Free], inventory: &Inventory) -> Result<Vec<Free>, Unmet> {
    let mut left: Vec<&Free> = free.iter().collect();
    left.sort_by_key(|bundle| (bundle.on_demand, bundle.main));
    let mut by_need: Vec<usize> = (0..wishes.len()).collect();
    by_need.sort_by_key(|index| (wishes[*index].identity.is_none(), wishes[*index].model.is_none()));
    let mut placed: BTreeMap<usize, Vec<Free>> = BTreeMap::new();
    for index in by_need {
        let wish = &wishes[index];
        let fitting: Vec<&Free> = left.iter().copied().filter(|bundle| fits(wish, bundle, inventory)).collect();
        let unmet = Unmet { wish: index, free: fitting.len() };
        let chosen = choose(wish, fitting, inventory).ok_or(unmet)?;
        left.retain(|bundle| !chosen.contains(bundle));
        placed.insert(index, chosen);
    }
    Ok(placed.into_values().flatten().collect())
}

/// Whether a function is what a wish is for.
pub(super) fn is_wished(wish: &Wish, function: &Function) -> bool {
    let kind = match wish.kind {
        WishKind::Gpu => Kind::Gpu,
        WishKind::Vf => Kind::VirtualFunction,
    };
    let ids = (function.ids.vendor, function.ids.device);
    function.kind == kind && wish.model.is_none_or(|model| (model.vendor, model.device) == ids)
}

/// Whether `name` is a function's address or identity.
pub(super) fn is_called(function: &Function, name: &str) -> bool {
    function.address.to_string() == name || function.identity.to_string() == name
}

fn fits(wish: &Wish, bundle: &Free, inventory: &Inventory) -> bool {
    let Some(main) = inventory.devices.get(&bundle.main) else { return false };
    is_wished(wish, main) && wish.identity.as_ref().is_none_or(|name| is_called(main, name))
}

fn choose(wish: &Wish, fitting: Vec<&Free>, inventory: &Inventory) -> Option<Vec<Free>> {
    let count = wish.count as usize;
    let first = |bundles: &[&Free]| bundles.iter().take(count).map(|bundle| (*bundle).clone()).collect();
    if !wish.same_numa || count == 1 {
        return (fitting.len() >= count).then(|| first(&fitting));
    }
    let mut nodes: BTreeMap<Option<u32>, Vec<&Free>> = BTreeMap::new();
    for bundle in fitting {
        nodes.entry(inventory.devices.get(&bundle.main).and_then(|main| main.numa_node)).or_default().push(bundle);
    }
    // The node where least is left over: the others stay whole for larger wishes.
    let taken = |bundles: &[&Free]| bundles.iter().take(count).filter(|bundle| bundle.on_demand).count();
    let enough = nodes.into_values().filter(|bundles| bundles.len() >= count);
    enough.min_by_key(|bundles| (taken(bundles), bundles.len())).map(|bundles| first(&bundles))
}

#[cfg(test)]
mod tests;
