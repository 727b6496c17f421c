//! Looking at a host: time a scan, beside a bare open, read and close of the same attributes.
//!
//! `cargo bench -p gpuward-tests --bench scan`. Goals: linear in the number of functions; at most twice the bare reads.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use divan::Bencher;
use divan::counter::ItemsCount;
use tests::simhost::{SimHost, describe, generate};
use vfio::{Holders, Inventory};

/// What a scan reads of a device. Kept beside the scan's own list by eye: a baseline, not a check.
const ATTRIBUTES: [&str; 24] = [
    "vendor",
    "class",
    "device",
    "subsystem_vendor",
    "subsystem_device",
    "power_state",
    "power/control",
    "d3cold_allowed",
    "config",
    "revision",
    "resource",
    "max_link_speed",
    "current_link_speed",
    "current_link_width",
    "max_link_width",
    "numa_node",
    "driver_override",
    "reset_method",
    "sriov_totalvfs",
    "sriov_numvfs",
    "sriov_drivers_autoprobe",
    "boot_vga",
    "modalias",
    "reserved_regions",
];
const LINKS: [&str; 5] = ["", "driver", "iommu_group", "physfn", "physfn"];

fn main() {
    divan::main();
}

fn host(functions: usize) -> SimHost {
    let description = if functions == 0 { describe("dgx-h100").unwrap() } else { generate(functions).unwrap() };
    SimHost::lay(&description).unwrap()
}

fn bare(root: &Path) -> usize {
    let mut buffer = vec![0; 4096];
    let mut bytes = 0;
    for entry in fs::read_dir(root.join("sys/bus/pci/devices")).unwrap() {
        let dir = entry.unwrap().path();
        for attribute in ATTRIBUTES {
            bytes += File::open(dir.join(attribute)).and_then(|mut file| file.read(&mut buffer)).unwrap_or(0);
        }
        bytes += LINKS.iter().filter_map(|link| fs::read_link(dir.join(link)).ok()).count();
    }
    bytes
}

fn count(sim: &SimHost) -> ItemsCount {
    ItemsCount::new(fs::read_dir(sim.root().join("sys/bus/pci/devices")).unwrap().count())
}

/// 0 is `dgx-h100`; the others are generated hosts of so many functions. Items are PCI functions.
const SIZES: [usize; 4] = [0, 256, 1024, 4096];

#[divan::bench(args = SIZES, sample_count = 20)]
fn observe(bencher: Bencher<'_, '_>, functions: usize) {
    let sim = host(functions);
    let host = sim.host();
    bencher.counter(count(&sim)).bench(|| Inventory::observe(&host, 1));
}

#[divan::bench(args = SIZES, sample_count = 20)]
fn bare_reads_of_the_same_attributes(bencher: Bencher<'_, '_>, functions: usize) {
    let sim = host(functions);
    bencher.counter(count(&sim)).bench(|| bare(sim.root()));
}

#[divan::bench(sample_count = 20)]
fn holders_on_dgx_h100(bencher: Bencher<'_, '_>) {
    let sim = host(0);
    let (host, inventory) = (sim.host(), Inventory::observe(&sim.host(), 1));
    bencher.bench(|| Holders::of(&host, inventory.devices.values()));
}
