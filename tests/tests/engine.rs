//! What the engine admits, refuses, queues and tells, on simulated hosts.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::time::Duration;

use manager::engine::Options;
use manager::failure::ErrorKind;
use manager::id::JobId;
use manager::request::{Goal, Request, Submission};
use manager::view::{DeviceState, EventKind, JobState, Subject};
use tests::engine::{Daemon, Managed, assign, release};
use tests::simhost::Errno;
use vfio::{Binding, Deadlines, PciAddress};

const POOL: &str = "[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'\n";

fn at(address: &str) -> PciAddress {
    address.parse().unwrap()
}

fn gpu() -> PciAddress {
    at("0000:1b:00.0")
}

fn dgx() -> (Managed, Daemon) {
    ready(Managed::new("dgx-h100", POOL).unwrap())
}

fn ready(managed: Managed) -> (Managed, Daemon) {
    let daemon = managed.start().unwrap();
    daemon.ready();
    (managed, daemon)
}

fn state(daemon: &Daemon, device: PciAddress) -> DeviceState {
    daemon.view().devices[&device].state
}

/// An engine that gives up on a store after a moment.
fn impatient(managed: Managed) -> (Managed, Daemon) {
    let moment = Duration::from_millis(300);
    let deadlines = Deadlines { bind: moment, unbind: moment, reset: moment, other: moment, read_back: moment, ..Deadlines::default() };
    let daemon = Daemon::start(Options { deadlines, ..managed.options() }).unwrap();
    daemon.ready();
    (managed, daemon)
}

#[test]
fn p9_a_probe_that_succeeds_and_binds_nothing_is_no_success() {
    let (managed, daemon) = dgx();
    managed.sim.kernel.fail_on("vfio-pci/bind", Errno::NODEV);
    managed.sim.kernel.fail_on("drivers_probe", Errno::INVAL);
    let before = state(&daemon, gpu());
    let job = daemon.apply(&[assign(gpu())]).unwrap();
    // The way back needs neither: `nvidia/bind` takes it by name (P13).
    assert_eq!((job.state, before, state(&daemon, gpu())), (JobState::Failed, DeviceState::Host, DeviceState::Host));
    let error = job.error.unwrap();
    assert_eq!(error.message, "cannot set driver of 0000:1b:00.0 to vfio-pci");
    assert!(error.why[0].contains("vfio-pci/bind"), "{error}");
}

#[test]
fn p11_only_the_device_asked_for_moves() {
    let (managed, daemon) = dgx();
    daemon.apply(&[assign(gpu())]).unwrap();
    let moved: Vec<_> =
        daemon.view().inventory.devices.values().filter(|function| function.is_on_vfio()).map(|function| function.address).collect();
    assert_eq!(moved, [gpu()]);
    let stored = managed.sim.kernel.stored();
    assert!(stored.iter().all(|(path, value)| path.to_string_lossy().contains("0000:1b:00.0") || value == "0000:1b:00.0"), "{stored:?}");
}

#[test]
fn p1_a_store_that_hangs_costs_one_bundle_and_not_the_daemon() {
    let (managed, daemon) = impatient(Managed::new("dgx-h100", POOL).unwrap());
    let other = at("0000:43:00.0");
    managed.sim.kernel.hang_at(4);
    let job = daemon.apply(&[assign(gpu())]).unwrap();
    assert_eq!((job.state, job.error.map(|error| error.kind)), (JobState::RollbackFailed, Some(ErrorKind::Stuck)));
    assert_eq!(state(&daemon, gpu()), DeviceState::Stuck);
    let stores = managed.sim.kernel.stored().len();
    assert_eq!(daemon.apply(&[release(gpu())]).unwrap_err().kind, ErrorKind::Quarantined, "never retried blindly");
    assert_eq!(managed.sim.kernel.stored().len(), stores, "a bundle with a live store never gets another");
    assert!(daemon.events().iter().any(|event| event.kind == EventKind::Stuck));
    managed.sim.kernel.let_go();
    managed.sim.kernel.calm();
    assert_eq!(daemon.apply(&[assign(other)]).unwrap().state, JobState::Done);
    let clear = daemon.submit(Request::ClearQuarantine(gpu())).unwrap();
    daemon.finish(clear);
    assert_eq!(daemon.apply(&[assign(gpu())]).unwrap().state, JobState::Done);
}

#[test]
fn p20_release_clears_the_override_and_gives_the_driver_back() {
    let (managed, daemon) = dgx();
    let read = || Binding::read(&managed.sim.host(), gpu()).unwrap().unwrap();
    let before = read();
    daemon.apply(&[assign(gpu())]).unwrap();
    assert_eq!(read(), Binding::overridden("vfio-pci"));
    daemon.apply(&[release(gpu())]).unwrap();
    assert_eq!(read(), before);
}

#[test]
fn p13_a_driver_that_the_probe_does_not_bring_is_asked_by_name() {
    let (managed, daemon) = dgx();
    daemon.apply(&[assign(gpu())]).unwrap();
    managed.sim.kernel.fail_on("drivers_probe", Errno::INVAL);
    assert_eq!(daemon.apply(&[release(gpu())]).unwrap().state, JobState::Done);
    assert!(managed.sim.kernel.stored().iter().any(|(path, _)| path.ends_with("nvidia/bind")));
}

#[test]
fn p21_the_workstations_own_display_is_refused() {
    let (_managed, daemon) = ready(Managed::new("workstation", POOL).unwrap());
    let refused = daemon.apply(&[assign(at("0000:01:00.0"))]).unwrap_err();
    assert!(refused.to_string().contains("shows the host's console"), "{refused}");
    assert!(refused.to_string().contains("Xorg[1044]"), "who holds it is told at once: {refused}");
}

#[test]
fn p22_the_card_moves_with_all_its_functions_and_back_to_four_drivers() {
    let (_managed, daemon) = ready(Managed::new("workstation", POOL).unwrap());
    let card = ["0000:02:00.0", "0000:02:00.1", "0000:02:00.2", "0000:02:00.3"].map(at);
    let drivers = |daemon: &Daemon| card.map(|device| daemon.view().inventory.devices[&device].driver.clone().unwrap());
    let before = drivers(&daemon);
    daemon.apply(&[assign(card[2])]).unwrap();
    assert!(card.iter().all(|device| state(&daemon, *device) == DeviceState::Free));
    daemon.apply(&[release(card[0])]).unwrap();
    assert_eq!(drivers(&daemon), before);
    assert_eq!(before, ["nvidia", "snd_hda_intel", "xhci_hcd", "nvidia-gpu"]);
}

#[test]
fn p28_a_crowded_group_is_refused_by_name() {
    let (_managed, daemon) = ready(Managed::new("crowded-group", POOL).unwrap());
    let view = daemon.view();
    let gpus = view.inventory.devices.values().filter(|function| function.kind == vfio::Kind::Gpu);
    let refusals: Vec<_> = gpus.filter_map(|gpu| daemon.apply(&[assign(gpu.address)]).err()).collect();
    let crowded = refusals.iter().find(|refusal| refusal.kind == ErrorKind::GroupShared).unwrap_or_else(|| panic!("{refusals:?}"));
    assert!(crowded.message.contains("which is not part of its bundle"), "{crowded}");
    assert!(crowded.why[0].contains("(PCIe port)"), "{crowded}");
    assert!(crowded.remedy.contains("ACS"), "{crowded}");
}

#[test]
fn without_an_iommu_nothing_is_handed_out() {
    let (_managed, daemon) = ready(Managed::new("no-iommu", POOL).unwrap());
    let gpu = daemon.view().inventory.devices.values().find(|function| function.kind == vfio::Kind::Gpu).unwrap().address;
    let refused = daemon.apply(&[assign(gpu)]).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::NotViable);
    assert!(refused.message.contains("without an IOMMU"), "{refused}");
}

#[test]
fn p3_a_held_gpu_is_refused_with_who_holds_it() {
    let (managed, daemon) = dgx();
    let before = managed.sim.snapshot();
    let refused = daemon.apply(&[assign(at("0000:52:00.0"))]).unwrap_err();
    assert_eq!(refused.message, "0000:52:00.0 is held by nvidia-persistenced[812]");
    assert_eq!(refused.why, ["nvidia-persistenced[812] has open /dev/nvidia2, unit nvidia-persistenced.service"]);
    assert_eq!(refused.remedy, "systemctl stop nvidia-persistenced.service");
    assert!(managed.sim.snapshot() == before && managed.sim.kernel.stored().is_empty(), "nothing was touched");
}

#[test]
fn p68_a_pool_that_no_live_process_holds_can_be_released() {
    let (managed, daemon) = dgx();
    daemon.apply(&[assign(gpu())]).unwrap();
    let group = daemon.view().inventory.devices[&gpu()].vfio_group_node().unwrap();
    managed.sim.hold(4711, "qemu", &format!("/{group}")).unwrap();
    assert_eq!(daemon.apply(&[release(gpu())]).unwrap_err().kind, ErrorKind::Held);
    managed.sim.end_process(4711).unwrap();
    assert_eq!(daemon.apply(&[release(gpu())]).unwrap().state, JobState::Done);
}

#[test]
fn p75_what_others_bound_to_vfio_is_left_alone() {
    let managed = Managed::new("dgx-h100", POOL).unwrap();
    let bind = vfio::Change::Binding { device: gpu(), from: Binding::default(), to: Binding::overridden("vfio-pci") };
    bind.make(&managed.sim.host(), &Deadlines::default()).unwrap();
    managed.sim.kernel.calm();
    let (managed, daemon) = ready(managed);
    assert_eq!(daemon.apply(&[release(gpu())]).unwrap().state, JobState::Done);
    assert!(managed.sim.kernel.stored().is_empty());
    assert_eq!(state(&daemon, gpu()), DeviceState::Host);
}

#[test]
fn somebody_elses_move_is_drift_and_not_undone_by_itself() {
    let (managed, daemon) = dgx();
    daemon.apply(&[assign(gpu())]).unwrap();
    let back = vfio::Change::Binding {
        device: gpu(),
        from: Binding::default(),
        to: Binding { driver: Some("nvidia".into()), driver_override: None },
    };
    back.make(&managed.sim.host(), &Deadlines::default()).unwrap();
    managed.sim.kernel.calm();
    let rescan = daemon.submit(Request::Rescan).unwrap();
    daemon.finish(rescan);
    let view = daemon.view();
    assert_eq!(view.devices[&gpu()].state, DeviceState::Drifted);
    assert_eq!(view.devices[&gpu()].reason, "bound to nvidia, not to vfio-pci: somebody else moved it");
    let told: Vec<_> = daemon.events().iter().map(|event| (event.kind, event.subject)).collect();
    assert_eq!(told, [(EventKind::Drifted, Subject::Device(gpu()))]);
    assert!(managed.sim.kernel.stored().is_empty());
    assert_eq!(daemon.apply(&[assign(gpu())]).unwrap().state, JobState::Done, "a person may ask for it");
    assert_eq!(state(&daemon, gpu()), DeviceState::Free);
}

#[test]
fn several_bundles_move_together_or_not_at_all() {
    let (managed, daemon) = dgx();
    managed.sim.end_process(812).unwrap();
    let gpus: Vec<_> =
        daemon.view().inventory.devices.values().filter(|function| function.kind == vfio::Kind::Gpu).map(|gpu| gpu.address).collect();
    let all = |goal: fn(PciAddress) -> Goal| gpus.iter().copied().map(goal).collect::<Vec<_>>();
    // The minor numbers of NVIDIA's nodes follow the order of probes.
    let attributes = || managed.sim.snapshot().into_iter().filter(|(path, _)| path.starts_with("sys")).collect::<Vec<_>>();
    let before = attributes();
    managed.sim.kernel.fail_on(&format!("{}/driver/unbind", gpus[5]), Errno::IO);
    assert_eq!(daemon.apply(&all(assign)).unwrap().state, JobState::Failed);
    assert_eq!(attributes(), before, "all are back");
    managed.sim.kernel.calm();
    assert_eq!(daemon.apply(&all(assign)).unwrap().state, JobState::Done);
    let free: BTreeSet<_> = gpus.iter().map(|gpu| state(&daemon, *gpu)).map(|state| format!("{state:?}")).collect();
    assert_eq!(free, BTreeSet::from(["Free".to_owned()]));
    assert_eq!(daemon.apply(&all(release)).unwrap().state, JobState::Done);
}

#[test]
fn a_plan_is_carried_out_only_as_it_was_looked_at() {
    let (managed, daemon) = dgx();
    let plan = daemon.plan(&[assign(gpu())]).unwrap();
    assert_eq!(plan.refusals, []);
    assert!(managed.sim.kernel.stored().is_empty(), "planning touches nothing");
    managed.sim.set("sys/bus/pci/devices/0000:1b:00.0/d3cold_allowed", "0").unwrap();
    let apply = |digest: &str| Request::Apply { goals: vec![assign(gpu())], plan_digest: Some(digest.into()) };
    assert_eq!(daemon.submit(apply(&plan.digest)).unwrap_err().kind, ErrorKind::Conflict);
    let plan = daemon.plan(&[assign(gpu())]).unwrap();
    let job = daemon.submit(apply(&plan.digest)).unwrap();
    assert_eq!(daemon.finish(job).state, JobState::Done);
    assert!(daemon.plan(&[assign(gpu())]).unwrap().steps.is_empty(), "the second plan is empty");
}

#[test]
fn a_named_request_gives_the_same_job_also_after_a_restart() {
    let (managed, daemon) = dgx();
    let named = |id: &str, goal: Goal| Submission {
        request: Request::Apply { goals: vec![goal], plan_digest: None },
        uid: 1000,
        request_id: id.into(),
        if_generation: None,
    };
    let job = daemon.submit_as(named("a", assign(gpu()))).unwrap();
    assert_eq!(daemon.submit_as(named("a", assign(gpu()))).unwrap(), job);
    assert_eq!(daemon.submit_as(named("a", release(gpu()))).unwrap_err().kind, ErrorKind::Conflict);
    daemon.finish(job);
    daemon.stop();
    let (_managed, daemon) = ready(managed.restart());
    assert_eq!(daemon.submit_as(named("a", assign(gpu()))).unwrap(), job);
    let other = daemon.submit_as(named("b", release(gpu()))).unwrap();
    assert!(other > job, "numbers are never used twice");
}

#[test]
fn a_caller_that_looked_at_an_older_state_is_refused() {
    let (_managed, daemon) = dgx();
    let seen = daemon.view().generation;
    let asked = |goal| Submission {
        request: Request::Apply { goals: vec![goal], plan_digest: None },
        uid: 0,
        request_id: String::new(),
        if_generation: Some(seen),
    };
    let job = daemon.submit_as(asked(assign(gpu()))).unwrap();
    daemon.finish(job);
    assert_eq!(daemon.submit_as(asked(release(gpu()))).unwrap_err().kind, ErrorKind::Conflict);
    let other = daemon.submit_as(asked(assign(at("0000:43:00.0")))).unwrap();
    daemon.finish(other);
}

#[test]
fn a_busy_bundle_is_refused_and_a_job_in_hand_can_be_canceled() {
    let (managed, daemon) = dgx();
    let before = managed.sim.snapshot();
    managed.sim.kernel.hang_at(1);
    let job = daemon.submit(Request::Apply { goals: vec![assign(gpu())], plan_digest: None }).unwrap();
    let busy = daemon.apply(&[release(gpu())]).unwrap_err();
    assert_eq!(busy.message, format!("0000:1b:00.0 is busy: job {job} (assign) is not over"));
    daemon.cancel(job).unwrap();
    managed.sim.kernel.let_go();
    let ended = daemon.finish(job);
    assert_eq!((ended.state, ended.error.map(|error| error.kind)), (JobState::Canceled, Some(ErrorKind::Canceled)));
    assert!(managed.sim.snapshot() == before, "what had been done was undone");
    assert_eq!(daemon.cancel(job).unwrap_err().kind, ErrorKind::Conflict);
    assert_eq!(daemon.cancel(JobId(999)).unwrap_err().message, "there is no job 999");
}

#[test]
fn a_uid_may_have_sixteen_jobs_that_are_not_over() {
    let managed = Managed::new("dgx-h100", &format!("{POOL}[limits]\nparallel-bundles = 1\njobs-kept = 3\n")).unwrap();
    let (managed, daemon) = ready(managed);
    managed.sim.kernel.hang_at(1);
    let as_uid = |uid, request| daemon.submit_as(Submission { request, uid, request_id: String::new(), if_generation: None });
    let first = as_uid(1000, Request::Apply { goals: vec![assign(gpu())], plan_digest: None }).unwrap();
    let queued: Vec<_> = (0..15).map(|_| as_uid(1000, Request::Rescan).unwrap()).collect();
    assert_eq!(as_uid(1000, Request::Rescan).unwrap_err().kind, ErrorKind::TooMany);
    let of_another = as_uid(1001, Request::Rescan).unwrap();
    daemon.cancel(queued[3]).unwrap();
    assert_eq!(daemon.finish(queued[3]).state, JobState::Canceled);
    managed.sim.kernel.let_go();
    for job in [first, queued[14], of_another] {
        daemon.until(|view| view.jobs.get(&job).is_none_or(|job| job.state.is_over()));
    }
    daemon.until(|view| view.jobs.len() == 3);
}

#[test]
fn a_daemon_that_is_stopped_undoes_what_is_half_done() {
    let (managed, daemon) = dgx();
    let before = managed.sim.snapshot();
    managed.sim.kernel.hang_at(1);
    let job = daemon.submit(Request::Apply { goals: vec![assign(gpu())], plan_digest: None }).unwrap();
    let kernel = managed.sim.kernel.clone();
    let driver = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        kernel.let_go();
    });
    daemon.engine().stop();
    driver.join().unwrap();
    assert_eq!(daemon.finish(job).state, JobState::Canceled);
    assert!(managed.sim.snapshot() == before);
    assert!(managed.ledger().unwrap().devices.is_empty());
}

#[test]
fn p73_a_gpu_that_falls_off_the_bus_is_gone_and_told() {
    let (managed, daemon) = dgx();
    let other = at("0000:43:00.0");
    daemon.apply(&[assign(gpu())]).unwrap();
    for device in [gpu(), other] {
        managed.sim.unplug(&device.to_string()).unwrap();
    }
    let rescan = daemon.submit(Request::Rescan).unwrap();
    daemon.finish(rescan);
    assert_eq!(state(&daemon, gpu()), DeviceState::Gone, "what is ours is not forgotten");
    assert!(!daemon.view().devices.contains_key(&other));
    let told: Vec<_> = daemon.events().iter().map(|event| (event.kind, event.subject)).collect();
    assert_eq!(told, [gpu(), other].map(|device| (EventKind::DeviceGone, Subject::Device(device))));
    assert_eq!(daemon.apply(&[release(gpu())]).unwrap().state, JobState::Done, "a person may forget it");
    assert!(!daemon.view().devices.contains_key(&gpu()) && managed.ledger().unwrap().devices.is_empty());
}

#[test]
fn p17_p69_a_vfio_device_whose_group_was_closed_is_held_all_the_same() {
    let (managed, daemon) = dgx();
    assert_eq!(daemon.apply(&[assign(gpu())]).unwrap().state, JobState::Done);
    managed.sim.hold(4711, "vmm", "/dev/null").unwrap();
    let process = managed.sim.root().join("proc/4711");
    std::os::unix::fs::symlink("anon_inode:[vfio-device]", process.join("fd/9")).unwrap();
    managed.sim.set("proc/4711/fdinfo/9", "pos:\t0\nvfio-device-syspath: /sys/devices/pci0000:15/0000:15:01.0/0000:1b:00.0").unwrap();
    let refused = daemon.apply(&[release(gpu())]).unwrap_err();
    assert_eq!((refused.kind, refused.message.as_str()), (ErrorKind::Held, "0000:1b:00.0 is held by vmm[4711]"));
    assert!(refused.why[0].contains("has open /sys/devices/"), "{refused}");
}
