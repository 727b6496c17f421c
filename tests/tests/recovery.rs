//! What a crash may do to gpuward's own files, and what the next start makes of it.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::PathBuf;

use manager::engine::StartFailed;
use manager::failure::ErrorKind;
use manager::ledger::FORMAT;
use manager::ledger::store::StoreFailed;
use manager::request::Request;
use manager::view::{DeviceState, HostState, JobState, View};
use tests::engine::{Daemon, Managed, assign, release};
use tests::simhost::{Death, Errno};
use vfio::PciAddress;

const POOL: &str = "[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'\n";

fn gpu() -> PciAddress {
    "0000:1b:00.0".parse().unwrap()
}

fn dgx() -> Managed {
    Managed::new("dgx-h100", POOL).unwrap()
}

/// Starts, waits until changes are taken, and gives the GPU's state.
fn start(managed: &Managed) -> (Daemon, DeviceState) {
    let daemon = managed.start().unwrap();
    let state = daemon.ready().devices[&gpu()].state;
    (daemon, state)
}

/// A daemon that died at a store of an assign.
fn died(nth: usize, death: Death) -> Managed {
    let managed = dgx();
    let (daemon, _) = start(&managed);
    managed.sim.kernel.die_at(nth, death);
    daemon.apply(&[assign(gpu())]).unwrap();
    daemon.stop();
    managed.restart()
}

fn journal(managed: &Managed) -> PathBuf {
    let folder = managed.files().join("run/journal");
    fs::read_dir(folder).unwrap().next().unwrap().unwrap().path()
}

#[test]
fn pending_without_a_journal_means_that_nothing_was_changed() {
    let managed = died(1, Death::Before);
    fs::remove_file(journal(&managed)).unwrap();
    let (_daemon, state) = start(&managed);
    assert_eq!(state, DeviceState::Host);
    assert!(managed.ledger().unwrap().devices.is_empty());
    assert!(managed.sim.kernel.stored().is_empty());
}

#[test]
fn a_journal_torn_anywhere_is_mended() {
    let before = dgx().sim.snapshot();
    let managed = died(1, Death::Before);
    let path = journal(&managed);
    let whole = fs::read(&path).unwrap();
    let state_dir = managed.files().join("state/ledger.json");
    let ledger = fs::read(&state_dir).unwrap();
    let mut managed = managed;
    for length in [0, 1, whole.len() / 3, whole.len() / 2, whole.len() - 1, whole.len()] {
        fs::write(&path, &whole[..length]).unwrap();
        fs::write(&state_dir, &ledger).unwrap();
        let (daemon, state) = start(&managed);
        assert_eq!((state, path.exists()), (DeviceState::Host, false), "cut at {length} of {}", whole.len());
        daemon.stop();
        managed = managed.restart();
    }
    let ignore_boot = |tree: std::collections::BTreeMap<PathBuf, String>| {
        tree.into_iter().filter(|(path, _)| !path.ends_with("boot_id")).collect::<Vec<_>>()
    };
    assert_eq!(ignore_boot(managed.sim.snapshot()), ignore_boot(before));
}

#[test]
fn a_journal_that_outlived_its_end_is_looked_at_and_removed() {
    let managed = died(1, Death::Before);
    let path = journal(&managed);
    let (daemon, _) = start(&managed);
    let job = daemon.apply(&[assign(gpu())]).unwrap();
    assert_eq!(job.state, JobState::Done);
    daemon.stop();
    // As if the daemon had died between the ledger's last entry and the journal's removal.
    let header = r#"{"header":{"job":99,"boot":"BOOT","digest":"d","moves":[{"to":"pool","devices":["0000:1b:00.0"]}]}}"#;
    let boot = fs::read_to_string(managed.sim.root().join("proc/sys/kernel/random/boot_id")).unwrap();
    let begin = r#"{"begin":{"knob":"d3cold","device":"0000:1b:00.0","from":true,"to":false}}"#;
    fs::write(&path, format!("{}\n{begin}\n", header.replace("BOOT", boot.trim()))).unwrap();
    let managed = managed.restart();
    let (daemon, state) = start(&managed);
    assert_eq!((state, path.exists()), (DeviceState::Free, false));
    assert!(managed.sim.kernel.stored().is_empty(), "what is as wished is adopted, never stored again");
    daemon.stop();
    // The same, and meanwhile somebody turned the knob: then nobody knows what happened.
    fs::write(&path, format!("{}\n{begin}\n", header.replace("BOOT", boot.trim()))).unwrap();
    managed.sim.set("sys/bus/pci/devices/0000:1b:00.0/d3cold_allowed", "1").unwrap();
    let managed = managed.restart();
    let (daemon, state) = start(&managed);
    assert_eq!(state, DeviceState::Quarantined);
    assert!(path.with_extension("failed.jsonl").exists());
    assert_eq!(daemon.apply(&[release(gpu())]).unwrap_err().kind, ErrorKind::Quarantined);
}

#[test]
fn left_over_files_and_a_lost_owned_json_are_no_harm() {
    let managed = dgx();
    let (daemon, _) = start(&managed);
    daemon.apply(&[assign(gpu())]).unwrap();
    daemon.stop();
    let owned = managed.files().join("run/owned.json");
    let written = fs::read_to_string(&owned).unwrap();
    assert!(written.contains("\"0000:1b:00.0\": \"00000000-0000-0000-0000-000000000000\""), "nobody may use it: {written}");
    fs::remove_file(&owned).unwrap();
    fs::write(managed.files().join("state/.new-half"), "{\"for").unwrap();
    let managed = managed.restart();
    let (_daemon, state) = start(&managed);
    assert_eq!(state, DeviceState::Free);
    assert_eq!(fs::read_to_string(&owned).unwrap(), written);
    assert!(managed.sim.kernel.stored().is_empty(), "P8: a restart changes nothing on a host that is as it should be");
}

#[test]
fn a_ledger_that_cannot_be_used_makes_the_daemon_read_only() {
    let managed = dgx();
    let (daemon, _) = start(&managed);
    daemon.apply(&[assign(gpu())]).unwrap();
    daemon.stop();
    let file = managed.files().join("state/ledger.json");
    let good = fs::read_to_string(&file).unwrap();
    let owned = fs::read(managed.files().join("run/owned.json")).unwrap();
    let mut managed = managed;
    let known = format!("this version knows {}.{}", FORMAT.major, FORMAT.minor);
    let (newer, older) = (FORMAT.major + 1, FORMAT.major - 1);
    let cases = [
        (good[..good.len() / 2].to_owned(), "is damaged".to_owned()),
        (good[..good.len() - 1].to_owned(), "is damaged".into()),
        (String::new(), "is damaged".into()),
        (good.replace("\"next-epoch\": ", "\"next-epoch\": -"), "is damaged".into()),
        (of_format(&good, newer, 0), format!("has format {newer}.0, {known}")),
        (of_format(&good, older, 0), format!("has format {older}.0, {known}")),
        (of_format(&good, FORMAT.major, FORMAT.minor + 2), format!("has format {}.{}, {known}", FORMAT.major, FORMAT.minor + 2)),
    ];
    for (text, reason) in cases {
        fs::write(&file, &text).unwrap();
        managed = managed.restart();
        let daemon = managed.start().unwrap();
        let view = daemon.until(|view| view.host_state != HostState::Recovering);
        let HostState::Degraded { reason: told } = &view.host_state else { panic!("{:?}", view.host_state) };
        assert!(told.contains("ledger.json") && told.contains(&reason), "{told}");
        assert!(view.inventory.devices.contains_key(&gpu()), "reads are answered");
        let refused = daemon.apply(&[release(gpu())]).unwrap_err();
        assert_eq!(refused.kind, ErrorKind::HostNotReady);
        daemon.stop();
        assert_eq!(fs::read_to_string(&file).unwrap(), text, "nothing was stored");
        assert_eq!(fs::read(managed.files().join("run/owned.json")).unwrap(), owned, "the last owned.json stays in force");
        assert!(managed.sim.kernel.stored().is_empty());
    }
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    managed = managed.restart();
    let daemon = managed.start().unwrap();
    let view = daemon.until(|view| view.host_state != HostState::Recovering);
    let HostState::Degraded { reason } = &view.host_state else { panic!("{:?}", view.host_state) };
    assert!(reason.starts_with("cannot read ") && reason.contains("ledger.json"), "{reason}");
    daemon.stop();
    assert_eq!(fs::read(managed.files().join("run/owned.json")).unwrap(), owned);
}

/// The ledger as a version with another format would have written it.
fn of_format(ledger: &str, major: u32, minor: u32) -> String {
    let mut ledger: serde_json::Value = serde_json::from_str(ledger).unwrap();
    ledger["format"] = serde_json::json!({ "major": major, "minor": minor });
    ledger["of-a-later-version"] = true.into();
    ledger.to_string()
}

#[test]
fn a_ledger_of_the_next_minor_format_is_read_and_written_in_ones_own() {
    let managed = dgx();
    let (daemon, _) = start(&managed);
    daemon.apply(&[assign(gpu())]).unwrap();
    daemon.stop();
    let file = managed.files().join("state/ledger.json");
    let good = fs::read_to_string(&file).unwrap();
    fs::write(&file, of_format(&good, FORMAT.major, FORMAT.minor + 1)).unwrap();
    let managed = managed.restart();
    let (daemon, state) = start(&managed);
    assert_eq!(state, DeviceState::Free);
    assert_eq!(daemon.apply(&[release(gpu())]).unwrap().state, JobState::Done);
    let written = fs::read_to_string(&file).unwrap();
    assert!(!written.contains("of-a-later-version"));
    assert_eq!(managed.ledger().unwrap().format, FORMAT);
}

#[test]
fn a_configuration_with_a_typo_stops_changes_and_not_the_daemon() {
    let managed = dgx();
    managed.configure("[[devices]]\nmatch = { knd = 'gpu' }\nuse = 'pool'").unwrap();
    let daemon = managed.start().unwrap();
    let view = daemon.until(|view| view.host_state != HostState::Recovering);
    let HostState::Degraded { reason } = &view.host_state else { panic!("{:?}", view.host_state) };
    assert!(reason.contains("gpuward.toml:3: devices[0].match.knd is not known"), "{reason}");
    managed.configure(POOL).unwrap();
    daemon.engine().reload();
    daemon.ready();
    assert_eq!(daemon.apply(&[assign(gpu())]).unwrap().state, JobState::Done);
}

#[test]
fn a_second_daemon_is_refused_clearly() {
    let managed = dgx();
    let _first = start(&managed);
    match managed.start() {
        Err(StartFailed::Lock(error @ StoreFailed::Locked { .. })) => {
            assert!(error.to_string().starts_with("another gpuwardd runs here"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn p66_after_a_reboot_the_pool_is_what_it_was() {
    let managed = dgx();
    let (daemon, _) = start(&managed);
    daemon.apply(&[assign(gpu())]).unwrap();
    daemon.stop();
    let managed = managed.reboot(gpu()).unwrap();
    let daemon = managed.start().unwrap();
    let restored = |view: &View| view.jobs.values().any(|job| job.kind == "restore" && job.state == JobState::Done);
    assert_eq!(daemon.until(restored).devices[&gpu()].state, DeviceState::Free);
    assert_eq!(daemon.apply(&[release(gpu())]).unwrap().state, JobState::Done);
    let driver = fs::read_link(managed.sim.root().join("sys/bus/pci/devices/0000:1b:00.0/driver")).unwrap();
    assert!(driver.ends_with("nvidia"));
}

#[test]
fn p42_the_unit_at_boot_takes_the_pool_again_and_ends() {
    let managed = dgx();
    let (daemon, _) = start(&managed);
    daemon.apply(&[assign(gpu())]).unwrap();
    daemon.stop();
    let managed = managed.reboot(gpu()).unwrap();
    manager::restore::run(managed.options()).unwrap();
    let stores = managed.sim.kernel.stored().len();
    assert!(stores > 0);
    let (daemon, state) = start(&managed);
    assert_eq!((state, managed.sim.kernel.stored().len()), (DeviceState::Free, stores), "nothing is left for the daemon");
    daemon.stop();
    let managed = managed.reboot(gpu()).unwrap();
    managed.sim.kernel.fail_on("driver/unbind", Errno::IO);
    let failed = manager::restore::run(managed.options()).unwrap_err();
    assert_eq!(failed.to_string(), "1 of 1 devices are not as they were before the boot");
}

#[test]
fn a_reboot_forgets_what_was_half_done() {
    let managed = died(4, Death::After);
    let managed = managed.reboot(gpu()).unwrap();
    let (_daemon, state) = start(&managed);
    assert_eq!(state, DeviceState::Host);
    assert!(managed.sim.kernel.stored().is_empty(), "nothing is undone that is not there any more");
}

#[test]
fn a_roll_back_that_fails_ends_in_quarantine_until_a_person_clears_it() {
    let managed = dgx();
    let (daemon, _) = start(&managed);
    managed.sim.kernel.fail_from(3, Errno::IO);
    let job = daemon.apply(&[assign(gpu())]).unwrap();
    assert_eq!(job.state, JobState::RollbackFailed);
    assert_eq!(daemon.view().devices[&gpu()].state, DeviceState::Quarantined);
    let kept: Vec<_> = fs::read_dir(managed.files().join("run/journal")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(kept.len() == 1 && kept[0].to_string_lossy().ends_with(".failed.jsonl"), "{kept:?}");
    daemon.stop();
    let managed = managed.restart();
    let (daemon, state) = start(&managed);
    assert_eq!(state, DeviceState::Quarantined, "a restart does not forget it");
    assert!(managed.sim.kernel.stored().is_empty());
    let clear = daemon.submit(Request::ClearQuarantine(gpu())).unwrap();
    assert_eq!(daemon.finish(clear).state, JobState::Done);
    let again = daemon.submit(Request::ClearQuarantine(gpu())).unwrap_err();
    assert_eq!(again.message, "0000:1b:00.0 is not in quarantine");
    assert_eq!(daemon.apply(&[assign(gpu())]).unwrap().state, JobState::Done);
}

#[test]
fn what_libvirts_hook_cannot_be_told_is_not_decided() {
    let managed = dgx();
    let (daemon, _) = start(&managed);
    let owned = managed.files().join("run/owned.json");
    fs::remove_file(&owned).unwrap();
    fs::create_dir_all(owned.join("in the way")).unwrap();
    let refused = daemon.apply(&[assign(gpu())]).unwrap_err();
    assert!(refused.message.ends_with("owned.json"), "{refused}");
    assert!(managed.ledger().unwrap().devices.is_empty() && managed.sim.kernel.stored().is_empty());
    fs::remove_dir_all(&owned).unwrap();
    assert_eq!(daemon.apply(&[assign(gpu())]).unwrap().state, JobState::Done);
}

#[test]
fn a_ledger_that_cannot_be_written_stops_a_job_before_it_touches_anything() {
    let managed = dgx();
    let (daemon, _) = start(&managed);
    let (state, aside) = (managed.files().join("state"), managed.files().join("aside"));
    fs::rename(&state, &aside).unwrap();
    fs::write(&state, "").unwrap();
    let refused = daemon.apply(&[assign(gpu())]).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Internal);
    assert!(managed.sim.kernel.stored().is_empty());
    fs::remove_file(&state).unwrap();
    fs::rename(&aside, &state).unwrap();
    assert_eq!(daemon.apply(&[assign(gpu())]).unwrap().state, JobState::Done);
}

#[test]
fn journals_that_cannot_be_read_keep_the_daemon_read_only() {
    let managed = died(4, Death::After);
    let folder = managed.files().join("run/journal");
    let aside = managed.files().join("aside");
    fs::rename(&folder, &aside).unwrap();
    fs::write(&folder, "").unwrap();
    let daemon = managed.start().unwrap();
    let view = daemon.until(|view| view.host_state != HostState::Recovering);
    let HostState::Degraded { reason } = &view.host_state else { panic!("{:?}", view.host_state) };
    assert!(reason.contains("journal"), "{reason}");
    assert!(managed.sim.kernel.stored().is_empty());
    daemon.stop();
    fs::remove_file(&folder).unwrap();
    fs::rename(&aside, &folder).unwrap();
    let managed = managed.restart();
    assert_eq!(start(&managed).1, DeviceState::Host);
}
