//! IOMMU groups.

use std::sync::Arc;

use vfio::{AcsCapability, Group, GroupId, PortAcs};
use zbus::interface;

use super::dict::Dict;
use super::manager::Answer;
use super::paths::{self, Path};
use super::service::Service;

/// `org.gpuward1.IommuGroup`
pub(super) struct IommuGroup {
    pub(super) service: Arc<Service>,
    pub(super) id: GroupId,
}

impl IommuGroup {
    fn of<T: Default>(&self, fact: impl FnOnce(&Group) -> T) -> T {
        self.service.view().inventory.groups.get(&self.id).map(fact).unwrap_or_default()
    }
}

#[interface(name = "org.gpuward1.IommuGroup")]
impl IommuGroup {
    /// Its members that are devices.
    #[zbus(property)]
    fn members(&self) -> Vec<Path> {
        let view = self.service.view();
        let is_device = |address: &vfio::PciAddress| view.inventory.devices.contains_key(address);
        self.of(|group| group.members.iter().map(|member| member.address).filter(is_device).map(paths::device).collect())
    }

    /// Its other members: `address` (s), `description` (s), `driver` (s, empty without one). Bridges are never in the way.
    #[zbus(property)]
    fn others(&self) -> Vec<Answer> {
        let view = self.service.view();
        let other = |member: &&vfio::Member| !view.inventory.devices.contains_key(&member.address);
        let tell = |member: &vfio::Member| {
            let mut dict = Dict::new();
            dict.put("address", member.address.to_string()).put("description", member.description.clone());
            dict.put("driver", member.driver.clone().unwrap_or_default());
            dict.into_map()
        };
        self.of(|group| group.members.iter().filter(other).map(tell).collect())
    }

    /// Whether a guest could have it as it is now: no member is bound to a host driver.
    #[zbus(property)]
    fn viable(&self) -> bool {
        self.service.view().inventory.not_viable(self.id).is_none()
    }

    /// Why not; empty where it is viable.
    #[zbus(property)]
    fn why_not(&self) -> String {
        self.service.view().inventory.not_viable(self.id).map(|why| why.to_string()).unwrap_or_default()
    }

    /// Ports above it that make it as big as it is: `port` (s), `capability` (s: present, absent, unreadable), `missing` (as).
    #[zbus(property)]
    fn acs(&self) -> Vec<Answer> {
        self.of(|group| group.acs.iter().map(port).collect())
    }
}

pub(super) fn port(port: &PortAcs) -> Answer {
    let capability = match port.capability {
        AcsCapability::Present => "present",
        AcsCapability::Absent => "absent",
        AcsCapability::Unreadable => "unreadable",
    };
    let missing: Vec<String> = port.missing.iter().map(|bit| (*bit).to_owned()).collect();
    let mut dict = Dict::new();
    dict.put("port", port.port.to_string()).put("capability", capability).put("missing", missing);
    dict.into_map()
}
