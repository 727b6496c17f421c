//! Claims that end by themselves, that are adopted, and those whose device has left.

use super::*;

#[test]
fn a_claim_ends_when_its_client_has_left_and_nobody_holds_its_devices() {
    let (managed, daemon) = dgx();
    let id = claim(&daemon, "release = 'client-gone'");
    hold(&managed, &daemon, 4711);
    daemon.engine().client_left("another".into());
    daemon.engine().client_left("client".into());
    let waiting = daemon.until(|view| view.claims[&id].state == ClaimState::Releasing);
    assert!(waiting.claims[&id].reason.starts_with("qemu[4711] holds /dev/vfio/"), "{}", waiting.claims[&id].reason);
    assert_eq!(waiting.devices[&gpu()].state, DeviceState::Releasing);
    assert!(!may_start(&managed, DOMAIN), "a claim that ends is not begun with");
    assert!(managed.sim.kernel.stored().is_empty(), "nothing is done under its guest");
    managed.sim.end_process(4711).unwrap();
    until_free(&daemon);
}

#[test]
fn a_claim_ends_when_its_time_is_over_also_when_that_was_while_the_daemon_was_away() {
    let (managed, daemon) = dgx();
    claim(&daemon, "ttl = 1");
    until_free(&daemon);
    claim(&daemon, "ttl = 1");
    daemon.stop();
    let managed = managed.restart();
    std::thread::sleep(Duration::from_millis(1100));
    let daemon = start(&managed);
    until_free(&daemon);
    assert!(managed.sim.kernel.stored().iter().any(|(path, _)| path.ends_with("reset")));
}

#[test]
fn a_manual_claim_has_no_end_of_its_own() {
    let (_managed, daemon) = dgx();
    let id = claim(&daemon, "");
    daemon.engine().client_left("client".into());
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(view(&daemon, id).state, ClaimState::Active);
}

#[test]
fn a_claim_ends_when_its_domain_ran_and_is_gone() {
    let (managed, daemon, libvirt) = with_libvirt(Managed::new("dgx-h100", POOL).unwrap());
    daemon.apply(&[assign(gpu())]).unwrap();
    let id = claim(&daemon, "release = 'domain-stopped'");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(view(&daemon, id).state, ClaimState::Active, "it has not run yet");
    let domain = start_domain(&libvirt);
    daemon.until(|view| view.devices[&gpu()].state == DeviceState::Running);
    while !managed.ledger().unwrap().claims[&id].terms.as_ref().unwrap().was_running {
        std::thread::sleep(Duration::from_millis(10));
    }
    let refused = end(&daemon, id).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Held, "{refused}");
    domain.destroy().expect("ended");
    until_free(&daemon);
    standin::end_all(managed.sim.root());
}

#[test]
fn a_manual_claim_outlives_its_domain_which_may_start_again() {
    let (managed, daemon, libvirt) = with_libvirt(Managed::new("dgx-h100", POOL).unwrap());
    daemon.apply(&[assign(gpu())]).unwrap();
    let id = claim(&daemon, "");
    for _ in 0..2 {
        let domain = start_domain(&libvirt);
        daemon.until(|view| view.devices[&gpu()].state == DeviceState::Running);
        domain.destroy().expect("ended");
        daemon.until(|view| view.devices[&gpu()].state == DeviceState::Claimed);
        assert!(may_start(&managed, DOMAIN));
    }
    assert_eq!(view(&daemon, id).state, ClaimState::Active);
    standin::end_all(managed.sim.root());
}

#[test]
fn p8_p75_a_daemon_that_starts_anew_adopts_claims_and_stores_nothing() {
    let (managed, daemon) = dgx();
    let ids = [claim(&daemon, "release = 'domain-stopped'")];
    hold(&managed, &daemon, 4711);
    let owned = std::fs::read(managed.files().join("run/owned.json")).unwrap();
    daemon.stop();
    let managed = managed.restart();
    let before = managed.sim.snapshot();
    let daemon = start(&managed);
    let view = daemon.ready();
    assert_eq!(view.claims.keys().copied().collect::<BTreeSet<_>>(), BTreeSet::from(ids));
    assert_eq!(view.devices[&gpu()].state, DeviceState::Claimed);
    std::thread::sleep(Duration::from_millis(300));
    assert!(managed.sim.kernel.stored().is_empty() && managed.sim.snapshot() == before);
    assert_eq!(std::fs::read(managed.files().join("run/owned.json")).unwrap(), owned);
    assert_eq!(managed.ledger().unwrap().claims[&ids[0]].standing, Standing::Active);
}

#[test]
fn p68_p73_a_gpu_that_left_keeps_its_claim_which_can_be_released() {
    let (managed, daemon) = dgx();
    let id = claim(&daemon, "");
    managed.sim.unplug(&gpu().to_string()).unwrap();
    done(&daemon, Request::Rescan);
    let left = view(&daemon, id);
    assert_eq!((left.state, left.reason.as_str()), (ClaimState::Gone, "0000:1b:00.0 left the host"));
    assert_eq!(daemon.view().devices[&gpu()].claim, Some(id));
    assert_eq!(end(&daemon, id).unwrap().state, JobState::Done);
    let view = daemon.view();
    assert!(view.claims.is_empty());
    assert_eq!(view.devices[&gpu()].state, DeviceState::Quarantined, "it is not forgotten");
    let kept = &managed.ledger().unwrap().quarantines[&gpu()];
    assert_eq!(kept.reason, "0000:1b:00.0 has left the host", "and nobody gets it when it is back before somebody has looked");
}

#[test]
fn p68_a_gpu_that_is_back_after_its_claim_was_released_waits_for_a_person() {
    let (mut managed, daemon) = dgx();
    let id = claim(&daemon, "");
    managed.sim.unplug(&gpu().to_string()).unwrap();
    done(&daemon, Request::Rescan);
    end(&daemon, id).unwrap();
    daemon.stop();
    managed.sim = SimHost::build("dgx-h100").unwrap();
    let daemon = start(&managed);
    daemon.until(|view| view.jobs.values().all(|job| job.state.is_over()));
    assert_eq!(daemon.view().devices[&gpu()].state, DeviceState::Quarantined);
    let refused = daemon.submit(request("")).unwrap_err();
    assert!(refused.why.contains(&"0000:1b:00.0 is in quarantine".to_owned()), "{refused}");
    assert!(managed.sim.kernel.stored().is_empty() && !may_start(&managed, DOMAIN));
}
