//! A store that never returns costs one child and one bundle: the daemon answers, others move, a restart stores nothing into it,
//! and its late end is told.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use manager::engine::Options;
use manager::failure::ErrorKind;
use manager::request::{Goal, Request};
use manager::view::{DeviceState, EventKind, JobState, View};
use tests::engine::{Daemon, Managed, assign, release};
use tests::simhost::Errno;
use vfio::{Deadlines, PciAddress};

const POOL: &str = "[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'\n";

struct Case {
    host: &'static str,
    device: PciAddress,
    other: PciAddress,
}

fn dgx() -> Case {
    Case { host: "dgx-h100", device: "0000:1b:00.0".parse().unwrap(), other: "0000:43:00.0".parse().unwrap() }
}

/// An engine that gives up on a store after a moment.
fn impatient(managed: &Managed) -> Daemon {
    let moment = Duration::from_millis(200);
    let deadlines = Deadlines { bind: moment, unbind: moment, reset: moment, other: moment, read_back: moment, ..Deadlines::default() };
    let daemon = Daemon::start(Options { deadlines, ..managed.options() }).unwrap();
    daemon.ready();
    daemon
}

fn returned(daemon: &Daemon) -> Vec<String> {
    let events = daemon.events().into_iter().filter(|event| event.kind == EventKind::Stuck);
    events.filter_map(|event| event.detail.get("returned").cloned()).collect()
}

impl Case {
    fn hang(&self, managed: &Managed, goal: &Goal, nth: usize) {
        let daemon = impatient(managed);
        managed.sim.kernel.hang_at(nth);
        let job = daemon.apply(std::slice::from_ref(goal)).unwrap();
        let what = format!("{} {goal:?}, store {nth}", self.host);
        assert!(matches!(job.state, JobState::Failed | JobState::RollbackFailed), "{what}: {:?}", job.state);
        assert_eq!(job.error.map(|error| error.kind), Some(ErrorKind::Stuck), "{what}");
        self.assert_alive(&daemon, &what);
        let of_device = || {
            let names = |(path, value): &(PathBuf, String)| {
                path.to_string_lossy().contains(&self.device.to_string()) || *value == self.device.to_string()
            };
            managed.sim.kernel.stored().into_iter().filter(names).collect::<Vec<_>>()
        };
        let stored = of_device();
        let clear = daemon.submit(Request::ClearQuarantine(self.device)).unwrap_err();
        assert_eq!(clear.kind, ErrorKind::Stuck, "{what}: {clear}");
        daemon.stop();
        // P8, P42: the next start finds it stuck still, and leaves it alone.
        let daemon = impatient(managed);
        self.assert_alive(&daemon, &what);
        assert_eq!(of_device(), stored, "{what}: a bundle with a live store never gets another");
        assert_eq!(returned(&daemon), [] as [String; 0]);
        managed.sim.kernel.let_go();
        managed.sim.kernel.calm();
        let is_back = |view: &View| view.devices[&self.device].state == DeviceState::Quarantined;
        let reason = daemon.until(is_back).devices[&self.device].reason.clone();
        assert!(reason.contains("has returned late"), "{what}: {reason}");
        assert_eq!(returned(&daemon).len(), 1, "{what}");
        self.mend(&daemon, &what);
        daemon.stop();
    }

    fn assert_alive(&self, daemon: &Daemon, what: &str) {
        assert_eq!(daemon.view().devices[&self.device].state, DeviceState::Stuck, "{what}");
        let started = Instant::now();
        let refused = daemon.apply(&[release(self.device)]).unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Quarantined, "{what}");
        let rescan = daemon.submit(Request::Rescan).unwrap();
        daemon.finish(rescan);
        for goal in [assign(self.other), release(self.other)] {
            assert_eq!(daemon.apply(&[goal]).unwrap().state, JobState::Done, "{what}: others move");
        }
        assert!(started.elapsed() < Duration::from_secs(10), "{what}: the daemon waits for the driver");
    }

    fn mend(&self, daemon: &Daemon, what: &str) {
        let clear = daemon.submit(Request::ClearQuarantine(self.device)).unwrap();
        assert_eq!(daemon.finish(clear).state, JobState::Done, "{what}");
        for goal in [assign(self.device), release(self.device)] {
            assert_eq!(daemon.apply(&[goal]).unwrap().state, JobState::Done, "{what}: sound again");
        }
    }

    /// How many stores a goal takes.
    fn stores(&self, goals: &[Goal]) -> usize {
        let managed = Managed::new(self.host, POOL).unwrap();
        let daemon = impatient(&managed);
        for goal in goals {
            managed.sim.kernel.calm();
            daemon.apply(std::slice::from_ref(goal)).unwrap();
        }
        managed.sim.kernel.stored().len()
    }
}

#[test]
fn p1_p2_p18_each_store_of_an_assign_may_hang_for_ever() {
    let case = dgx();
    for nth in 1..=case.stores(&[assign(case.device)]) {
        let managed = Managed::new(case.host, POOL).unwrap();
        case.hang(&managed, &assign(case.device), nth);
    }
}

#[test]
fn p1_p17_each_store_of_a_release_may_hang_for_ever() {
    let case = dgx();
    for nth in 1..=case.stores(&[assign(case.device), release(case.device)]) {
        let managed = Managed::new(case.host, POOL).unwrap();
        let daemon = impatient(&managed);
        assert_eq!(daemon.apply(&[assign(case.device)]).unwrap().state, JobState::Done);
        daemon.stop();
        managed.sim.kernel.calm();
        case.hang(&managed, &release(case.device), nth);
    }
}

#[test]
fn one_stuck_bundle_of_two_is_quarantined_and_the_other_undone() {
    let case = dgx();
    let managed = Managed::new(case.host, POOL).unwrap();
    let daemon = impatient(&managed);
    let unbind = |device: PciAddress| format!("{device}/driver/unbind");
    managed.sim.kernel.hang_on(&unbind(case.device));
    let job = daemon.apply(&[assign(case.device), assign(case.other)]).unwrap();
    assert_eq!(job.state, JobState::RollbackFailed);
    let view = daemon.view();
    assert_eq!((view.devices[&case.device].state, view.devices[&case.other].state), (DeviceState::Stuck, DeviceState::Host));
    managed.sim.kernel.let_go();
}

#[test]
fn somebody_elses_stuck_driver_is_noticed_and_not_waited_for() {
    let case = dgx();
    let managed = Managed::new(case.host, POOL).unwrap();
    let daemon = impatient(&managed);
    managed.sim.kernel.hang_at(1);
    let by_hand = managed.sim.host().store("sys/bus/pci/drivers/nvidia/unbind", "0000:1b:00.0", Instant::now());
    assert!(by_hand.is_err());
    let rescan = daemon.submit(Request::Rescan).unwrap();
    daemon.finish(rescan);
    let device = &daemon.view().devices[&case.device];
    assert_eq!(device.state, DeviceState::Host);
    assert!(device.reason.starts_with("a driver has had its lock"), "{}", device.reason);
    let refused = daemon.apply(&[assign(case.device)]).unwrap_err();
    assert_eq!(refused.message, "0000:1b:00.0 does not answer: nvidia has had its lock for longer than a moment");
    assert_eq!(daemon.apply(&[assign(case.other)]).unwrap().state, JobState::Done);
    managed.sim.kernel.let_go();
    daemon.until(|view| view.devices[&case.device].reason.is_empty());
    assert!(returned(&daemon)[0].ends_with("has returned late: it succeeded; it is bound to no driver now"), "{:?}", returned(&daemon));
    assert_eq!(daemon.apply(&[assign(case.device)]).unwrap().state, JobState::Done);
}

#[test]
fn a_late_store_that_the_kernel_refused_is_told_with_its_errno() {
    let case = dgx();
    let managed = Managed::new(case.host, POOL).unwrap();
    let daemon = impatient(&managed);
    managed.sim.kernel.hang_at(1);
    let by_hand = managed.sim.host().store("sys/bus/pci/drivers/vfio-pci/unbind", "0000:1b:00.0", Instant::now());
    assert!(by_hand.is_err_and(|error| error.errno().is_none()));
    managed.sim.kernel.let_go();
    let until = Instant::now() + Duration::from_secs(20);
    while returned(&daemon).is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    let no_device = std::io::Error::from(Errno::NODEV).to_string();
    assert!(returned(&daemon)[0].contains(&format!("the kernel refused it: {no_device}")), "{:?}", returned(&daemon));
}
