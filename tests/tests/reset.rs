//! Resets of devices in the pool: how they are done, what they are followed by, and what becomes of a device that does not come back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use std::thread;
use std::time::Duration;

use manager::failure::ErrorKind;
use manager::history::{Entry, Kind};
use manager::request::Request;
use manager::view::{DeviceState, EventKind, JobState, JobView};
use tests::engine::{Daemon, Managed, assign};
use tests::simhost::{Death, Errno, Left};
use vfio::PciAddress;

const POOL: &str = "[[devices]]\nmatch = { vendor = '10de' }\nuse = 'pool'\n";
const GPU: &str = "0000:1b:00.0";
const CARD: [&str; 4] = ["0000:02:00.0", "0000:02:00.1", "0000:02:00.2", "0000:02:00.3"];

const ERRNOS: [Errno; 5] = [Errno::NODEV, Errno::BUSY, Errno::INVAL, Errno::IO, Errno::NOTTY];

fn at(device: &str) -> PciAddress {
    device.parse().unwrap()
}

fn in_pool(host: &str, device: &str) -> (Managed, Daemon) {
    let managed = Managed::new(host, POOL).unwrap();
    let daemon = managed.start().unwrap();
    daemon.ready();
    assert_eq!(daemon.apply(&[assign(at(device))]).unwrap().state, JobState::Done);
    managed.sim.kernel.calm();
    (managed, daemon)
}

fn reset(daemon: &Daemon, device: &str) -> JobView {
    let job = daemon.submit(Request::Reset(at(device))).unwrap();
    daemon.finish(job)
}

fn state(daemon: &Daemon, device: &str) -> (DeviceState, String) {
    let view = daemon.view();
    let device = &view.devices[&at(device)];
    (device.state, device.reason.clone())
}

fn file(managed: &Managed, device: &str, name: &str) -> String {
    managed.sim.host().read(format!("sys/bus/pci/devices/{device}/{name}")).unwrap().unwrap_or_default()
}

fn steps(entry: &Entry) -> Vec<&str> {
    let steps = entry.details.iter().filter(|(key, _)| key.starts_with("step-"));
    steps.map(|(_, step)| step.split_once(':').unwrap().0).collect()
}

/// The device is in quarantine, its history has the step that failed, and both say why.
fn assert_kept_out(managed: &Managed, daemon: &Daemon, reason: &str) {
    let (state, told) = state(daemon, GPU);
    assert_eq!(state, DeviceState::Quarantined);
    assert!(told.starts_with(&format!("{GPU} {reason}")), "{told}");
    let history = managed.history(at(GPU));
    assert_eq!(history.iter().map(|entry| entry.kind).collect::<Vec<_>>()[..2], [Kind::Quarantined, Kind::Reset]);
    assert!(history[1].text.contains(reason), "{:?}", history[1]);
    assert!(daemon.events().iter().any(|event| event.kind == EventKind::Quarantined));
}

#[test]
fn p102_a_device_is_reset_and_each_step_is_in_its_history() {
    let (managed, daemon) = in_pool("dgx-h100", GPU);
    assert_eq!(reset(&daemon, GPU).state, JobState::Done);
    assert_eq!(managed.sim.kernel.stored_names(), ["reset"], "what is right already is not stored");
    assert_eq!((managed.sim.resets(GPU), state(&daemon, GPU).0), (1, DeviceState::Free));
    let history = managed.history(at(GPU));
    assert_eq!(history.iter().map(|entry| entry.kind).collect::<Vec<_>>(), [Kind::Sanitised, Kind::Assigned]);
    assert_eq!(steps(&history[0]), ["wake", "before", "method", "reset", "wake", "answers", "regions", "after"]);
    assert!(history[0].text.starts_with("reset (flr), answers, regions in place"), "{}", history[0].text);
    assert!(daemon.events().iter().any(|event| event.kind == EventKind::Sanitised));
}

#[test]
fn p30_a_device_that_sleeps_is_woken_before_it_is_read_and_stays_awake() {
    let (managed, daemon) = in_pool("dgx-h100", GPU);
    managed.sim.set(format!("sys/bus/pci/devices/{GPU}/power/control"), "auto").unwrap();
    managed.sim.set(format!("sys/bus/pci/devices/{GPU}/power_state"), "D3hot").unwrap();
    assert_eq!(reset(&daemon, GPU).state, JobState::Done);
    assert_eq!(managed.sim.kernel.stored_names(), ["control", "reset"]);
    let power = ["power/control", "power_state", "d3cold_allowed"].map(|name| file(&managed, GPU, name));
    assert_eq!(power, ["on", "D0", "0"], "and its power may not be cut");
}

#[test]
fn p30_a_device_that_does_not_wake_is_not_read() {
    let (managed, daemon) = in_pool("dgx-h100", GPU);
    managed.sim.set(format!("sys/bus/pci/devices/{GPU}/power_state"), "D3cold").unwrap();
    assert_eq!(reset(&daemon, GPU).state, JobState::Failed);
    assert_kept_out(&managed, &daemon, "does not wake: it is in D3cold");
    assert_eq!(managed.sim.resets(GPU), 0);
}

#[test]
fn p32_a_device_that_does_not_come_back_is_kept_out() {
    let (managed, daemon) = in_pool("dgx-h100", GPU);
    managed.sim.after_reset(GPU, Left::Silent).unwrap();
    let job = reset(&daemon, GPU);
    assert_eq!((job.state, job.error.unwrap().kind), (JobState::Failed, ErrorKind::Internal));
    assert_kept_out(&managed, &daemon, "does not answer: configuration space begins with ffffffff, class ffffff");
    let refused = daemon.submit(Request::Reset(at(GPU))).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Quarantined);
}

#[test]
fn p35_a_device_that_comes_back_late_is_waited_for() {
    let (managed, daemon) = in_pool("dgx-h100", GPU);
    managed.sim.after_reset(GPU, Left::Silent).unwrap();
    let job = daemon.submit(Request::Reset(at(GPU))).unwrap();
    while managed.sim.resets(GPU) == 0 {
        thread::sleep(Duration::from_millis(1));
    }
    thread::sleep(Duration::from_millis(50));
    managed.sim.answer_again(GPU).unwrap();
    assert_eq!(daemon.finish(job).state, JobState::Done);
    assert_eq!(state(&daemon, GPU).0, DeviceState::Free);
}

#[test]
fn p35_a_device_whose_regions_are_lost_is_kept_out() {
    let (managed, daemon) = in_pool("dgx-h100", GPU);
    managed.sim.after_reset(GPU, Left::WithoutRegions).unwrap();
    assert_eq!(reset(&daemon, GPU).state, JobState::Failed);
    assert_kept_out(&managed, &daemon, "has lost region 0: it is at 0x0, the kernel put it at");
}

#[test]
fn p102_a_device_that_cannot_be_reset_is_kept_out() {
    let (managed, daemon) = in_pool("dgx-h100", GPU);
    managed.sim.set(format!("sys/bus/pci/devices/{GPU}/reset_method"), "pm").unwrap();
    assert_eq!(reset(&daemon, GPU).state, JobState::Failed);
    assert_kept_out(&managed, &daemon, "cannot be reset: no reset may be used: pm: leaves memory as it was");
    assert_eq!(managed.sim.resets(GPU), 0);
}

#[test]
fn p37_a_reset_that_the_kernel_gives_up_is_told_with_its_words() {
    let (managed, daemon) = in_pool("dgx-h100", GPU);
    managed.sim.kernel.fail_on("reset", Errno::NOTTY);
    assert_eq!(reset(&daemon, GPU).state, JobState::Failed);
    assert_kept_out(&managed, &daemon, "could not be reset: the kernel refused \"1\" in");
}

#[test]
fn p22_a_card_is_reset_by_what_reaches_it_alone() {
    let (managed, daemon) = in_pool("workstation", CARD[0]);
    assert_eq!(file(&managed, CARD[0], "reset_method"), "flr", "its bus is shared with its companions");
    assert_eq!(reset(&daemon, CARD[0]).state, JobState::Done);
    assert_eq!(CARD.map(|function| managed.sim.resets(function)), [1, 0, 0, 0], "companions have no way of their own");
    assert_eq!(managed.history(at(CARD[1]))[0].kind, Kind::Sanitised);
}

#[test]
fn p22_p32_a_card_that_only_its_bus_resets_is_reset_with_it_as_a_whole() {
    let (managed, daemon) = in_pool("workstation", CARD[0]);
    managed.sim.set(format!("sys/bus/pci/devices/{}/reset_method", CARD[0]), "bus").unwrap();
    assert_eq!(reset(&daemon, CARD[0]).state, JobState::Done);
    assert_eq!(managed.sim.kernel.stored_names(), ["reset_subordinate"]);
    assert_eq!(CARD.map(|function| managed.sim.resets(function)), [1, 1, 1, 1]);
    let history = managed.history(at(CARD[0]));
    assert!(history[0].text.starts_with("reset (its whole bus, below 0000:00:01.1)"), "{}", history[0].text);
    managed.sim.after_reset(CARD[2], Left::Silent).unwrap();
    assert_eq!(reset(&daemon, CARD[0]).state, JobState::Failed, "each of its functions has to come back");
    assert!(state(&daemon, CARD[0]).1.starts_with("0000:02:00.2 does not answer"), "{:?}", state(&daemon, CARD[0]));
}

#[test]
fn only_what_is_in_the_pool_and_nobodys_is_reset() {
    let (managed, daemon) = in_pool("dgx-h100", GPU);
    let refusal = |device: &str| daemon.submit(Request::Reset(at(device))).unwrap_err().kind;
    assert_eq!(refusal("0000:43:00.0"), ErrorKind::Conflict, "its driver has it");
    assert_eq!(refusal("0000:99:00.0"), ErrorKind::NoSuchDevice);
    let group = managed.sim.host().link_name(format!("sys/bus/pci/devices/{GPU}/iommu_group")).unwrap().unwrap();
    managed.sim.hold(4711, "qemu-system-x86", &format!("/dev/vfio/{group}")).unwrap();
    assert_eq!(refusal(GPU), ErrorKind::Held);
    assert_eq!(managed.sim.kernel.stored().len(), 0, "nothing was touched");
}

/// Asleep, and with a list of methods that somebody else made longer: all that a reset can store.
fn disturb(managed: &Managed) {
    managed.sim.set(format!("sys/bus/pci/devices/{GPU}/power/control"), "auto").unwrap();
    managed.sim.set(format!("sys/bus/pci/devices/{GPU}/reset_method"), "flr bus pm").unwrap();
}

const STORES: [&str; 3] = ["control", "reset_method", "reset"];

#[test]
fn p102_whichever_store_fails_the_device_is_clean_or_kept_out() {
    let (managed, daemon) = in_pool("dgx-h100", GPU);
    for nth in 1..=STORES.len() {
        for errno in ERRNOS {
            disturb(&managed);
            managed.sim.kernel.calm();
            managed.sim.kernel.fail_at(nth, errno);
            assert_eq!(reset(&daemon, GPU).state, JobState::Failed, "store {nth} answers {errno:?}");
            assert_eq!(managed.sim.kernel.stored_names(), STORES[..nth], "nothing goes on after it");
            assert_eq!(state(&daemon, GPU).0, DeviceState::Quarantined);
            managed.sim.kernel.calm();
            let cleared = daemon.submit(Request::ClearQuarantine(at(GPU))).unwrap();
            assert_eq!(daemon.finish(cleared).state, JobState::Done);
            assert_eq!(state(&daemon, GPU).0, DeviceState::Free);
        }
    }
    println!("reset: {} stores, each failed with {} errnos", STORES.len(), ERRNOS.len());
}

#[test]
fn p1_a_reset_that_hangs_costs_one_bundle() {
    let managed = Managed::new("dgx-h100", POOL).unwrap();
    let mut options = managed.options();
    options.deadlines.reset = Duration::from_millis(100);
    let daemon = Daemon::start(options).unwrap();
    daemon.ready();
    assert_eq!(daemon.apply(&[assign(at(GPU)), assign(at("0000:43:00.0"))]).unwrap().state, JobState::Done);
    managed.sim.kernel.calm();
    managed.sim.kernel.hang_at(1);
    let job = reset(&daemon, GPU);
    assert_eq!((job.state, job.error.unwrap().kind), (JobState::Failed, ErrorKind::Stuck));
    assert_eq!(state(&daemon, GPU).0, DeviceState::Stuck);
    let refused = daemon.submit(Request::ClearQuarantine(at(GPU))).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Stuck, "no other store before that one has returned");
    assert_eq!(reset(&daemon, "0000:43:00.0").state, JobState::Done, "the next one is not in its way");
    managed.sim.kernel.let_go();
    daemon.until(|view| view.devices[&at(GPU)].state == DeviceState::Quarantined);
    let cleared = daemon.submit(Request::ClearQuarantine(at(GPU))).unwrap();
    assert_eq!(daemon.finish(cleared).state, JobState::Done);
}

#[test]
fn p68_a_daemon_that_dies_in_a_reset_leaves_a_device_that_can_be_reset() {
    let (mut managed, daemon) = in_pool("dgx-h100", GPU);
    daemon.stop();
    for nth in 1..=STORES.len() {
        for death in [Death::Before, Death::After] {
            let daemon = managed.start().unwrap();
            daemon.ready();
            disturb(&managed);
            managed.sim.kernel.die_at(nth, death);
            assert_eq!(reset(&daemon, GPU).state, JobState::RollbackFailed, "it died");
            daemon.stop();
            managed = managed.restart();
            let daemon = managed.start().unwrap();
            daemon.ready();
            assert_eq!(state(&daemon, GPU).0, DeviceState::Free, "died {death:?} store {nth}");
            assert_eq!(reset(&daemon, GPU).state, JobState::Done, "died {death:?} store {nth}");
            assert_eq!(file(&managed, GPU, "reset_method"), "flr bus");
            daemon.stop();
        }
    }
}

#[test]
fn p32_what_is_free_and_does_not_answer_at_a_start_is_in_quarantine() {
    let (managed, daemon) = in_pool("dgx-h100", GPU);
    managed.sim.after_reset(GPU, Left::Silent).unwrap();
    managed.sim.kernel.die_at(1, Death::After);
    assert_eq!(reset(&daemon, GPU).state, JobState::RollbackFailed, "it died in the reset");
    daemon.stop();
    let managed = managed.restart();
    let daemon = managed.start().unwrap();
    daemon.ready();
    let (state, reason) = state(&daemon, GPU);
    assert_eq!(state, DeviceState::Quarantined);
    assert!(reason.contains("does not answer"), "{reason}");
    assert!(managed.sim.kernel.stored().is_empty(), "a start looks, and stores nothing");
}
