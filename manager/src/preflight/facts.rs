//! What is read of the host for a pre-flight, by name.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use vfio::{Function, Host, PciAddress};

use crate::doctor::Readings;

/// What was read. `None` and empty: not there, or not to be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// What the doctor reads too: the kernel, IOMMU units, modules' parameters, libvirt's daemon.
    pub readings: Readings,
    /// `MemAvailable` of `/proc/meminfo`, in bytes.
    pub available: Option<u64>,
    /// NUMA nodes.
    pub nodes: Vec<NumaNode>,
    /// Permissions of `/dev/vfio/vfio`.
    pub container_mode: Option<u32>,
    /// The IOMMU unit of each device: its link `iommu`.
    pub units: BTreeMap<PciAddress, String>,
    /// Devices whose group has its node below `/dev/vfio`.
    pub group_nodes: Vec<PciAddress>,
}

/// A NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number.
    pub id: u32,
    /// Its processors; 0 where it has only memory.
    pub cpus: u32,
    /// Bytes of RAM that are free there, or hold files that can be dropped.
    pub free: Option<u64>,
    /// Free hugepages: the size of one in bytes, and how many.
    pub hugepages: Vec<(u64, u64)>,
}

impl Facts {
    /// Reads them, of a host and of the devices that the machine gets.
    pub fn of(host: &Host, devices: &[Function]) -> Self {
        let unit = |function: &Function| {
            let link = host.link_name(format!("sys/bus/pci/devices/{}/iommu", function.address)).ok().flatten()?;
            Some((function.address, link))
        };
        let has_node = |function: &&Function| function.group.is_some_and(|group| host.exists(format!("dev/vfio/{group}")));
        Self {
            readings: Readings::of(host),
            available: kib(&text(host, "proc/meminfo"), "MemAvailable:"),
            nodes: nodes(host),
            container_mode: fs::metadata(host.path("dev/vfio/vfio")).ok().map(|file| file.permissions().mode() & 0o777),
            units: devices.iter().filter_map(unit).collect(),
            group_nodes: devices.iter().filter(has_node).map(|function| function.address).collect(),
        }
    }
}

fn text(host: &Host, file: &str) -> String {
    host.read(file).ok().flatten().unwrap_or_default()
}

const NODES: &str = "sys/devices/system/node";

fn nodes(host: &Host) -> Vec<NumaNode> {
    let names = host.entries(NODES).ok().flatten().unwrap_or_default();
    let mut nodes: Vec<_> = names.iter().filter_map(|name| Some(node(host, name.strip_prefix("node")?.parse().ok()?))).collect();
    nodes.sort_by_key(|node| node.id);
    nodes
}

fn node(host: &Host, id: u32) -> NumaNode {
    let dir = format!("{NODES}/node{id}");
    let meminfo = text(host, &format!("{dir}/meminfo"));
    let field = |name: &str| kib(&meminfo, &format!("Node {id} {name}:"));
    let droppable = ["Active(file)", "Inactive(file)"].into_iter().filter_map(field).sum::<u64>();
    NumaNode {
        id,
        cpus: count(&text(host, &format!("{dir}/cpulist"))),
        free: field("MemFree").map(|free| free + droppable),
        hugepages: hugepages(host, &format!("{dir}/hugepages")),
    }
}

// `hugepages-1048576kB/free_hugepages`
fn hugepages(host: &Host, dir: &str) -> Vec<(u64, u64)> {
    let names = host.entries(dir).ok().flatten().unwrap_or_default();
    let pool = |name: &String| {
        let size: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let free = text(host, &format!("{dir}/{name}/free_hugepages")).parse().ok()?;
        Some((size << 10, free))
    };
    names.iter().filter_map(pool).filter(|(_, free)| *free > 0).collect()
}

/// The bytes of `name` in a table whose values are in kB.
fn kib(table: &str, name: &str) -> Option<u64> {
    let rest = table.lines().find_map(|line| line.trim_start().strip_prefix(name))?;
    rest.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// How many numbers a list of the kernel's (`0-55,112-167`) has.
fn count(list: &str) -> u32 {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        last.checked_sub(first)?.checked_add(1)
    };
    list.trim().split(',').filter_map(range).fold(0, u32::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_tables_of_the_kernels_are_read_and_nonsense_is_nothing() {
        let cases = [("0-55,112-167", 112), ("0", 1), ("", 0), ("3-1", 0), ("a-b,2", 1), ("0-4294967295", 0)];
        for (list, cpus) in cases {
            assert_eq!(count(list), cpus, "{list}");
        }
        let table = "Node 1 MemTotal:  100 kB\nNode 1 MemFree:   64 kB\n";
        assert_eq!(kib(table, "Node 1 MemFree:"), Some(64 << 10));
        assert_eq!(kib(table, "Node 2 MemFree:"), None);
        assert_eq!(kib("MemAvailable: 18446744073709551615 kB", "MemAvailable:"), None);
    }
}
