//! The ways into quarantine and out of it: cleared where a device answers, found again where it does not, forgotten where it has left.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use std::collections::BTreeMap;

use manager::failure::ErrorKind;
use manager::history::Kind;
use manager::id::{ClaimId, TenantId};
use manager::ledger::store;
use manager::request::Request;
use manager::view::{DeviceState, JobState, JobView};
use tests::engine::{Daemon, Managed, assign, release};
use tests::simhost::{Death, Errno, Left};
use vfio::{Binding, PciAddress};

const POOL: &str = "[[devices]]\nmatch = { vendor = '10de' }\nuse = 'pool'\n[policy]\nremove-rescan = true\n";
const GPU: &str = "0000:1b:00.0";
const CARD: &str = "0000:02:00.0";

const ERRNOS: [Errno; 4] = [Errno::NODEV, Errno::BUSY, Errno::INVAL, Errno::IO];

fn at(device: &str) -> PciAddress {
    device.parse().unwrap()
}

fn run(daemon: &Daemon, request: Request) -> JobView {
    let job = daemon.submit(request).unwrap();
    daemon.finish(job)
}

/// A host with one device that a reset left as `left`, so that it is in quarantine.
fn quarantined(host: &str, device: &str, left: Left) -> (Managed, Daemon) {
    let managed = Managed::new(host, POOL).unwrap();
    let daemon = managed.start().unwrap();
    daemon.ready();
    put_into_quarantine(&managed, &daemon, (device, left));
    (managed, daemon)
}

fn put_into_quarantine(managed: &Managed, daemon: &Daemon, (device, left): (&str, Left)) {
    assert_eq!(daemon.apply(&[assign(at(device))]).unwrap().state, JobState::Done);
    managed.sim.after_reset(device, left).unwrap();
    assert_eq!(run(daemon, Request::Reset(at(device))).state, JobState::Failed);
    assert_eq!(state(daemon, device), Some(DeviceState::Quarantined));
    managed.sim.after_reset(device, if left == Left::Dead { left } else { Left::Whole }).unwrap();
    managed.sim.kernel.calm();
}

fn state(daemon: &Daemon, device: &str) -> Option<DeviceState> {
    Some(daemon.view().devices.get(&at(device))?.state)
}

fn reason(daemon: &Daemon, device: &str) -> String {
    daemon.view().devices[&at(device)].reason.clone()
}

fn driver(managed: &Managed, device: &str) -> Option<String> {
    Binding::read(&managed.sim.host(), at(device)).unwrap()?.driver
}

fn kinds(managed: &Managed, device: &str) -> Vec<Kind> {
    managed.history(at(device)).iter().map(|entry| entry.kind).collect()
}

#[test]
fn p32_a_device_leaves_its_quarantine_only_where_it_answers() {
    let (managed, daemon) = quarantined("dgx-h100", GPU, Left::Silent);
    let job = run(&daemon, Request::ClearQuarantine(at(GPU)));
    assert_eq!(job.state, JobState::Failed, "a person's word does not mend it");
    assert_eq!(state(&daemon, GPU), Some(DeviceState::Quarantined));
    managed.sim.answer_again(GPU).unwrap();
    managed.sim.after_reset(GPU, Left::WithoutRegions).unwrap();
    assert_eq!(run(&daemon, Request::ClearQuarantine(at(GPU))).state, JobState::Failed);
    assert!(reason(&daemon, GPU).contains("has lost region 0"), "the newest reason: {}", reason(&daemon, GPU));
    managed.sim.answer_again(GPU).unwrap();
    managed.sim.after_reset(GPU, Left::Whole).unwrap();
    assert_eq!(run(&daemon, Request::ClearQuarantine(at(GPU))).state, JobState::Done);
    assert_eq!(state(&daemon, GPU), Some(DeviceState::Free));
    assert_eq!(kinds(&managed, GPU)[..2], [Kind::QuarantineCleared, Kind::Sanitised]);
}

#[test]
fn a_device_that_cannot_be_reset_may_be_cleared_by_a_person_who_has_looked() {
    let (managed, daemon) = quarantined("dgx-h100", GPU, Left::Silent);
    managed.sim.answer_again(GPU).unwrap();
    managed.sim.set(format!("sys/bus/pci/devices/{GPU}/reset_method"), "pm").unwrap();
    assert_eq!(run(&daemon, Request::ClearQuarantine(at(GPU))).state, JobState::Done);
    assert_eq!(kinds(&managed, GPU)[..2], [Kind::QuarantineCleared, Kind::Checked]);
}

#[test]
fn clearing_ends_a_claim_that_was_never_made_ready() {
    let (managed, daemon) = quarantined("dgx-h100", GPU, Left::Silent);
    daemon.stop();
    let mut ledger = managed.ledger().unwrap();
    let claim = serde_json::json!({
        "standing": "pending", "tenant": TenantId::BUILT_IN, "machine": null, "domain": uuid::Uuid::new_v4(), "devices": [GPU],
        "isolation": "whole-gpu", "since": 0, "epoch": ledger.take_epoch(), "on-demand": false,
    });
    ledger.claims.insert(ClaimId::random(), serde_json::from_value(claim).unwrap());
    store::save(&managed.files().join("state"), &ledger).unwrap();
    managed.sim.answer_again(GPU).unwrap();
    let daemon = managed.start().unwrap();
    assert_eq!(daemon.ready().claims.len(), 1, "kept with its device in quarantine");
    assert_eq!(run(&daemon, Request::ClearQuarantine(at(GPU))).state, JobState::Done);
    assert_eq!((managed.ledger().unwrap().claims, state(&daemon, GPU)), (BTreeMap::new(), Some(DeviceState::Free)));
}

#[test]
fn a_device_in_quarantine_that_was_pulled_out_is_forgotten_when_cleared() {
    let (managed, daemon) = quarantined("dgx-h100", GPU, Left::Silent);
    managed.sim.unplug(GPU).unwrap();
    run(&daemon, Request::Rescan);
    assert_eq!(state(&daemon, GPU), Some(DeviceState::Quarantined), "it may come back as it was");
    assert!(reason(&daemon, GPU).ends_with("is not on the host"), "{}", reason(&daemon, GPU));
    assert_eq!(run(&daemon, Request::ClearQuarantine(at(GPU))).state, JobState::Done);
    assert_eq!(state(&daemon, GPU), None);
    assert!(managed.ledger().unwrap().devices.is_empty());
}

#[test]
fn what_is_not_in_quarantine_is_not_cleared_and_what_may_not_be_removed_is_not() {
    let (managed, daemon) = quarantined("dgx-h100", GPU, Left::Silent);
    let refusal = |request| daemon.submit(request).unwrap_err();
    assert_eq!(refusal(Request::ClearQuarantine(at("0000:43:00.0"))).kind, ErrorKind::Conflict);
    assert_eq!(refusal(Request::Recover(at("0000:43:00.0"))).kind, ErrorKind::Conflict);
    managed.configure(&POOL.replace("remove-rescan = true", "")).unwrap();
    daemon.engine().reload();
    daemon.ready();
    let refused = refusal(Request::Recover(at(GPU)));
    assert_eq!(refused.kind, ErrorKind::NotSupported);
    assert!(refused.why[0].contains("policy.remove-rescan"), "{refused}");
    assert_eq!(managed.sim.kernel.stored().len(), 0, "nothing was touched");
}

#[test]
fn p13_p32_a_silent_device_is_taken_off_the_bus_and_found_again() {
    let (managed, daemon) = quarantined("dgx-h100", GPU, Left::Silent);
    let before = managed.ledger().unwrap().devices[&at(GPU)].original.clone();
    let job = run(&daemon, Request::Recover(at(GPU)));
    assert_eq!(job.state, JobState::Done, "{:?}", job.error);
    assert_eq!(managed.sim.kernel.stored_names(), ["remove", "rescan"]);
    assert_eq!((driver(&managed, GPU), before.binding.driver), (Some("nvidia".into()), Some("nvidia".into())));
    assert_eq!(state(&daemon, GPU), Some(DeviceState::Host), "its driver was there first");
    assert_eq!(kinds(&managed, GPU)[..4], [Kind::QuarantineCleared, Kind::Released, Kind::Checked, Kind::Recovered]);
    assert_eq!(daemon.apply(&[assign(at(GPU))]).unwrap().state, JobState::Done, "and it can be taken as before");
    assert_eq!(run(&daemon, Request::Reset(at(GPU))).state, JobState::Done);
}

#[test]
fn p13_a_device_that_is_found_again_gets_its_other_knobs_back_or_stays() {
    let managed = Managed::new("dgx-h100", POOL).unwrap();
    let control = format!("sys/bus/pci/devices/{GPU}/power/control");
    managed.sim.set(&control, "auto").unwrap();
    let daemon = managed.start().unwrap();
    daemon.ready();
    put_into_quarantine(&managed, &daemon, (GPU, Left::Silent));
    managed.sim.kernel.fail_on("power/control", Errno::IO);
    assert_eq!(run(&daemon, Request::Recover(at(GPU))).state, JobState::Failed);
    assert_eq!(state(&daemon, GPU), Some(DeviceState::Quarantined));
    managed.sim.kernel.calm();
    assert_eq!(run(&daemon, Request::Recover(at(GPU))).state, JobState::Done);
    assert_eq!(managed.sim.kernel.stored_names(), ["remove", "rescan", "control"]);
    assert_eq!(managed.sim.host().read(&control).unwrap().as_deref(), Some("auto"));
    assert_eq!(state(&daemon, GPU), Some(DeviceState::Host));
}

#[test]
fn p13_p22_a_card_is_found_again_with_all_its_functions() {
    let (managed, daemon) = quarantined("workstation", CARD, Left::Silent);
    let job = run(&daemon, Request::Recover(at(CARD)));
    assert_eq!(job.state, JobState::Done, "{:?}", job.error);
    assert_eq!(managed.sim.kernel.stored_names(), ["remove", "remove", "remove", "remove", "rescan"]);
    let drivers = ["0", "1", "2", "3"].map(|function| driver(&managed, &format!("0000:02:00.{function}")).unwrap_or_default());
    assert_eq!(drivers, ["nvidia", "snd_hda_intel", "xhci_hcd", "nvidia-gpu"]);
    assert_eq!(state(&daemon, CARD), Some(DeviceState::Host));
}

#[test]
fn p32_a_dead_device_is_not_found_again_and_stays_in_quarantine() {
    let (managed, daemon) = quarantined("dgx-h100", GPU, Left::Dead);
    let job = run(&daemon, Request::Recover(at(GPU)));
    assert_eq!(job.state, JobState::Failed);
    assert_eq!(state(&daemon, GPU), Some(DeviceState::Quarantined));
    assert!(reason(&daemon, GPU).contains("was not found again"), "{}", reason(&daemon, GPU));
    assert!(managed.ledger().unwrap().quarantines.contains_key(&at(GPU)));
    managed.sim.after_reset(GPU, Left::Silent).unwrap();
    assert_eq!(run(&daemon, Request::Recover(at(GPU))).state, JobState::Done, "it is looked for once more");
}

const STORES: usize = 2;

#[test]
fn whichever_store_of_a_recovery_fails_the_device_stays_in_quarantine() {
    let (managed, daemon) = quarantined("dgx-h100", GPU, Left::Silent);
    for nth in 1..=STORES {
        for errno in ERRNOS {
            managed.sim.kernel.calm();
            managed.sim.kernel.fail_at(nth, errno);
            let job = run(&daemon, Request::Recover(at(GPU)));
            assert_eq!(job.state, JobState::Failed, "store {nth} answers {errno:?}");
            assert_eq!(state(&daemon, GPU), Some(DeviceState::Quarantined), "store {nth} answers {errno:?}");
            managed.sim.kernel.calm();
            let job = run(&daemon, Request::Recover(at(GPU)));
            assert_eq!(job.state, JobState::Done, "store {nth} answered {errno:?}: {:?}", job.error);
            put_into_quarantine(&managed, &daemon, (GPU, Left::Silent));
        }
    }
    println!("recover: {STORES} stores, each failed with {} errnos", ERRNOS.len());
}

#[test]
fn p68_wherever_the_daemon_dies_in_a_recovery_the_device_can_be_recovered() {
    let (mut managed, daemon) = quarantined("dgx-h100", GPU, Left::Silent);
    daemon.stop();
    for nth in 1..=STORES {
        for death in [Death::Before, Death::After] {
            let what = format!("died {death:?} store {nth}");
            let daemon = managed.start().unwrap();
            daemon.ready();
            managed.sim.kernel.calm();
            managed.sim.kernel.die_at(nth, death);
            assert_eq!(run(&daemon, Request::Recover(at(GPU))).state, JobState::RollbackFailed, "{what}");
            daemon.stop();
            managed = managed.restart();
            let daemon = managed.start().unwrap();
            daemon.ready();
            assert_eq!(state(&daemon, GPU), Some(DeviceState::Quarantined), "{what}");
            let job = run(&daemon, Request::Recover(at(GPU)));
            assert_eq!(job.state, JobState::Done, "{what}: {:?}", job.error);
            put_into_quarantine(&managed, &daemon, (GPU, Left::Silent));
            daemon.stop();
        }
    }
}

#[test]
fn p68_wherever_the_daemon_dies_while_clearing_the_device_stays_in_quarantine() {
    let (mut managed, daemon) = quarantined("dgx-h100", GPU, Left::Silent);
    managed.sim.answer_again(GPU).unwrap();
    daemon.stop();
    for death in [Death::Before, Death::After] {
        let daemon = managed.start().unwrap();
        daemon.ready();
        managed.sim.kernel.calm();
        managed.sim.kernel.die_at(1, death);
        assert_eq!(run(&daemon, Request::ClearQuarantine(at(GPU))).state, JobState::RollbackFailed, "it died");
        daemon.stop();
        managed = managed.restart();
    }
    let daemon = managed.start().unwrap();
    daemon.ready();
    assert_eq!(state(&daemon, GPU), Some(DeviceState::Quarantined));
    assert_eq!(run(&daemon, Request::ClearQuarantine(at(GPU))).state, JobState::Done);
}

/// Lets the host's driver refuse the device as often as it is asked, by both ways.
fn refuse_by_driver(managed: &Managed) {
    managed.sim.kernel.calm();
    managed.sim.kernel.fail_on("drivers_probe", Errno::INVAL);
    managed.sim.kernel.fail_on("nvidia/bind", Errno::INVAL);
}

fn in_pool(config: &str) -> (Managed, Daemon) {
    let managed = Managed::new("dgx-h100", config).unwrap();
    let daemon = managed.start().unwrap();
    daemon.ready();
    assert_eq!(daemon.apply(&[assign(at(GPU))]).unwrap().state, JobState::Done);
    managed.sim.kernel.calm();
    (managed, daemon)
}

#[test]
fn p16_a_device_is_reset_before_its_driver_comes() {
    let (managed, daemon) = in_pool(POOL);
    assert_eq!(daemon.apply(&[release(at(GPU))]).unwrap().state, JobState::Done);
    assert_eq!(managed.sim.kernel.stored_names()[..2], ["reset", "driver_override"]);
    assert_eq!(managed.sim.resets(GPU), 1);
}

#[test]
fn p16_a_device_that_does_not_come_back_gets_no_driver() {
    let (managed, daemon) = in_pool(POOL);
    managed.sim.after_reset(GPU, Left::Silent).unwrap();
    assert_eq!(daemon.apply(&[release(at(GPU))]).unwrap().state, JobState::Failed);
    assert_eq!(managed.sim.kernel.stored_names(), ["reset"]);
    assert_eq!((state(&daemon, GPU), driver(&managed, GPU)), (Some(DeviceState::Quarantined), Some("vfio-pci".into())));
}

#[test]
fn p13_a_driver_that_refuses_once_is_asked_again_after_a_reset() {
    let (managed, daemon) = in_pool(POOL);
    // reset, driver_override, unbind, drivers_probe, bind
    managed.sim.kernel.fail_at(4, Errno::INVAL);
    managed.sim.kernel.fail_at(5, Errno::INVAL);
    let job = daemon.apply(&[release(at(GPU))]).unwrap();
    assert_eq!(job.state, JobState::Done, "{:?}", job.error);
    assert_eq!((managed.sim.resets(GPU), driver(&managed, GPU)), (2, Some("nvidia".into())));
}

#[test]
fn p13_a_device_whose_driver_refuses_it_is_found_again_where_that_is_allowed() {
    let (managed, daemon) = in_pool(POOL);
    refuse_by_driver(&managed);
    let job = daemon.apply(&[release(at(GPU))]).unwrap();
    assert_eq!(job.state, JobState::Done, "{:?}", job.error);
    assert_eq!((state(&daemon, GPU), driver(&managed, GPU)), (Some(DeviceState::Host), Some("nvidia".into())));
    let names = managed.sim.kernel.stored_names();
    assert_eq!(names[names.len() - 2..], ["remove", "rescan"]);
    assert!(kinds(&managed, GPU).contains(&Kind::Recovered));
}

#[test]
fn p13_else_it_is_in_quarantine_and_never_quietly_back_in_the_pool() {
    let (managed, daemon) = in_pool(&POOL.replace("remove-rescan = true", ""));
    refuse_by_driver(&managed);
    let job = daemon.apply(&[release(at(GPU))]).unwrap();
    assert_eq!(job.state, JobState::Failed);
    assert_eq!(state(&daemon, GPU), Some(DeviceState::Quarantined));
    assert!(reason(&daemon, GPU).starts_with("its driver does not take it back, also after a reset"), "{}", reason(&daemon, GPU));
    let names = managed.sim.kernel.stored_names();
    assert!(!names.iter().any(|name| name == "remove"), "{names:?}");
    managed.sim.kernel.calm();
    assert_eq!(run(&daemon, Request::ClearQuarantine(at(GPU))).state, JobState::Done);
    assert_eq!(daemon.apply(&[release(at(GPU))]).unwrap().state, JobState::Done, "once its driver is mended");
}
