//! The described hosts are as their descriptions say.
#![allow(clippy::expect_used)]

use std::collections::BTreeSet;

use tests::simhost::{self, SimHost};

fn build(name: &str) -> SimHost {
    SimHost::build(name).expect("the host is described")
}

fn members(sim: &SimHost, group: u32) -> Vec<String> {
    sim.host().entries(format!("sys/kernel/iommu_groups/{group}/devices")).expect("readable").unwrap_or_default()
}

#[test]
fn every_described_host_can_be_built() {
    for name in simhost::names() {
        let sim = build(name);
        let devices = sim.host().entries("sys/bus/pci/devices").expect("readable").expect("present");
        for device in devices {
            let dir = format!("sys/bus/pci/devices/{device}");
            assert!(sim.host().exists(format!("{dir}/config")), "{name}: {device}");
            let driver = sim.host().link_name(format!("{dir}/driver")).expect("readable");
            let back = |driver| sim.host().exists(format!("sys/bus/pci/drivers/{driver}/{device}"));
            assert!(driver.is_none_or(back), "{name}: {device}");
        }
    }
}

#[test]
fn the_dgx_has_its_gpus_where_nvidia_puts_them() {
    let sim = build("dgx-h100");
    let host = sim.host();
    let gpus = host.entries("proc/driver/nvidia/gpus").expect("readable").expect("present");
    let buses = ["1b", "43", "52", "61", "9d", "c3", "d1", "df"];
    assert_eq!(gpus, buses.map(|bus| format!("0000:{bus}:00.0")));
    let vendors = host.entries("sys/bus/pci/devices").expect("readable").expect("present").into_iter();
    let nvidia =
        vendors.filter(|device| host.read(format!("sys/bus/pci/devices/{device}/vendor")).expect("readable").as_deref() == Some("0x10de"));
    assert_eq!(nvidia.count(), 12, "8 GPUs and 4 NVSwitches");
}

#[test]
fn a_port_without_acs_is_in_the_group_of_what_is_below_it() {
    let sim = build("crowded-group");
    assert_eq!(members(&sim, 1), ["0000:00:01.0", "0000:01:00.0", "0000:01:00.1"]);
    assert_eq!(members(&sim, 13), ["0000:02:00.0"]);
}

#[test]
fn virtual_functions_are_linked_both_ways_and_alone_in_their_groups() {
    let sim = build("workstation");
    let host = sim.host();
    let physical = "sys/bus/pci/devices/0000:05:00.0";
    for (number, address) in ["0000:05:10.0", "0000:05:10.2"].into_iter().enumerate() {
        assert_eq!(host.link_name(format!("{physical}/virtfn{number}")).expect("readable").as_deref(), Some(address));
        let own = format!("sys/bus/pci/devices/{address}");
        assert_eq!(host.link_name(format!("{own}/physfn")).expect("readable").as_deref(), Some("0000:05:00.0"));
        let group = host.link_name(format!("{own}/iommu_group")).expect("readable").expect("in a group");
        assert_eq!(members(&sim, group.parse().expect("a number")), [address]);
        let ids = host.read_bytes(format!("{own}/config"), 4).expect("readable").expect("present");
        assert_eq!(ids, [0xff; 4], "the ids of a virtual function read all ones");
    }
}

#[test]
fn a_host_without_an_iommu_has_no_groups() {
    let sim = build("no-iommu");
    assert_eq!(sim.host().entries("sys/kernel/iommu_groups").expect("readable"), Some(Vec::new()));
}

#[test]
fn the_captured_a2_has_its_mediated_devices_and_their_types() {
    let sim = build("a2-mdev");
    let host = sim.host();
    let vf = "sys/bus/pci/devices/0000:08:00.4";
    assert_eq!(host.link_name(format!("{vf}/driver")).expect("readable").as_deref(), Some("nvidia"));
    assert_eq!(host.link_name(format!("{vf}/physfn")).expect("readable").as_deref(), Some("0000:08:00.0"));
    let mdevs = host.entries("sys/bus/mdev/devices").expect("readable").expect("present");
    assert_eq!(mdevs.len(), 3);
    let name = host.read(format!("{vf}/mdev_supported_types/nvidia-754/name")).expect("readable");
    assert_eq!(name.as_deref(), Some("NVIDIA A2-4C"));
}

#[test]
fn a_virtual_function_of_the_l40s_offers_vgpus_by_its_vendors_driver() {
    let sim = build("l40s-vgpu");
    let vf = "sys/bus/pci/devices/0000:26:00.4";
    assert_eq!(sim.host().link_name(format!("{vf}/driver")).expect("readable").as_deref(), Some("nvidia"));
    assert!(sim.host().exists(format!("{vf}/nvidia/current_vgpu_type")) && sim.host().exists(format!("{vf}/vfio-dev/vfio0")));
}

#[test]
fn a_function_that_is_pulled_out_leaves_nothing_behind() {
    let sim = build("dgx-h100");
    sim.unplug("0000:1b:00.0").expect("pulled");
    let left: Vec<_> = sim.snapshot().into_keys().filter(|path| path.to_string_lossy().contains("0000:1b:00.0")).collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!sim.host().exists("sys/kernel/iommu_groups/31") && !sim.host().exists("dev/nvidia0"));
}

#[test]
fn a_generated_host_has_as_many_functions_as_asked_for() {
    let sim = SimHost::lay(&simhost::generate(600).expect("made")).expect("laid");
    let devices = sim.host().entries("sys/bus/pci/devices").expect("readable").expect("present");
    let unique: BTreeSet<_> = devices.iter().collect();
    assert_eq!(unique.len(), 600 + 3, "with a port for every 256");
}
