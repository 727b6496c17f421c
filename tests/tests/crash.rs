//! Every store of an assign and of a release fails once, and the daemon dies before and after each: the host is as before, as
//! wished, or mended by the next start; never between.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::wildcard_enum_match_arm, clippy::print_stdout)]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use manager::ledger::Standing;
use manager::request::{Goal, Request};
use manager::view::{DeviceState, JobState};
use tests::engine::{Daemon, Managed, assign, release};
use tests::simhost::{Death, Errno};
use vfio::PciAddress;

const POOL: &str = "[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'\n";

/// What the kernel answers where a driver or an administrator is in the way, or the hardware is.
const ERRNOS: [Errno; 5] = [Errno::NODEV, Errno::BUSY, Errno::INVAL, Errno::IO, Errno::NOMEM];

type Tree = BTreeMap<PathBuf, String>;

struct Case {
    managed: Managed,
    device: PciAddress,
    on_host: Tree,
    in_pool: Tree,
    stores: [usize; 2],
}

/// The host with one GPU of it taken once and given back, so that both sides are known.
fn case(host: &str, device: &str) -> Case {
    let managed = Managed::new(host, POOL).unwrap();
    let device: PciAddress = device.parse().unwrap();
    let daemon = managed.start().unwrap();
    // Their drivers let them sleep, which is lost as vfio-pci leaves them.
    for function in &daemon.ready().devices[&device].bundle {
        managed.sim.set(format!("sys/bus/pci/devices/{function}/power/control"), "auto").unwrap();
    }
    let on_host = managed.sim.snapshot();
    let mut stores = [0; 2];
    let mut in_pool = Tree::new();
    for (index, goal) in [assign(device), release(device)].into_iter().enumerate() {
        managed.sim.kernel.calm();
        let job = daemon.apply(&[goal]).unwrap();
        assert_eq!(job.state, JobState::Done, "{:?}", job.error);
        stores[index] = managed.sim.kernel.stored().len();
        if index == 0 {
            in_pool = managed.sim.snapshot();
        }
    }
    assert_same(&managed.sim.snapshot(), &on_host, "assign and release leave the host as before");
    daemon.stop();
    Case { managed, device, on_host, in_pool, stores }
}

fn assert_same(found: &Tree, wanted: &Tree, what: &str) {
    let differs = |(path, value): (&PathBuf, &String)| {
        (found.get(path) != Some(value)).then(|| format!("{}: {:?} for {value:?}", path.display(), found.get(path)))
    };
    let mut lines: Vec<_> = wanted.iter().filter_map(differs).collect();
    lines.extend(found.keys().filter(|path| !wanted.contains_key(*path)).map(|path| format!("{} is new", path.display())));
    assert!(lines.is_empty(), "{what}:\n{}", lines.join("\n"));
}

impl Case {
    fn goal(&self, index: usize) -> Goal {
        [assign(self.device), release(self.device)][index].clone()
    }

    /// Where the device is before the goal with this index, and after it.
    fn sides(&self, index: usize) -> [&Tree; 2] {
        if index == 0 { [&self.on_host, &self.in_pool] } else { [&self.in_pool, &self.on_host] }
    }

    fn bring_to(&self, daemon: &Daemon, tree: &Tree) {
        let goal = if *tree == self.on_host { release(self.device) } else { assign(self.device) };
        self.managed.sim.kernel.calm();
        let job = daemon.apply(&[goal]).unwrap();
        assert_eq!(job.state, JobState::Done, "{:?}", job.error);
        assert_same(&self.managed.sim.snapshot(), tree, "brought back for the next try");
    }

    /// A device that could not be reset before its driver comes is in quarantine, in the pool, until it is cleared (P16).
    fn clear_if_kept_out(&self, daemon: &Daemon, what: &str) -> bool {
        let kept_out = daemon.view().devices[&self.device].state == DeviceState::Quarantined;
        if kept_out {
            let job = daemon.finish(daemon.submit(Request::ClearQuarantine(self.device)).unwrap());
            assert_eq!(job.state, JobState::Done, "{what}: {:?}", job.error);
            self.managed.sim.kernel.calm();
        }
        kept_out
    }

    /// The ledger, the view and the host agree.
    fn assert_agrees(&self, daemon: &Daemon, what: &str) -> bool {
        let view = daemon.view();
        let ledger = self.managed.ledger().unwrap();
        let in_pool = match view.devices[&self.device].state {
            DeviceState::Free => true,
            DeviceState::Host => false,
            state => panic!("{what}: {state:?}, {}", view.devices[&self.device].reason),
        };
        let tree = if in_pool { &self.in_pool } else { &self.on_host };
        assert_same(&self.managed.sim.snapshot(), tree, what);
        assert!(ledger.devices.values().all(|record| record.standing == Standing::Active), "{what}: {:?}", ledger.devices);
        assert_eq!(ledger.devices.contains_key(&self.device), in_pool, "{what}");
        assert!(ledger.quarantines.is_empty() && ledger.claims.is_empty(), "{what}");
        assert_eq!(fs::read_dir(self.managed.files().join("run/journal")).map_or(0, Iterator::count), 0, "{what}: a journal is left");
        let goal = if in_pool { assign(self.device) } else { release(self.device) };
        assert_eq!(daemon.plan(&[goal]).unwrap().steps, [], "{what}: a second plan is empty");
        in_pool
    }
}

/// P6: a step that fails half-way leaves nothing half-way.
fn every_store_fails(case: &Case, index: usize, what: &str) {
    let daemon = case.managed.start().unwrap();
    daemon.ready();
    let [before, after] = case.sides(index);
    case.bring_to(&daemon, before);
    let (mut undone, mut done, mut kept_out) = (0, 0, 0);
    for nth in 1..=case.stores[index] {
        for errno in ERRNOS {
            let kernel = &case.managed.sim.kernel;
            kernel.calm();
            kernel.fail_at(nth, errno);
            let job = daemon.apply(&[case.goal(index)]).unwrap();
            let try_ = format!("{what}: store {nth} answers {errno:?}");
            kernel.calm();
            kept_out += usize::from(case.clear_if_kept_out(&daemon, &try_));
            case.assert_agrees(&daemon, &try_);
            match job.state {
                JobState::Failed => {
                    assert_same(&case.managed.sim.snapshot(), before, &try_);
                    undone += 1;
                }
                JobState::Done => {
                    assert_same(&case.managed.sim.snapshot(), after, &try_);
                    case.bring_to(&daemon, before);
                    done += 1;
                }
                state => panic!("{try_}: {state:?}"),
            }
        }
    }
    let (stores, errnos) = (case.stores[index], ERRNOS.len());
    println!(
        "{what}: {stores} stores, each failed with {errnos} errnos: {undone} undone ({kept_out} kept out until cleared), {done} done another way"
    );
    daemon.stop();
}

fn dies_at_every_store(mut case: Case, index: usize, what: &str) -> Case {
    let (mut as_before, mut as_wished) = (0, 0);
    for nth in 1..=case.stores[index] {
        for death in [Death::Before, Death::After] {
            let daemon = case.managed.start().unwrap();
            daemon.ready();
            let before = case.sides(index)[0].clone();
            case.bring_to(&daemon, &before);
            case.managed.sim.kernel.calm();
            case.managed.sim.kernel.die_at(nth, death);
            let job = daemon.apply(&[case.goal(index)]).unwrap();
            assert_eq!(job.state, JobState::RollbackFailed, "it died");
            daemon.stop();
            case.managed = case.managed.restart();
            let daemon = case.managed.start().unwrap();
            daemon.ready();
            let in_pool = case.assert_agrees(&daemon, &format!("{what}: died {death:?} store {nth}"));
            if in_pool == (index == 0) {
                as_wished += 1
            } else {
                as_before += 1
            }
            daemon.stop();
        }
    }
    let stores = case.stores[index];
    println!(
        "{what}: {stores} stores, died before and after each: {} recoveries, {as_before} as before, {as_wished} as wished",
        as_before + as_wished
    );
    case
}

fn all(host: &str, device: &str) {
    let mut case = case(host, device);
    for (index, word) in ["assign", "release"].into_iter().enumerate() {
        let what = format!("{host} {device} {word}");
        every_store_fails(&case, index, &what);
        case = dies_at_every_store(case, index, &what);
    }
}

#[test]
fn p6_p13_a_gpu_of_the_dgx_is_never_between() {
    all("dgx-h100", "0000:1b:00.0");
}

#[test]
fn p6_p7_p22_a_card_with_companions_is_never_between() {
    all("workstation", "0000:02:00.0");
}
