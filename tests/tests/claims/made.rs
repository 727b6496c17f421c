//! Making a claim, and ending it when that is asked for.

use super::*;

#[test]
fn exactly_the_domain_that_was_named_may_start_with_a_claimed_gpu() {
    let (managed, daemon) = dgx();
    assert!(!may_start(&managed, DOMAIN), "in the pool it is nobody's");
    let id = claim(&daemon, "");
    let made = view(&daemon, id);
    assert_eq!((made.state, made.release_on, made.machine, made.domain.to_string().as_str()), (ClaimState::Active, "manual", None, DOMAIN));
    assert_eq!((made.devices.as_slice(), made.isolation_level, made.expires), ([gpu()].as_slice(), "whole-gpu", 0));
    assert_eq!(daemon.view().devices[&gpu()].state, DeviceState::Claimed);
    assert!(may_start(&managed, DOMAIN) && !may_start(&managed, OTHER_DOMAIN));
    assert!(managed.sim.kernel.stored().is_empty(), "what is in the pool is ready");

    assert_eq!(end(&daemon, id).unwrap().state, JobState::Done);
    assert!(!may_start(&managed, DOMAIN));
    until_free(&daemon);
    let stored = managed.sim.kernel.stored();
    assert!(stored.len() == 1 && stored[0].0.ends_with("reset"), "{stored:?}");
    let told: Vec<_> = daemon.events().iter().map(|event| event.kind).collect();
    assert_eq!(told, [EventKind::ClaimMade, EventKind::Sanitised, EventKind::ClaimReleased]);
}

#[test]
fn p41_a_late_release_never_clears_the_next_owners_device() {
    let (managed, daemon) = dgx();
    let first = claim(&daemon, "");
    let old = view(&daemon, first).epoch;
    end(&daemon, first).unwrap();
    let second = claim(&daemon, "");
    managed.sim.kernel.calm();
    let late = daemon.submit(Request::ReleaseClaim { claim: second, epoch: old }).unwrap_err();
    assert_eq!(late.kind, ErrorKind::Conflict);
    assert_eq!(
        late.message,
        format!("claim {second} has epoch {}, not {old}: it is another one than you know", view(&daemon, second).epoch)
    );
    let gone = daemon.submit(Request::ReleaseClaim { claim: first, epoch: old }).unwrap_err();
    assert_eq!((gone.kind, gone.message), (ErrorKind::Conflict, format!("there is no claim {first} any more")));
    assert!(managed.sim.kernel.stored().is_empty() && may_start(&managed, DOMAIN), "nothing was cleared");
}

#[test]
fn a_claim_whose_devices_are_held_is_not_released_and_says_by_whom() {
    let (managed, daemon) = dgx();
    let id = claim(&daemon, "");
    hold(&managed, &daemon, 4711);
    let refused = end(&daemon, id).unwrap_err();
    assert_eq!((refused.kind, refused.message.as_str()), (ErrorKind::Held, "0000:1b:00.0 is held by qemu[4711]"));
    assert_eq!(view(&daemon, id).state, ClaimState::Active);
    managed.sim.end_process(4711).unwrap();
    assert_eq!(end(&daemon, id).unwrap().state, JobState::Done);
    until_free(&daemon);
}

#[test]
fn a_claim_on_a_device_that_somebody_holds_already_is_withdrawn() {
    let (managed, daemon) = dgx();
    hold(&managed, &daemon, 4711);
    let job = daemon.finish(daemon.submit(request("")).unwrap());
    assert_eq!((job.state, job.error.unwrap().kind), (JobState::Failed, ErrorKind::Held));
    until_free(&daemon);
    assert!(!may_start(&managed, DOMAIN));
}

#[test]
fn p69_a_gpu_without_its_node_is_not_handed_out() {
    let (managed, daemon) = dgx();
    let function = daemon.view().inventory.devices[&gpu()].clone();
    let node = function.vfio_group_node().unwrap();
    std::fs::remove_file(managed.sim.root().join(&node)).unwrap();
    std::fs::remove_dir_all(managed.sim.root().join("dev/vfio/devices")).unwrap();
    let error = daemon.finish(daemon.submit(request("")).unwrap()).error.unwrap();
    assert_eq!(error.kind, ErrorKind::PreflightFailed);
    assert!(error.message.starts_with(&format!("0000:1b:00.0 has no VFIO node: /{node} and /dev/vfio/devices/vfio")), "{error}");
    until_free(&daemon);
}

#[test]
fn of_many_who_ask_at_once_for_one_bundle_exactly_one_gets_it() {
    let (managed, daemon) = dgx();
    let text = |index: usize| {
        format!("domain-uuid = '6b2f5c1e-2f6a-4d55-9f0e-{index:012x}'\ndevices = [{{ kind = 'gpu', identity = '{}' }}]", gpu())
    };
    let ask = |index: usize| {
        let spec = ClaimSpec::parse(Node::from_toml(&text(index)).unwrap()).unwrap();
        let request = Request::Claim { tenant: TenantId::BUILT_IN, spec, client: String::new() };
        // A user of its own each: nobody may have more than sixteen jobs.
        let uid = u32::try_from(index).unwrap();
        let job = daemon.submit_as(Submission { request, uid, request_id: String::new(), if_generation: None })?;
        let ended = daemon.finish(job);
        ended.error.map_or(Ok(ended.claims), Err)
    };
    let answers: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=32).map(|index| scope.spawn(move || ask(index))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let won: Vec<_> = answers.iter().filter_map(|answer| answer.as_ref().ok()).collect();
    assert_eq!(won.len(), 1, "{answers:?}");
    for lost in answers.iter().filter_map(|answer| answer.as_ref().err()) {
        assert!(matches!(lost.kind, ErrorKind::AlreadyClaimed | ErrorKind::NoFit | ErrorKind::Busy), "{lost}");
    }
    let ledger = managed.ledger().unwrap();
    assert_eq!(ledger.claims.keys().copied().collect::<Vec<_>>(), *won[0]);
}

#[test]
fn a_request_that_is_asked_again_is_the_same_claim() {
    let (managed, daemon) = dgx();
    let named = |client: &str, more: &str| Submission {
        request: Request::Claim { tenant: TenantId::BUILT_IN, spec: spec(more), client: client.into() },
        uid: 0,
        request_id: "nova-7".into(),
        if_generation: None,
    };
    let job = daemon.submit_as(named(":1.7", "")).unwrap();
    let made = daemon.finish(job).claims;
    assert_eq!(daemon.submit_as(named(":1.9", "")).unwrap(), job, "from another connection too");
    assert_eq!(daemon.submit_as(named(":1.7", "ttl = 5")).unwrap_err().kind, ErrorKind::Conflict);
    daemon.stop();
    let managed = managed.restart();
    let daemon = start(&managed);
    assert_eq!(daemon.submit_as(named(":1.7", "")).unwrap(), job, "and from another start of the daemon");
    assert_eq!(daemon.view().claims.keys().copied().collect::<Vec<_>>(), made);
}

#[test]
fn what_speaks_against_a_claim_is_said_by_name() {
    let (managed, daemon) = dgx();
    let id = claim(&daemon, "");
    let taken = daemon.submit(request("")).unwrap_err();
    assert_eq!((taken.kind, taken.message.as_str()), (ErrorKind::NoFit, "devices[0] wishes for 1 GPU; 0 are free"));
    assert!(taken.why.contains(&format!("0000:1b:00.0 belongs to claim {id}")), "{taken}");
    let refused = daemon.apply(&[release(gpu())]).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::AlreadyClaimed);
    assert!(managed.sim.kernel.stored().is_empty());
}

#[test]
fn a_machines_claim_is_its_own_and_so_is_its_domain() {
    let (managed, daemon, _libvirt) = with_libvirt(Managed::new("dgx-h100", POOL).unwrap());
    daemon.apply(&[assign(gpu()), assign("0000:43:00.0".parse().unwrap())]).unwrap();
    let machine = running_machine(&daemon, "running");
    let id = *daemon.view().claims.keys().next().unwrap();
    assert_eq!((view(&daemon, id).release_on, view(&daemon, id).domain), ("machine", machine.0));
    let refused = end(&daemon, id).unwrap_err();
    assert_eq!((refused.kind, refused.message), (ErrorKind::Conflict, format!("claim {id} is that of machine train-1")));
    let others = ClaimSpec { domain: machine.0, ..spec("") };
    let refused = daemon.submit(Request::Claim { tenant: TenantId::BUILT_IN, spec: others, client: String::new() }).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Conflict);
    assert!(refused.message.ends_with("is gpuward's machine train-1, which claims its devices itself"), "{refused}");
    standin::end_all(managed.sim.root());
}

#[test]
fn p30_p35_a_device_is_awake_and_has_come_back_before_it_is_handed_out() {
    let (managed, daemon) = dgx();
    let knob = |name: &str| format!("sys/bus/pci/devices/{}/{name}", gpu());
    managed.sim.set(knob("power/control"), "auto").unwrap();
    managed.sim.set(knob("power_state"), "D3hot").unwrap();
    let id = claim(&daemon, "");
    assert_eq!(managed.sim.host().read(knob("power_state")).unwrap().as_deref(), Some("D0"));
    assert_eq!(end(&daemon, id).unwrap().state, JobState::Done);
    managed.sim.set(knob("power_state"), "D3cold").unwrap();
    let job = daemon.finish(daemon.submit(request("")).unwrap());
    let failure = job.error.unwrap();
    assert_eq!((job.state, failure.kind), (JobState::Failed, ErrorKind::PreflightFailed));
    assert!(failure.message.ends_with("does not wake: it is in D3cold"), "{failure}");
}
