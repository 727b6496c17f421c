//! Virtual functions: made with host drivers kept from them, never taken from under anybody, made again after they were lost.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::wildcard_enum_match_arm, clippy::print_stdout)]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use manager::failure::{ErrorKind, Failure};
use manager::request::{Goal, Request};
use manager::view::{DeviceState, JobState, JobView, View};
use tests::engine::{Daemon, Managed, assign, release};
use tests::simhost::{Death, Errno};
use vfio::PciAddress;

/// A network card with virtual functions, which the workstation's administrator lets gpuward use.
const CARD: &str = "0000:05:00.0";
const RULES: &str = "[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'\n[[devices]]\nmatch = { address = '0000:05:00.0' }\nuse = 'pool'\n[[devices]]\nmatch = { kind = 'virtual-function' }\nuse = 'pool'\n";

const ERRNOS: [Errno; 4] = [Errno::NOENT, Errno::BUSY, Errno::NOMEM, Errno::IO];

type Tree = BTreeMap<PathBuf, String>;

fn at(address: &str) -> PciAddress {
    address.parse().unwrap()
}

fn vfs(device: &str, count: u16) -> Goal {
    Goal::Vfs { device: at(device), count }
}

fn start(managed: &Managed) -> Daemon {
    let daemon = managed.start().unwrap();
    daemon.ready();
    daemon
}

/// A card that has no virtual functions yet.
fn workstation() -> (Managed, Daemon) {
    let managed = Managed::new("workstation", RULES).unwrap();
    managed.sim.host().store(format!("sys/bus/pci/devices/{CARD}/sriov_numvfs"), "0", soon()).unwrap();
    managed.sim.kernel.calm();
    let daemon = start(&managed);
    (managed, daemon)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

fn done(daemon: &Daemon, goal: Goal) -> JobView {
    let job = daemon.apply(&[goal]).unwrap();
    assert_eq!(job.state, JobState::Done, "{:?}", job.error);
    job
}

fn refused(daemon: &Daemon, goal: Goal) -> Failure {
    daemon.apply(&[goal]).unwrap_err()
}

fn functions(view: &View, device: &str) -> Vec<PciAddress> {
    view.inventory.devices[&at(device)].sriov.as_ref().unwrap().functions.clone()
}

fn driver_of(view: &View, device: PciAddress) -> Option<String> {
    view.inventory.devices[&device].driver.clone()
}

fn steps(daemon: &Daemon, goal: Goal) -> Vec<String> {
    let report = daemon.plan(&[goal]).unwrap();
    assert_eq!(report.refusals, []);
    report.steps.into_iter().map(|step| format!("{} {} → {}", step.knob, step.from, step.to)).collect()
}

#[test]
fn p56_host_drivers_are_kept_from_virtual_functions() {
    let (managed, daemon) = workstation();
    let before = managed.sim.snapshot();
    let autoprobe = |from, to| format!("sriov_drivers_autoprobe {from} → {to}");
    assert_eq!(steps(&daemon, vfs(CARD, 3)), [autoprobe(1, 0), "sriov_numvfs 0 → 3".into()]);
    let job = done(&daemon, vfs(CARD, 3));
    assert_eq!(job.kind, "set-vf-count");
    let view = daemon.view();
    let made = functions(&view, CARD);
    assert_eq!(made.len(), 3);
    assert!(made.iter().all(|device| driver_of(&view, *device).is_none() && view.devices[device].state == DeviceState::Host));
    assert_eq!(managed.ledger().unwrap().vfs[&at(CARD)].count, 3);
    assert_eq!(steps(&daemon, vfs(CARD, 3)), [] as [String; 0], "planning twice gives nothing");
    assert_eq!(steps(&daemon, vfs(CARD, 5)), ["sriov_numvfs 3 → 5"], "a host driver that is loaded later does not take them either");
    assert_eq!(steps(&daemon, vfs(CARD, 0)), ["sriov_numvfs 3 → 0".into(), autoprobe(0, 1)]);
    done(&daemon, vfs(CARD, 5));
    assert_eq!(functions(&daemon.view(), CARD).len(), 5, "over none: the kernel refuses another number");
    done(&daemon, vfs(CARD, 0));
    assert!(managed.sim.snapshot() == before);
    assert!(managed.ledger().unwrap().vfs.is_empty());
}

#[test]
fn p43_p51_nothing_is_taken_from_under_anybody() {
    let (managed, daemon) = workstation();
    done(&daemon, vfs(CARD, 2));
    let [first, second] = functions(&daemon.view(), CARD)[..] else { panic!() };
    done(&daemon, assign(first));
    let error = refused(&daemon, vfs(CARD, 4));
    assert_eq!(error.message, format!("{first}, a virtual function of {CARD}, is in the pool and would vanish"));
    assert_eq!(error.remedy, format!("gpuward release {first}"));
    done(&daemon, release(first));
    done(&daemon, assign(second));
    let group = daemon.view().inventory.devices[&second].group.unwrap();
    managed.sim.hold(4711, "qemu", &format!("/dev/vfio/{group}")).unwrap();
    let held = refused(&daemon, vfs(CARD, 0));
    assert!(held.to_string().contains("is in the pool") && held.to_string().contains("held by qemu[4711]"), "{held}");
    assert_eq!(refused(&daemon, assign(at(CARD))).kind, ErrorKind::NotSupported, "a network card is never handed out itself");
    assert_eq!(functions(&daemon.view(), CARD), [first, second]);
}

#[test]
fn p43_what_the_host_itself_uses_is_not_taken_away() {
    let managed = Managed::new("workstation", RULES).unwrap();
    let daemon = start(&managed);
    let error = refused(&daemon, vfs(CARD, 0));
    assert!(error.message.starts_with("0000:05:10.0, a virtual function of 0000:05:00.0, is bound to igbvf"), "{error}");
    assert_eq!(functions(&daemon.view(), CARD).len(), 2);
    assert_eq!(managed.sim.kernel.stored(), []);
}

#[test]
fn what_cannot_be_is_said_by_name() {
    let (managed, daemon) = workstation();
    let cases = [
        (vfs("0000:02:00.0", 1), ErrorKind::NotSupported, "0000:02:00.0 can have no virtual functions"),
        (vfs(CARD, 8), ErrorKind::NotSupported, "0000:05:00.0 cannot have 8 virtual functions"),
    ];
    for (goal, kind, message) in cases {
        let error = refused(&daemon, goal);
        assert_eq!((error.kind, error.message.as_str()), (kind, message));
    }
    let twice = daemon.apply(&[vfs(CARD, 1), vfs(CARD, 2)]).unwrap_err();
    assert_eq!(twice.kind, ErrorKind::Conflict);
    managed.configure("[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'\n").unwrap();
    daemon.engine().reload();
    daemon.until(|view| view.devices[&at(CARD)].use_.word() == "observe");
    assert_eq!(refused(&daemon, vfs(CARD, 1)).message, format!("{CARD} may only be observed"));
    assert_eq!(managed.sim.kernel.stored(), []);
}

#[test]
fn p56_nvidias_driver_makes_all_or_none_by_its_own_tool() {
    const GPU: &str = "0000:26:00.0";
    let managed = Managed::new("l40s-vgpu", "[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'\n").unwrap();
    let daemon = start(&managed);
    assert!(refused(&daemon, vfs(GPU, 0)).message.ends_with("are made by NVIDIA's tool only, which is missing"));
    managed.sim.set("usr/lib/nvidia/sriov-manage", "#!/bin/sh").unwrap();
    assert_eq!(refused(&daemon, vfs(GPU, 4)).why, ["NVIDIA's sriov-manage makes all or none"]);
    done(&daemon, vfs(GPU, 0));
    assert_eq!(functions(&daemon.view(), GPU), []);
    done(&daemon, vfs(GPU, 32));
    let view = daemon.view();
    assert_eq!(functions(&view, GPU).len(), 32);
    assert_eq!(driver_of(&view, functions(&view, GPU)[31]).as_deref(), Some("nvidia"), "P40: they stay on their VFIO driver");
    let stored = managed.sim.kernel.stored();
    let units: Vec<_> = stored.iter().map(|(path, verb)| (path.to_string_lossy().into_owned(), verb.as_str())).collect();
    let unit = "unit/gpuward-sriov-0000-26-00.0.service".to_owned();
    assert_eq!(units, [(unit.clone(), "run"), (unit, "run")], "and nothing into sriov_numvfs");
}

const L40S: &str = "0000:26:00.0";

/// A card whose driver has NVIDIA's tool make virtual functions.
fn nvidia(policy: &str) -> (Managed, Daemon) {
    let rules = format!("[[devices]]\nmatch = {{ kind = 'gpu' }}\nuse = 'pool'\n{policy}");
    let managed = Managed::new("l40s-vgpu", &rules).unwrap();
    managed.sim.set("usr/lib/nvidia/sriov-manage", "#!/bin/sh").unwrap();
    let daemon = start(&managed);
    (managed, daemon)
}

fn nvidia_node(managed: &Managed) -> String {
    let information = fs::read_to_string(managed.sim.root().join(format!("proc/driver/nvidia/gpus/{L40S}/information"))).unwrap();
    let minor = information.lines().find_map(|line| line.strip_prefix("Device Minor:")).unwrap();
    format!("/dev/nvidia{}", minor.trim())
}

#[test]
fn p43_nvidias_tool_does_not_run_below_whoever_has_the_card_open() {
    let (managed, daemon) = nvidia("");
    managed.sim.hold(4711, "nv-hostengine", &nvidia_node(&managed)).unwrap();
    let error = refused(&daemon, vfs(L40S, 0));
    assert_eq!(error.kind, ErrorKind::Held);
    assert!(error.to_string().contains("nv-hostengine[4711]"), "{error}");
    assert_eq!(managed.sim.kernel.stored(), []);
}

#[test]
fn p3_p43_a_unit_that_may_be_paused_is_while_nvidias_tool_runs() {
    let (managed, daemon) = nvidia("[policy]\npause-units = ['nv-hostengine.service']\n");
    managed.sim.hold(4711, "nv-hostengine", &nvidia_node(&managed)).unwrap();
    done(&daemon, vfs(L40S, 0));
    let verbs: Vec<_> = managed.sim.kernel.stored().into_iter().map(|(_, verb)| verb).collect();
    assert_eq!(verbs, ["stop", "run", "start"]);
    assert_eq!(functions(&daemon.view(), L40S), []);
}

#[test]
fn p43_a_function_of_nvidias_that_somebody_else_bound_is_not_taken_away() {
    let (managed, daemon) = nvidia("");
    let function = functions(&daemon.view(), L40S)[3];
    let store = |attribute: String, value: &str| managed.sim.host().store(attribute, value, soon()).unwrap();
    store(format!("sys/bus/pci/devices/{function}/driver_override"), "vfio-pci");
    store("sys/bus/pci/drivers/nvidia/unbind".into(), &function.to_string());
    store("sys/bus/pci/drivers_probe".into(), &function.to_string());
    managed.sim.kernel.calm();
    let error = refused(&daemon, vfs(L40S, 0));
    assert_eq!(error.message, format!("{function}, a virtual function of {L40S}, is bound to vfio-pci and would vanish"));
    assert_eq!(managed.sim.kernel.stored(), []);
}

#[test]
fn p51_a_physical_function_is_not_moved_or_reset_below_its_virtual_ones() {
    let (managed, daemon) = nvidia("");
    let assigned = refused(&daemon, assign(at(L40S)));
    let reset = daemon.submit(Request::Reset(at(L40S))).unwrap_err();
    for error in [assigned, reset] {
        assert_eq!(error.message, format!("{L40S} has 32 virtual functions, which would vanish with its driver"));
    }
    done(&daemon, vfs(L40S, 0));
    done(&daemon, assign(at(L40S)));
    assert!(refused(&daemon, vfs(L40S, 32)).message.ends_with("is bound to vfio-pci, which makes no virtual functions"));
    managed.sim.kernel.calm();
}

#[test]
fn p1_a_driver_stuck_over_virtual_functions_costs_its_own_card_only() {
    const GPU: &str = "0000:02:00.0";
    let (managed, daemon) = workstation();
    daemon.stop();
    let moment = Duration::from_millis(200);
    let deadlines = vfio::Deadlines { sriov: moment, ..vfio::Deadlines::default() };
    let daemon = Daemon::start(manager::engine::Options { deadlines, ..managed.options() }).unwrap();
    daemon.ready();
    managed.sim.kernel.hang_on("sriov_numvfs");
    let job = daemon.apply(&[assign(at(GPU)), vfs(CARD, 3)]).unwrap();
    assert_eq!(job.error.map(|error| error.kind), Some(ErrorKind::Stuck));
    let view = daemon.view();
    assert_eq!((view.devices[&at(CARD)].state, view.devices[&at(GPU)].state), (DeviceState::Stuck, DeviceState::Host));
    assert!(managed.ledger().unwrap().vfs.is_empty(), "nothing is meant to be there");
    assert_eq!(refused(&daemon, vfs(CARD, 3)).kind, ErrorKind::Quarantined);
    done(&daemon, assign(at(GPU)));
    managed.sim.kernel.let_go();
    daemon.until(|view| view.devices[&at(CARD)].state == DeviceState::Quarantined);
    managed.sim.kernel.calm();
    daemon.finish(daemon.submit(Request::Rescan).unwrap());
    assert_eq!(functions(&daemon.view(), CARD).len(), 3, "they came late");
    let clear = daemon.submit(Request::ClearQuarantine(at(CARD))).unwrap();
    assert_eq!(daemon.finish(clear).state, JobState::Done, "no reset below its driver: its virtual functions are in no danger");
    done(&daemon, vfs(CARD, 0));
    daemon.stop();
}

/// The host with so many virtual functions, none of which anybody has.
struct Case {
    managed: Managed,
    trees: [Tree; 2],
    counts: [u16; 2],
    stores: usize,
}

impl Case {
    fn new(counts: [u16; 2]) -> Self {
        let (managed, daemon) = workstation();
        let trees = counts.map(|count| {
            managed.sim.kernel.calm();
            done(&daemon, vfs(CARD, count));
            managed.sim.snapshot()
        });
        let stores = managed.sim.kernel.stored().len();
        daemon.stop();
        Self { managed, trees, counts, stores }
    }

    fn before(&self, daemon: &Daemon) {
        self.managed.sim.kernel.calm();
        done(daemon, vfs(CARD, self.counts[0]));
        assert!(self.managed.sim.snapshot() == self.trees[0]);
        self.managed.sim.kernel.calm();
    }

    /// On which side the host is; ledger and journal have to agree.
    fn side(&self, what: &str) -> usize {
        let tree = self.managed.sim.snapshot();
        let side = self.trees.iter().position(|side| *side == tree);
        let differs = || tree.iter().filter(|(path, text)| self.trees.iter().all(|side| side.get(*path) != Some(text))).collect::<Vec<_>>();
        let side = side.unwrap_or_else(|| panic!("{what}: between: {:?}", differs()));
        let intent = self.managed.ledger().unwrap().vfs.get(&at(CARD)).map_or(0, |intent| intent.count);
        assert_eq!(intent, self.counts[side], "{what}: the ledger says another number");
        assert_eq!(fs::read_dir(self.managed.files().join("run/journal")).map_or(0, Iterator::count), 0, "{what}: a journal is left");
        side
    }
}

fn each_store_fails(counts: [u16; 2]) {
    let case = Case::new(counts);
    let daemon = start(&case.managed);
    for nth in 1..=case.stores {
        for errno in ERRNOS {
            case.before(&daemon);
            case.managed.sim.kernel.fail_at(nth, errno);
            let job = daemon.apply(&[vfs(CARD, counts[1])]).unwrap();
            let what = format!("{counts:?}: store {nth} answers {errno:?}: {:?}", job.error);
            assert_eq!(job.state, JobState::Failed, "{what}");
            assert_eq!(case.side(&what), 0, "{what}");
        }
    }
    println!("virtual functions {counts:?}: {} stores, each failed with {} errnos: all undone", case.stores, ERRNOS.len());
}

fn dies_at_each_store(counts: [u16; 2]) {
    let mut case = Case::new(counts);
    let mut sides = [0; 2];
    for nth in 1..=case.stores {
        for death in [Death::Before, Death::After] {
            let daemon = start(&case.managed);
            case.before(&daemon);
            case.managed.sim.kernel.die_at(nth, death);
            daemon.apply(&[vfs(CARD, counts[1])]).unwrap();
            daemon.stop();
            case.managed = case.managed.restart();
            let daemon = start(&case.managed);
            sides[case.side(&format!("{counts:?}: died {death:?} store {nth}"))] += 1;
            daemon.stop();
        }
    }
    println!("virtual functions {counts:?}: died before and after each of {} stores: {sides:?} as before and as wished", case.stores);
}

#[test]
fn p6_each_store_fails_when_virtual_functions_are_made() {
    each_store_fails([0, 3]);
    each_store_fails([2, 3]);
}

#[test]
fn p6_each_store_fails_when_virtual_functions_are_taken_away() {
    each_store_fails([3, 0]);
}

#[test]
fn the_daemon_dies_at_each_store_when_virtual_functions_are_made() {
    dies_at_each_store([0, 3]);
    dies_at_each_store([2, 3]);
}

#[test]
fn the_daemon_dies_at_each_store_when_virtual_functions_are_taken_away() {
    dies_at_each_store([3, 0]);
}

fn until_in_pool(daemon: &Daemon, device: PciAddress) {
    daemon.until(|view| view.devices.get(&device).is_some_and(|device| device.state == DeviceState::Free));
}

#[test]
fn p42_p66_after_a_reboot_they_are_made_again_and_those_of_the_pool_taken() {
    let (managed, daemon) = workstation();
    done(&daemon, vfs(CARD, 3));
    let second = functions(&daemon.view(), CARD)[1];
    done(&daemon, assign(second));
    daemon.stop();
    for (file, text) in [("sriov_numvfs", "0"), ("sriov_drivers_autoprobe", "1")] {
        managed.sim.host().store(format!("sys/bus/pci/devices/{CARD}/{file}"), text, soon()).unwrap();
    }
    managed.sim.set("proc/sys/kernel/random/boot_id", &uuid::Uuid::new_v4().to_string()).unwrap();
    let managed = managed.restart();
    manager::restore::run(managed.options()).unwrap();
    let daemon = start(&managed);
    until_in_pool(&daemon, second);
    let view = daemon.view();
    assert_eq!(functions(&view, CARD).len(), 3);
    assert_eq!(driver_of(&view, second).as_deref(), Some("vfio-pci"));
    assert!(managed.ledger().unwrap().quarantines.is_empty());
}

#[test]
fn p54_a_driver_that_is_loaded_anew_gets_them_again() {
    let (managed, daemon) = workstation();
    done(&daemon, vfs(CARD, 2));
    let first = functions(&daemon.view(), CARD)[0];
    done(&daemon, assign(first));
    let store = |attribute: &str, value: &str| {
        managed.sim.host().store(attribute, value, soon()).unwrap();
    };
    // As a driver does that is unloaded: its virtual functions go first.
    store(&format!("sys/bus/pci/devices/{CARD}/sriov_numvfs"), "0");
    store("sys/bus/pci/drivers/igb/unbind", CARD);
    let rescan = || daemon.finish(daemon.submit(Request::Rescan).unwrap());
    rescan();
    let card = &daemon.view().devices[&at(CARD)];
    assert_eq!(card.state, DeviceState::Drifted);
    assert!(card.reason.starts_with("it has 0 of 2 virtual functions"), "{}", card.reason);
    assert_eq!(daemon.view().devices[&first].state, DeviceState::Gone);
    store("sys/bus/pci/drivers/igb/bind", CARD);
    rescan();
    until_in_pool(&daemon, first);
    assert_eq!(functions(&daemon.view(), CARD).len(), 2);
    assert_eq!(driver_of(&daemon.view(), first).as_deref(), Some("vfio-pci"));
}

#[test]
fn what_somebody_took_away_is_shown_and_not_undone() {
    let (managed, daemon) = workstation();
    done(&daemon, vfs(CARD, 2));
    managed.sim.host().store(format!("sys/bus/pci/devices/{CARD}/sriov_numvfs"), "0", soon()).unwrap();
    managed.sim.kernel.calm();
    daemon.finish(daemon.submit(Request::Rescan).unwrap());
    daemon.stop();
    let daemon = start(&managed);
    assert_eq!(daemon.view().devices[&at(CARD)].state, DeviceState::Drifted);
    assert_eq!(managed.sim.kernel.stored(), [], "not by a start either");
    done(&daemon, vfs(CARD, 2));
    assert_eq!(daemon.view().devices[&at(CARD)].state, DeviceState::Host);
}

#[test]
fn what_cannot_be_made_again_is_tried_once_for_each_time_the_driver_comes() {
    let (managed, daemon) = workstation();
    done(&daemon, vfs(CARD, 2));
    let store = |attribute: &str, value: &str| managed.sim.host().store(attribute, value, soon()).unwrap();
    let rescan = || daemon.finish(daemon.submit(Request::Rescan).unwrap());
    store(&format!("sys/bus/pci/devices/{CARD}/sriov_numvfs"), "0");
    store("sys/bus/pci/drivers/igb/unbind", CARD);
    rescan();
    store("sys/bus/pci/drivers/igb/bind", CARD);
    managed.sim.kernel.calm();
    managed.sim.kernel.fail_on("sriov_numvfs", Errno::NOMEM);
    for _ in 0..3 {
        rescan();
    }
    daemon.until(|view| view.jobs.values().all(|job| job.state.is_over()));
    let tries = managed.sim.kernel.stored_names().into_iter().filter(|name| name == "sriov_numvfs").count();
    assert_eq!(tries, 1);
    assert_eq!(daemon.view().devices[&at(CARD)].state, DeviceState::Drifted);
    managed.sim.kernel.calm();
    done(&daemon, vfs(CARD, 2));
    assert_eq!(daemon.view().devices[&at(CARD)].state, DeviceState::Host, "a person may try at any time");
}
