//! Planning, and carrying out: on the simulated host, whose kernel answers at once, so that what is measured is gpuward itself.
//!
//! `cargo bench -p gpuward-tests --bench plan`. `assign_and_release` makes 2 × 2 jobs durable: it waits for the disk's fsync.

#![allow(clippy::unwrap_used)]

use divan::Bencher;
use tests::engine::{Managed, assign, release};
use vfio::PciAddress;

const POOL: &str = "[[devices]]\nmatch = { vendor = '10de' }\nuse = 'pool'\n";

fn main() {
    divan::main();
}

fn gpus() -> [PciAddress; 2] {
    ["0000:1b:00.0", "0000:43:00.0"].map(|address| address.parse().unwrap())
}

#[divan::bench(sample_count = 50)]
fn plan_two_gpus_of_dgx_h100(bencher: Bencher<'_, '_>) {
    let managed = Managed::new("dgx-h100", POOL).unwrap();
    let daemon = managed.start().unwrap();
    daemon.ready();
    bencher.bench_local(|| daemon.plan(&gpus().map(assign)).unwrap());
}

#[divan::bench(sample_count = 10)]
fn assign_and_release_two_gpus_of_dgx_h100(bencher: Bencher<'_, '_>) {
    let managed = Managed::new("dgx-h100", POOL).unwrap();
    let daemon = managed.start().unwrap();
    daemon.ready();
    bencher.bench_local(|| {
        daemon.apply(&gpus().map(assign)).unwrap();
        daemon.apply(&gpus().map(release)).unwrap();
    });
}
