//! Hand-overs side by side: one bundle and eight, on a kernel that takes its time over each store. `make bench` prints the ratio.
//!
//! Goal: eight take about the time of one.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::time::{Duration, Instant};

use manager::request::Goal;
use manager::view::JobState;
use tests::engine::{Daemon, Managed, assign, release};
use vfio::{Kind, PciAddress};

const POOL: &str = "[[devices]]\nmatch = { vendor = '10de' }\nuse = 'pool'\n";

/// What a store takes: a driver's probe takes longer, a field is set at once.
const STORE: Duration = Duration::from_millis(20);

const ROUNDS: usize = 7;

fn main() {
    let managed = Managed::new("dgx-h100", POOL).unwrap();
    // It holds one of the GPUs.
    managed.sim.end_process(812).unwrap();
    managed.sim.kernel.slow(STORE);
    let daemon = managed.start().unwrap();
    let view = daemon.ready();
    let gpus = view.inventory.devices.values().filter(|function| function.kind == Kind::Gpu);
    let gpus: Vec<PciAddress> = gpus.map(|gpu| gpu.address).collect();
    // In turn, so that what else the machine does hits both alike.
    let (mut one, mut eight) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        one.push(there_and_back(&daemon, &gpus[..1]));
        eight.push(there_and_back(&daemon, &gpus[..8]));
    }
    let (one, eight) = (median(one), median(eight));
    println!("hand-over and back, {} ms a store, medians of {ROUNDS}", STORE.as_millis());
    println!("  1 bundle  {:>8.0} ms", ms(one));
    println!("  8 bundles {:>8.0} ms  {:.2} times as long", ms(eight), eight.as_secs_f64() / one.as_secs_f64());
}

fn there_and_back(daemon: &Daemon, gpus: &[PciAddress]) -> Duration {
    let started = Instant::now();
    for goal in [assign as fn(PciAddress) -> Goal, release] {
        let goals: Vec<_> = gpus.iter().copied().map(goal).collect();
        assert_eq!(daemon.apply(&goals).unwrap().state, JobState::Done);
    }
    started.elapsed()
}

fn median(mut samples: Vec<Duration>) -> Duration {
    samples.sort();
    samples[samples.len() / 2]
}

fn ms(sample: Duration) -> f64 {
    sample.as_secs_f64() * 1000.0
}
