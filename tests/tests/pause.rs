//! Units that hold a GPU: paused where the configuration names them, started again on every path; and NVIDIA's unbindLock.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::time::{Duration, Instant};

use manager::failure::ErrorKind;
use manager::view::JobState;
use tests::engine::{Daemon, Managed, assign, release};
use tests::simhost::{Death, Errno};
use vfio::{Kernel, PciAddress};

const POOL: &str =
    "[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'\n[policy]\npause-units = ['nvidia-persistenced.service', 'dcgm.service']\n";

fn gpu() -> PciAddress {
    "0000:1b:00.0".parse().unwrap()
}

/// A host whose GPU is held by units that may be paused.
fn held(units: &[&str]) -> (Managed, Daemon) {
    let managed = Managed::new("dgx-h100", POOL).unwrap();
    for (pid, unit) in (4000..).zip(units) {
        managed.sim.hold(pid, unit, &node(&managed)).unwrap();
    }
    let daemon = managed.start().unwrap();
    daemon.ready();
    (managed, daemon)
}

fn node(managed: &Managed) -> String {
    let information = managed.sim.root().join("proc/driver/nvidia/gpus/0000:1b:00.0/information");
    let text = fs::read_to_string(information).unwrap();
    let minor = text.lines().find_map(|line| line.strip_prefix("Device Minor:")).unwrap().trim().to_owned();
    format!("/dev/nvidia{minor}")
}

fn is_active(managed: &Managed, unit: &str) -> bool {
    managed.sim.kernel.unit_is_active(&format!("{unit}.service"), Instant::now() + Duration::from_secs(1)).unwrap()
}

fn unit_stores(managed: &Managed) -> Vec<(String, String)> {
    let stored = managed.sim.kernel.stored().into_iter().filter(|(path, _)| path.starts_with("unit"));
    stored.map(|(path, verb)| (path.file_name().unwrap().to_string_lossy().into_owned(), verb)).collect()
}

fn unbind_lock(managed: &Managed) -> Option<String> {
    fs::read_to_string(managed.sim.root().join("proc/driver/nvidia/gpus/0000:1b:00.0/unbindLock")).ok()
}

#[test]
fn p3_p5_a_unit_that_may_be_paused_is_and_is_started_again() {
    let (managed, daemon) = held(&["nvidia-persistenced", "dcgm"]);
    let steps: Vec<_> = daemon.plan(&[assign(gpu())]).unwrap().steps.into_iter().map(|step| (step.knob, step.from, step.to)).collect();
    let step = |knob: &str, from: &str, to: &str| (knob.to_owned(), from.to_owned(), to.to_owned());
    assert_eq!(steps[0], step("dcgm.service", "active", "paused"));
    assert_eq!(*steps.last().unwrap(), step("nvidia-persistenced.service", "paused", "active"));
    let job = daemon.apply(&[assign(gpu())]).unwrap();
    assert_eq!(job.state, JobState::Done, "{:?}", job.error);
    let units = ["dcgm.service", "nvidia-persistenced.service"];
    let stop_and_start = units.map(|unit| (unit.to_owned(), "stop".to_owned())).into_iter();
    let stop_and_start: Vec<_> = stop_and_start.chain(units.map(|unit| (unit.to_owned(), "start".to_owned()))).collect();
    assert_eq!(unit_stores(&managed), stop_and_start);
    assert!(is_active(&managed, "nvidia-persistenced") && is_active(&managed, "dcgm"));
}

#[test]
fn p3_whoever_may_not_be_paused_is_named_and_nobody_is() {
    let (managed, daemon) = held(&["nvidia-persistenced", "nvtop"]);
    let refused = daemon.apply(&[assign(gpu())]).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Held);
    for told in ["nvtop[4001]", "unit nvidia-persistenced.service (policy.pause-units lets it be paused)"] {
        assert!(refused.to_string().contains(told), "{refused}");
    }
    assert_eq!(managed.sim.kernel.stored(), []);
}

#[test]
fn p6_each_store_may_fail_and_no_unit_stays_paused() {
    let (managed, daemon) = held(&["nvidia-persistenced"]);
    let before = managed.sim.snapshot();
    daemon.apply(&[assign(gpu())]).unwrap();
    let stores = managed.sim.kernel.stored().len();
    daemon.apply(&[release(gpu())]).unwrap();
    for nth in 1..=stores {
        let (managed, daemon) = held(&["nvidia-persistenced"]);
        managed.sim.kernel.fail_at(nth, Errno::IO);
        let job = daemon.apply(&[assign(gpu())]).unwrap();
        let what = format!("store {nth} of {stores}: {:?}", job.error);
        let failed_to_start = nth == stores;
        assert_eq!(is_active(&managed, "nvidia-persistenced"), !failed_to_start, "{what}");
        if job.state == JobState::Failed {
            let after = managed.sim.snapshot();
            let moved = before.iter().filter(|(path, text)| !path.ends_with("boot_id") && after.get(*path) != Some(text));
            assert_eq!(moved.collect::<Vec<_>>(), [], "{what}");
            assert_eq!(unbind_lock(&managed).as_deref(), Some("0\n"), "{what}");
        }
        assert!(matches!(job.state, JobState::Failed | JobState::Done), "{what}");
    }
}

#[test]
fn p6_the_daemon_may_die_at_each_store_and_the_next_start_resumes_the_unit() {
    let (managed, daemon) = held(&["nvidia-persistenced"]);
    daemon.apply(&[assign(gpu())]).unwrap();
    let stores = managed.sim.kernel.stored().len();
    for nth in 1..=stores {
        for death in [Death::Before, Death::After] {
            let (managed, daemon) = held(&["nvidia-persistenced"]);
            managed.sim.kernel.die_at(nth, death);
            daemon.apply(&[assign(gpu())]).unwrap();
            daemon.stop();
            let managed = managed.restart();
            let daemon = managed.start().unwrap();
            daemon.ready();
            assert!(is_active(&managed, "nvidia-persistenced"), "died {death:?} store {nth} of {stores}");
            assert_ne!(unbind_lock(&managed).as_deref(), Some("1\n"), "died {death:?} store {nth} of {stores}");
            assert_eq!(fs::read_dir(managed.files().join("run/journal")).unwrap().count(), 0);
        }
    }
}

#[test]
fn p2_a_gpu_whose_driver_says_that_it_is_in_use_is_not_unbound() {
    let (managed, daemon) = held(&[]);
    // A kernel user holds it: no process is seen, and the lock is not to be had.
    managed.sim.kernel.fail_on("unbindLock", Errno::BUSY);
    let job = daemon.apply(&[assign(gpu())]).unwrap();
    assert_eq!(job.state, JobState::Failed);
    let error = job.error.unwrap();
    assert_eq!(error.kind, ErrorKind::Held, "{error}");
    assert!(!managed.sim.kernel.stored_names().iter().any(|name| name == "unbind"));
}
