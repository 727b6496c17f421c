//! What was observed of a host at one moment, as one value.

use std::collections::BTreeMap;

use crate::reset::{self, NoReset, Way};
use crate::{Bundle, Function, Group, GroupId, NotViable, PciAddress, PortAcs};

/// Every PCI function that matters to gpuward and every IOMMU group they are in, observed at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Grows with each observation that differs from the one before.
    pub generation: u64,
    /// Devices by address: GPUs, virtual functions, NVSwitches and companions.
    pub devices: BTreeMap<PciAddress, Function>,
    /// The groups of these devices, with all their members, devices or not.
    pub groups: BTreeMap<GroupId, Group>,
    /// PCIe root and downstream ports, with what they lack of access control services.
    pub ports: Vec<PortAcs>,
    /// Whether the kernel isolates devices at all.
    pub iommu: Iommu,
    /// Directories or files that could not be read as a whole, as `path: reason`.
    pub unreadable: Vec<String>,
}

impl Inventory {
    /// Takes from an earlier observation what could not be read because a driver had the device's lock.
    pub fn remember(&mut self, before: &Self) {
        for function in self.devices.values_mut().filter(|function| function.locked) {
            let before = before.devices.get(&function.address).filter(|before| before.identity == function.identity);
            function.driver_override = before.and_then(|before| before.driver_override.clone());
        }
    }

    /// Why no guest can have the group `id` as it is; `None` where it is viable or unknown.
    pub fn not_viable(&self, id: GroupId) -> Option<NotViable> {
        let on_vfio = |address| self.devices.get(&address).is_some_and(Function::is_on_vfio);
        self.groups.get(&id)?.not_viable(|member| on_vfio(member.address) || member.leaves_dma_alone())
    }

    /// How `function` is reset between two guests, alone or with its bundle.
    ///
    /// # Errors
    /// What speaks against each way that there is.
    pub fn reset_way(&self, function: &Function) -> Result<Way, NoReset> {
        let bundle = self.bundle(function.address).map(|bundle| bundle.devices).unwrap_or_default();
        reset::way(function, &bundle)
    }

    /// The devices that must move together with `device`; `None` where there is no such device.
    pub fn bundle(&self, device: PciAddress) -> Option<Bundle> {
        self.devices.contains_key(&device).then(|| Bundle::around(self, device))
    }
}

/// Whether the kernel runs with an IOMMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Iommu {
    /// `/sys/kernel/iommu_groups` is empty: nothing can be handed to a guest safely.
    #[default]
    Off,
    /// Groups exist.
    On,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Ids, Kind, Member};

    fn viable_beside(driver: Option<&str>) -> bool {
        let address = "0000:02:00.0".parse().unwrap();
        let driver = driver.map(str::to_owned);
        let other = Member { address, kind: Kind::Other, description: String::new(), ids: Ids::default(), driver };
        let group = Group { id: GroupId(7), members: vec![other], acs: Vec::new(), reserved_direct: false };
        let inventory = Inventory { groups: BTreeMap::from([(group.id, group)]), ..Inventory::default() };
        inventory.not_viable(GroupId(7)).is_none()
    }

    #[test]
    fn a_member_that_is_no_device_is_in_the_way_only_on_a_driver_with_dma_of_its_own() {
        assert!(viable_beside(None) && viable_beside(Some("vfio-pci")) && viable_beside(Some("pci-stub")));
        assert!(!viable_beside(Some("nvme")));
    }
}
