//! What is observed of described hosts.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use tests::simhost::SimHost;
use vfio::{AcsCapability, Hold, Holders, Inventory, Iommu, Kind, NotViable, PciAddress};

fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

fn observe(host: &str) -> Inventory {
    let sim = SimHost::build(host).unwrap();
    let inventory = Inventory::observe(&sim.host(), 1);
    assert!(inventory.unreadable.is_empty(), "{:?}", inventory.unreadable);
    for device in inventory.devices.values() {
        assert!(device.unreadable.is_empty(), "{} {:?}", device.address, device.unreadable);
    }
    inventory
}

#[test]
fn the_gpus_and_switches_of_a_dgx_are_devices_and_its_bridges_are_not() {
    let inventory = observe("dgx-h100");
    let of_kind = |kind| inventory.devices.values().filter(|device| device.kind == kind).count();
    assert_eq!((of_kind(Kind::Gpu), of_kind(Kind::Switch), inventory.devices.len()), (8, 4, 12));
    let gpu = &inventory.devices[&address("0000:1b:00.0")];
    assert_eq!(gpu.model_name.as_deref(), Some("GH100 [H100 SXM5 80GB]"));
    assert_eq!((gpu.numa_node, gpu.class, gpu.ids.to_string().as_str()), (Some(0), 0x030200, "10de:2330"));
    assert_eq!(gpu.bars.iter().map(|bar| (bar.index, bar.size)).collect::<Vec<_>>(), [(0, 16 << 20), (2, 128 << 30), (4, 32 << 20)]);
    assert_eq!(gpu.vfio_driver, "vfio-pci");
    assert!(gpu.identity.slot.starts_with("pci0000:") && gpu.identity.serial.is_some(), "{}", gpu.identity);
}

#[test]
fn a_bundle_is_a_gpu_behind_its_companions() {
    let inventory = observe("workstation");
    let gpu = inventory.devices.values().find(|device| device.boot_vga).unwrap();
    let bundle = inventory.bundle(gpu.address).unwrap();
    assert_eq!(bundle.main(), Some(gpu.address));
    assert!(bundle.devices.len() >= 2, "{bundle:?}");
    for companion in &bundle.devices[..bundle.devices.len() - 1] {
        assert_eq!(inventory.devices[companion].kind, Kind::Companion);
        assert_eq!(inventory.bundle(*companion).unwrap(), bundle);
    }
    assert!(!gpu.bar_claimants.is_empty(), "the console claims a part of its BARs");
}

/// P28.
#[test]
fn a_crowded_group_is_explained_by_the_port_above_it() {
    let inventory = observe("crowded-group");
    let gpu = &inventory.devices[&address("0000:01:00.0")];
    let bundle = inventory.bundle(gpu.address).unwrap();
    assert!(!bundle.foreign.is_empty());
    let group = &inventory.groups[&gpu.group.unwrap()];
    assert!(matches!(inventory.not_viable(group.id), Some(NotViable::Bound { .. })));
    assert!(group.acs.iter().any(|port| port.port == address("0000:00:01.0") && !port.isolates()), "{:?}", group.acs);
    let better = inventory.ports.iter().find(|port| port.port == address("0000:00:1d.0")).unwrap();
    assert!(better.isolates() && better.capability == AcsCapability::Present);
}

#[test]
fn without_groups_the_iommu_is_off() {
    assert_eq!(observe("no-iommu").iommu, Iommu::Off);
    assert_eq!(observe("dgx-h100").iommu, Iommu::On);
}

/// P3: a holder is named with its unit.
#[test]
fn the_holder_of_a_gpu_is_named_with_its_unit() {
    let sim = SimHost::build("dgx-h100").unwrap();
    let inventory = Inventory::observe(&sim.host(), 1);
    let holders = Holders::of(&sim.host(), inventory.devices.values());
    let holder = holders.found.iter().find(|holder| holder.device == address("0000:52:00.0")).unwrap();
    assert_eq!((holder.pid, holder.command.as_str(), holder.how), (812, "nvidia-persistenced", Hold::Open));
    assert_eq!(holder.unit.as_deref(), Some("nvidia-persistenced.service"));
    assert_eq!(Holders::by_pid(&sim.host(), inventory.devices.values(), 812).found.len(), 1);
}
