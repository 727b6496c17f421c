//! Bundles of another manager.

use super::*;

const LENT: &str = "[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'lend'\nto = 'nova'\n";

#[test]
fn what_is_lent_is_bound_for_its_owner_and_never_placed_claimed_or_given_back_while_held() {
    let (managed, daemon) = with(Managed::new("dgx-h100", LENT).unwrap());
    let lent = daemon.view().devices[&gpu()].clone();
    assert_eq!((lent.state, lent.reason.as_str()), (DeviceState::Lent, "to nova"));
    assert!(may_start(&managed, DOMAIN) && may_start(&managed, OTHER_DOMAIN), "its owner says which domains use it");
    let refused = daemon.submit(request("")).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::NoFit);
    assert!(refused.why.contains(&"0000:1b:00.0 is lent to nova".to_owned()), "{refused}");
    let named = Request::Claim { tenant: TenantId::BUILT_IN, spec: spec(""), client: String::new() };
    let Request::Claim { mut spec, client, tenant } = named else { return };
    spec.devices[0].identity = Some(gpu().to_string());
    let refused = daemon.submit(Request::Claim { tenant, spec, client }).unwrap_err();
    assert_eq!((refused.kind, refused.message.as_str()), (ErrorKind::NotSupported, "0000:1b:00.0 is lent to nova"));
    hold(&managed, &daemon, 4711);
    assert_eq!(daemon.apply(&[release(gpu())]).unwrap_err().kind, ErrorKind::Held);
    assert!(managed.sim.kernel.stored().is_empty());
    managed.sim.end_process(4711).unwrap();
    assert_eq!(daemon.apply(&[release(gpu())]).unwrap().state, JobState::Done);
    assert_eq!(daemon.view().devices[&gpu()].state, DeviceState::Host);
}

#[test]
fn what_was_lent_goes_to_the_host_before_anybody_else_gets_it() {
    let (managed, daemon) = with(Managed::new("dgx-h100", LENT).unwrap());
    managed.configure(POOL).unwrap();
    daemon.engine().reload();
    let lent = daemon.until(|view| view.devices[&gpu()].use_.word() == "pool").devices[&gpu()].clone();
    assert_eq!(lent.state, DeviceState::Lent);
    let refused = daemon.submit(request("")).unwrap_err();
    assert!(refused.why.contains(&"0000:1b:00.0 was taken for another manager, who may have used it".to_owned()), "{refused}");
    assert_eq!(daemon.apply(&[assign(gpu())]).unwrap_err().kind, ErrorKind::Conflict);
    assert_eq!(daemon.apply(&[release(gpu())]).unwrap().state, JobState::Done);
    assert_eq!(daemon.apply(&[assign(gpu())]).unwrap().state, JobState::Done);
    assert!(!may_start(&managed, DOMAIN));
    claim(&daemon, "");
}

#[test]
fn p66_what_is_lent_is_bound_again_at_boot() {
    let (managed, daemon) = with(Managed::new("dgx-h100", LENT).unwrap());
    daemon.stop();
    let managed = managed.reboot(gpu()).unwrap();
    manager::restore::run(managed.options()).unwrap();
    let daemon = start(&managed);
    assert_eq!(daemon.view().devices[&gpu()].state, DeviceState::Lent);
    assert!(managed.sim.kernel.stored().iter().all(|(path, _)| !path.ends_with("reset")), "never reset");
    assert!(may_start(&managed, DOMAIN));
}
