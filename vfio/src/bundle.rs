//! The devices that must move together.

use std::collections::BTreeSet;

use crate::{Function, GroupId, Inventory, Kind, Member, PciAddress};

/// A GPU with its companions, closed over its IOMMU groups: a device in one of these groups belongs to the bundle, and so does
/// whatever shares a slot with a GPU of it. A physical function that is no GPU does not belong: it is foreign to others, and never moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// Its devices in the order they bind: companions first, the GPU or other main device last.
    pub devices: Vec<PciAddress>,
    /// Its groups.
    pub groups: Vec<GroupId>,
    /// Members of its groups that are neither devices nor bridges: with one of them on a host driver nothing can be handed out.
    pub foreign: Vec<Member>,
}

impl Bundle {
    pub(crate) fn around(inventory: &Inventory, device: PciAddress) -> Self {
        let (mut devices, mut groups) = (BTreeSet::from([device]), BTreeSet::new());
        loop {
            let known = devices.len();
            groups.extend(devices.iter().filter_map(|address| inventory.devices[address].group));
            let moves = |other: &&Function| other.kind != Kind::PhysicalFunction;
            let same_group =
                inventory.devices.values().filter(moves).filter(|other| other.group.is_some_and(|group| groups.contains(&group)));
            let same_card = inventory.devices.values().filter(|other| devices.iter().any(|one| one_card(&inventory.devices[one], other)));
            let joined: Vec<_> = same_group.chain(same_card).map(|function| function.address).collect();
            devices.extend(joined);
            if devices.len() == known {
                break;
            }
        }
        let mut devices: Vec<_> = devices.into_iter().collect();
        devices.sort_by_key(|address| (inventory.devices[address].kind != Kind::Companion, std::cmp::Reverse(*address)));
        let members = groups.iter().filter_map(|group| inventory.groups.get(group)).flat_map(|group| &group.members);
        let is_foreign = |member: &&Member| matches!(member.kind, Kind::Other | Kind::PhysicalFunction) && member.address != device;
        let foreign = members.filter(is_foreign).cloned().collect();
        Self { devices, groups: groups.into_iter().collect(), foreign }
    }

    /// The device that the bundle is about: the GPU, virtual function or switch.
    pub fn main(&self) -> Option<PciAddress> {
        self.devices.last().copied()
    }
}

// A GPU and the companions of its slot are one card, whatever their groups.
fn one_card(one: &Function, other: &Function) -> bool {
    let slot = |function: &Function| (function.address.domain(), function.address.bus(), function.address.device());
    let of_a_card = |function: &Function| matches!(function.kind, Kind::Gpu | Kind::Companion);
    slot(one) == slot(other) && of_a_card(one) && of_a_card(other)
}
