//! Looking at a host: every function read once, by named attributes, into one [`Inventory`].
//!
//! Devices may vanish while we look and fields may be forbidden: such a field is named in `unreadable`, and a device that has
//! left is left out. Nothing here fails as a whole.

use std::collections::{BTreeMap, BTreeSet};

use pci_ids::{FromId, Vendor};

use crate::aliases::{VfioAliases, driver_of};
use crate::attributes::Attributes;
use crate::class;
use crate::config_space::{Port, REQUIRED_ACS};
use crate::iomem;
use crate::{
    AcsCapability, Function, Group, GroupId, Host, Identity, Ids, Inventory, Iommu, Kind, Link, Member, PciAddress, PortAcs, Power, Sriov,
    VgpuInterface, attribute,
};

pub(crate) const DEVICES: &str = "sys/bus/pci/devices";
const GROUPS: &str = "sys/kernel/iommu_groups";

impl Inventory {
    /// Looks at `host` now.
    pub fn observe(host: &Host, generation: u64) -> Self {
        let mut scan = Scan::new(host);
        let found = scan.sightings();
        let devices = scan.devices(&found);
        let ports = scan.ports(&found);
        let groups = scan.groups(&found, &devices, &ports);
        let iommu = if scan.has_groups() { Iommu::On } else { Iommu::Off };
        Self { generation, devices, groups, ports, iommu, unreadable: scan.unreadable }
    }
}

/// What is read of every function, device or not.
pub(crate) struct Sighting {
    ids: Ids,
    class: u32,
    kind: Kind,
    driver: Option<String>,
    group: Option<GroupId>,
    /// `/sys/devices/…`, from the link; empty where the tree has a directory instead.
    path: String,
}

struct Scan<'a> {
    host: &'a Host,
    aliases: VfioAliases,
    claimants: BTreeMap<PciAddress, Vec<String>>,
    unreadable: Vec<String>,
}

impl<'a> Scan<'a> {
    fn new(host: &'a Host) -> Self {
        let mut unreadable = Vec::new();
        let mut note = |error: crate::HostError| unreadable.push(format!("{error}: {}", error.kind()));
        let aliases = VfioAliases::read(host).unwrap_or_else(|error| {
            note(error);
            VfioAliases::default()
        });
        let iomem = host.read("proc/iomem").unwrap_or_else(|error| {
            note(error);
            None
        });
        Self { host, aliases, claimants: iomem::claimants(iomem.as_deref().unwrap_or_default()), unreadable }
    }

    fn list(&mut self, dir: &str) -> Vec<String> {
        let names = self.host.entries(dir).unwrap_or_else(|error| {
            self.unreadable.push(format!("{error}: {}", error.kind()));
            None
        });
        names.unwrap_or_default()
    }

    fn has_groups(&mut self) -> bool {
        !self.list(GROUPS).is_empty()
    }

    fn sightings(&mut self) -> BTreeMap<PciAddress, Sighting> {
        let mut found = BTreeMap::new();
        for name in self.list(DEVICES) {
            match name.parse() {
                Ok(address) => found.extend(self.sighting(address).map(|sighting| (address, sighting))),
                Err(error) => self.unreadable.push(format!("{DEVICES}: {error}")),
            }
        }
        let gpu_slots: BTreeSet<_> = found.iter().filter(|(_, seen)| seen.kind == Kind::Gpu).map(|(address, _)| slot(*address)).collect();
        for (address, seen) in &mut found {
            if seen.kind == Kind::Other && class::is_companion(seen.class) && gpu_slots.contains(&slot(*address)) {
                seen.kind = Kind::Companion;
            }
        }
        found
    }

    fn sighting(&mut self, address: PciAddress) -> Option<Sighting> {
        let mut of = Attributes::new(self.host, address);
        let vendor = of.hex("vendor").and_then(|value| u16::try_from(value).ok());
        let class = of.hex("class").and_then(|value| u32::try_from(value).ok()).unwrap_or_default();
        let device = of.hex("device").and_then(|value| u16::try_from(value).ok()).unwrap_or_default();
        let physical = of.link("physfn");
        let driver = of.link("driver");
        let group = of.link("iommu_group").and_then(|name| name.parse().ok()).map(GroupId);
        let path = of.path();
        let kind = class::kind(class, vendor.unwrap_or_default(), physical.is_some());
        let kind = if kind == Kind::Other && of.exists("sriov_totalvfs") { Kind::PhysicalFunction } else { kind };
        let problems = of.into_problems();
        // A function whose vendor cannot be read has left, or its files are garbage: then it is said, not guessed.
        let Some(vendor) = vendor else {
            self.unreadable.extend(problems.into_iter().map(|problem| format!("{address} {problem}")));
            return None;
        };
        let ids = Ids { vendor, device, ..Ids::default() };
        Some(Sighting { ids, class, kind, driver, group, path })
    }

    fn devices(&self, found: &BTreeMap<PciAddress, Sighting>) -> BTreeMap<PciAddress, Function> {
        let devices = found.iter().filter(|(_, seen)| is_device(seen.kind));
        devices.map(|(address, seen)| (*address, self.function(*address, seen, on_same_bus(found, *address)))).collect()
    }

    fn function(&self, address: PciAddress, seen: &Sighting, on_same_bus: Vec<PciAddress>) -> Function {
        let mut of = Attributes::new(self.host, address);
        let ids = Ids { subsystem_vendor: of.id("subsystem_vendor"), subsystem_device: of.id("subsystem_device"), ..seen.ids };
        let power = power(&mut of);
        let serial = of.config(&power).and_then(|config| config.serial());
        let model = pci_ids::Device::from_vid_pid(ids.vendor, ids.device);
        let vendor = Vendor::from_id(ids.vendor);
        let (driver_override, locked) = of.locked("driver_override");
        Function {
            address,
            kind: seen.kind,
            ids,
            class: seen.class,
            revision: of.hex("revision").and_then(|value| u8::try_from(value).ok()).unwrap_or_default(),
            vendor_name: vendor.map(|vendor| vendor.name().to_owned()),
            model_name: model.map(|model| model.name().to_owned()),
            identity: Identity { slot: slot_path(&seen.path, address), ids, serial },
            bars: of.bars(),
            link: link(&mut of),
            numa_node: of.decimal("numa_node").and_then(|node| u32::try_from(node).ok()),
            driver: seen.driver.clone(),
            driver_override: driver_override.filter(|name| !name.is_empty() && name != "(null)"),
            locked,
            group: seen.group,
            reset_methods: of.words("reset_method"),
            on_same_bus,
            bus_reset_at: self.bus_reset_at(&seen.path),
            power,
            sriov: sriov(&mut of),
            physical_function: of.link("physfn").and_then(|name| name.parse().ok()),
            vgpu: vgpu(&of, seen.kind),
            boot_vga: seen.class >> 16 == 0x03 && of.decimal("boot_vga") == Some(1),
            bar_claimants: self.claimants_of(address, seen),
            vfio_device: of.entry_of("vfio-dev"),
            vfio_driver: self.vfio_driver(&mut of),
            unreadable: of.into_problems(),
        }
    }

    fn bus_reset_at(&self, path: &str) -> Option<PciAddress> {
        let bridge = above(path).pop()?;
        self.host.exists(attribute(bridge, "reset_subordinate")).then_some(bridge)
    }

    fn claimants_of(&self, address: PciAddress, seen: &Sighting) -> Vec<String> {
        let names = self.claimants.get(&address).into_iter().flatten();
        names.filter(|name| Some(name.as_str()) != seen.driver.as_deref()).cloned().collect()
    }

    fn vfio_driver(&self, of: &mut Attributes<'_>) -> String {
        let modalias = of.text("modalias").unwrap_or_default();
        match self.aliases.module(&modalias) {
            Some("vfio_pci") | None => "vfio-pci".to_owned(),
            Some(module) => driver_of(self.host, module),
        }
    }

    /// Root and downstream ports that lack a part of ACS, and those that lack none: what a remedy can point at.
    fn ports(&self, found: &BTreeMap<PciAddress, Sighting>) -> Vec<PortAcs> {
        let bridges = found.iter().filter(|(_, seen)| seen.kind == Kind::Bridge);
        bridges.filter_map(|(address, _)| self.port(*address)).collect()
    }

    fn port(&self, port: PciAddress) -> Option<PortAcs> {
        let config = Attributes::new(self.host, port).config(&Power::default())?;
        if !config.is_whole() {
            return Some(PortAcs { port, capability: AcsCapability::Unreadable, missing: Vec::new() });
        }
        if config.port() == Port::Other {
            return None;
        }
        let control = config.acs_control();
        let capability = if control.is_some() { AcsCapability::Present } else { AcsCapability::Absent };
        let lacking = REQUIRED_ACS.iter().filter(|(bit, _)| control.unwrap_or_default() & bit == 0);
        Some(PortAcs { port, capability, missing: lacking.map(|(_, name)| *name).collect() })
    }

    fn groups(
        &mut self,
        found: &BTreeMap<PciAddress, Sighting>,
        devices: &BTreeMap<PciAddress, Function>,
        ports: &[PortAcs],
    ) -> BTreeMap<GroupId, Group> {
        let mut groups: BTreeMap<GroupId, Group> = BTreeMap::new();
        for id in devices.values().filter_map(|device| device.group) {
            groups.entry(id).or_insert_with(|| Group { id, members: Vec::new(), acs: Vec::new(), reserved_direct: false });
        }
        for (address, seen) in found {
            let Some(group) = seen.group.and_then(|id| groups.get_mut(&id)) else { continue };
            let (description, driver) = (class::describe(seen.class), seen.driver.clone());
            group.members.push(Member { address: *address, kind: seen.kind, description, ids: seen.ids, driver });
        }
        for group in groups.values_mut() {
            group.reserved_direct = self.has_direct_region(group.id);
            if group.members.iter().filter(|member| member.kind != Kind::Bridge).count() > 1 {
                let above: BTreeSet<_> = group.members.iter().flat_map(|member| above(&found[&member.address].path)).collect();
                group.acs = ports.iter().filter(|port| above.contains(&port.port) && !port.isolates()).cloned().collect();
            }
        }
        groups
    }

    fn has_direct_region(&mut self, id: GroupId) -> bool {
        let text = self.host.read(format!("{GROUPS}/{id}/reserved_regions")).unwrap_or_else(|error| {
            self.unreadable.push(format!("{error}: {}", error.kind()));
            None
        });
        text.unwrap_or_default().lines().any(|line| line.split_whitespace().nth(2) == Some("direct"))
    }
}

fn is_device(kind: Kind) -> bool {
    match kind {
        Kind::Gpu | Kind::VirtualFunction | Kind::Switch | Kind::Companion | Kind::PhysicalFunction => true,
        Kind::Bridge | Kind::Other => false,
    }
}

fn on_same_bus(found: &BTreeMap<PciAddress, Sighting>, address: PciAddress) -> Vec<PciAddress> {
    let bus = |address: PciAddress| (address.domain(), address.bus());
    found.keys().filter(|other| **other != address && bus(**other) == bus(address)).copied().collect()
}

fn slot(address: PciAddress) -> (u32, u8, u8) {
    (address.domain(), address.bus(), address.device())
}

fn power(of: &mut Attributes<'_>) -> Power {
    let d3cold_allowed = of.decimal("d3cold_allowed").map(|allowed| allowed != 0);
    Power { state: of.text("power_state"), control: of.text("power/control"), d3cold_allowed }
}

fn link(of: &mut Attributes<'_>) -> Option<Link> {
    let max_speed = of.text("max_link_speed")?;
    let width = |value: Option<i64>| value.and_then(|width| u32::try_from(width).ok()).unwrap_or_default();
    Some(Link {
        speed: of.text("current_link_speed").unwrap_or_default(),
        width: width(of.decimal("current_link_width")),
        max_speed,
        max_width: width(of.decimal("max_link_width")),
    })
}

fn sriov(of: &mut Attributes<'_>) -> Option<Sriov> {
    let count = |value: Option<i64>| value.and_then(|count| u16::try_from(count).ok());
    let total = count(of.decimal("sriov_totalvfs"))?;
    let autoprobe = of.decimal("sriov_drivers_autoprobe") != Some(0);
    // Counted by their links: `sriov_numvfs` is read under the device's lock.
    let functions: Vec<_> = (0..total).map_while(|number| of.link(&format!("virtfn{number}"))?.parse().ok()).collect();
    let enabled = u16::try_from(functions.len()).unwrap_or(total);
    Some(Sriov { total, enabled, autoprobe, functions })
}

fn vgpu(of: &Attributes<'_>, kind: Kind) -> Option<VgpuInterface> {
    if !matches!(kind, Kind::Gpu | Kind::VirtualFunction) {
        return None;
    }
    if of.exists("nvidia/current_vgpu_type") {
        return Some(VgpuInterface::VendorVfio);
    }
    of.exists("mdev_supported_types").then_some(VgpuInterface::Mdev)
}

/// `pci0000:40/01.0/00.0` of `…/devices/pci0000:40/0000:40:01.0/0000:41:00.0`: bus numbers are left out, they renumber.
fn slot_path(path: &str, address: PciAddress) -> String {
    let Some((_, below)) = path.split_once("devices/") else { return address.to_string() };
    let hop = |name: &str| match name.parse::<PciAddress>() {
        Ok(hop) => format!("{:02x}.{:x}", hop.device(), hop.function()),
        Err(_) => name.to_owned(),
    };
    below.split('/').map(hop).collect::<Vec<_>>().join("/")
}

/// The bridges above a function, by its path.
fn above(path: &str) -> Vec<PciAddress> {
    let parents = path.rsplit_once('/').map_or("", |(parents, _)| parents);
    parents.split('/').filter_map(|name| name.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_path_has_no_bus_numbers() {
        let address = "0000:41:00.0".parse().unwrap();
        assert_eq!(slot_path("../../../devices/pci0000:40/0000:40:01.0/0000:41:00.0", address), "pci0000:40/01.0/00.0");
        let vmd = "../../../devices/pci0000:e0/0000:e0:05.5/pci10000:00/10000:00:02.0/10000:01:00.0";
        assert_eq!(slot_path(vmd, address), "pci0000:e0/05.5/pci10000:00/02.0/00.0");
        assert_eq!(slot_path("", address), "0000:41:00.0");
    }

    #[test]
    fn the_bridges_above_a_function_are_those_of_its_path() {
        let path = "../../../devices/pci0000:40/0000:40:01.0/0000:41:00.0";
        assert_eq!(above(path), ["0000:40:01.0".parse().unwrap()]);
        assert!(above("").is_empty());
    }
}
