//! Claims of managers that run their own domains: made, used, ended in each way, and never anybody else's.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use manager::engine::Options;
use manager::engine::machines::{self, Hypervisor};
use manager::failure::{ErrorKind, Failure};
use manager::history::Page;
use manager::hook::{Call, check};
use manager::id::{ClaimId, MachineId};
use manager::ledger::{ReleaseOn, Standing};
use manager::libvirt::Source;
use manager::request::{Request, Submission};
use manager::spec::{ClaimSpec, MachineSpec, Node};
use manager::view::{ClaimState, ClaimView, DeviceState, EventKind, JobState, JobView, MachineState};
use tests::engine::{Daemon, Managed, assign, release};
use tests::simhost::Errno;
use tests::standin;
use uuid::Uuid;
use vfio::PciAddress;
use virt::connect::Connect;
use virt::domain::Domain;

const POOL: &str = "[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'\n";
const DOMAIN: &str = "6b2f5c1e-2f6a-4d55-9f0e-5c7f3f3f0001";
const OTHER_DOMAIN: &str = "6b2f5c1e-2f6a-4d55-9f0e-5c7f3f3f0002";

fn gpu() -> PciAddress {
    "0000:1b:00.0".parse().unwrap()
}

fn dgx() -> (Managed, Daemon) {
    with(Managed::new("dgx-h100", POOL).unwrap())
}

/// The host with its first GPU in the pool.
fn with(managed: Managed) -> (Managed, Daemon) {
    let daemon = start(&managed);
    assert_eq!(daemon.apply(&[assign(gpu())]).unwrap().state, JobState::Done);
    managed.sim.kernel.calm();
    (managed, daemon)
}

fn start(managed: &Managed) -> Daemon {
    let daemon = managed.start().unwrap();
    daemon.ready();
    daemon
}

fn spec(more: &str) -> ClaimSpec {
    let text = format!("domain-uuid = '{DOMAIN}'\ndevices = [{{ kind = 'gpu' }}]\n{more}");
    ClaimSpec::parse(Node::from_toml(&text).unwrap()).unwrap()
}

fn request(more: &str) -> Request {
    Request::Claim { spec: spec(more), client: "client".into() }
}

fn done(daemon: &Daemon, request: Request) -> JobView {
    let job = daemon.finish(daemon.submit(request).unwrap_or_else(|failure| panic!("{failure}")));
    assert_eq!((job.state, job.error.as_ref()), (JobState::Done, None));
    job
}

/// Makes a claim and gives its id.
fn claim(daemon: &Daemon, more: &str) -> ClaimId {
    done(daemon, request(more)).claims[0]
}

fn view(daemon: &Daemon, claim: ClaimId) -> ClaimView {
    daemon.view().claims[&claim].clone()
}

fn end(daemon: &Daemon, claim: ClaimId) -> Result<JobView, Failure> {
    let epoch = view(daemon, claim).epoch;
    Ok(daemon.finish(daemon.submit(Request::ReleaseClaim { claim, epoch })?))
}

fn until_free(daemon: &Daemon) {
    daemon.until(|view| {
        let is_over = view.jobs.values().all(|job| job.state.is_over());
        is_over && view.claims.is_empty() && view.devices[&gpu()].state == DeviceState::Free
    });
}

/// A process of a guest that has the GPU open.
fn hold(managed: &Managed, daemon: &Daemon, pid: u32) {
    let node = daemon.view().inventory.devices[&gpu()].vfio_group_node().unwrap();
    managed.sim.hold(pid, "qemu", &format!("/{node}")).unwrap();
}

/// What libvirt's hook answers to a domain that would start with the GPU.
fn may_start(managed: &Managed, domain: &str) -> bool {
    let (bus, device, function) = (gpu().bus(), gpu().device(), gpu().function());
    let xml = format!(
        "<domain><name>nova-7</name><uuid>{domain}</uuid><devices><hostdev mode='subsystem' type='pci'>\
         <source><address domain='0' bus='{bus}' slot='{device}' function='{function}'/></source></hostdev></devices></domain>"
    );
    let call = Call { domain: "nova-7", operation: "prepare", suboperation: "begin" };
    check(call, &mut xml.as_bytes(), &managed.files().join("run/owned.json")).is_ok()
}

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
        let request = Request::Claim { spec, client: String::new() };
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
        request: Request::Claim { spec: spec(more), client: client.into() },
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

/// The same with libvirt's test driver.
fn with_libvirt(managed: Managed) -> (Managed, Daemon, Connect) {
    let libvirt = standin::open(managed.sim.root(), Path::new(env!("CARGO_BIN_EXE_gpuward-sim"))).expect("opened");
    let hypervisor = Hypervisor::At(Source::Open(libvirt.clone()));
    let options = Options { machines: machines::Options { hypervisor }, ..managed.options() };
    let daemon = Daemon::start(options).unwrap();
    daemon.ready();
    (managed, daemon, libvirt)
}

fn start_domain(libvirt: &Connect) -> Domain {
    let xml = format!(
        "<domain type='test'><name>nova-7</name><uuid>{DOMAIN}</uuid><memory unit='MiB'>64</memory><os><type>hvm</type></os><devices>\
         <hostdev mode='subsystem' type='pci'><source><address domain='0' bus='{}' slot='{}' function='{}'/></source></hostdev></devices></domain>",
        gpu().bus(),
        gpu().device(),
        gpu().function()
    );
    libvirt.create_domain_xml(&xml, 0).expect("created")
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
fn the_words_of_the_ledger_are_those_of_the_bus() {
    for release in [ReleaseOn::Manual, ReleaseOn::DomainStopped, ReleaseOn::ClientGone] {
        assert_eq!(serde_json::to_value(release).unwrap(), release.word());
    }
    assert_eq!(spec("").domain, DOMAIN.parse::<Uuid>().unwrap());
}

/// The driver and the override of the GPU.
fn driver(managed: &Managed) -> String {
    vfio::Binding::read(&managed.sim.host(), gpu()).unwrap().unwrap().driver.unwrap_or_default()
}

#[test]
fn p66_after_a_reboot_a_claim_stays_and_its_gpu_is_bound_again_before_libvirt_starts() {
    let (managed, daemon) = dgx();
    let id = claim(&daemon, "");
    let before = view(&daemon, id);
    daemon.stop();
    let managed = managed.reboot(gpu()).unwrap();
    assert_eq!(driver(&managed), "nvidia");
    manager::restore::run(managed.options()).unwrap();
    assert_eq!(driver(&managed), "vfio-pci");
    assert!(may_start(&managed, DOMAIN) && !may_start(&managed, OTHER_DOMAIN));
    let stores = managed.sim.kernel.stored().len();
    let daemon = start(&managed);
    assert_eq!(view(&daemon, id), before, "with the epoch that its manager knows");
    assert_eq!(managed.sim.kernel.stored().len(), stores, "nothing is left for the daemon");
    assert_eq!(daemon.view().devices[&gpu()].state, DeviceState::Claimed);
    end(&daemon, id).unwrap();
    until_free(&daemon);
}

#[test]
fn p66_a_claim_whose_gpu_cannot_be_bound_again_stays_and_the_next_start_tries_once_more() {
    let (managed, daemon) = dgx();
    let id = claim(&daemon, "");
    daemon.stop();
    let managed = managed.reboot(gpu()).unwrap();
    managed.sim.kernel.fail_on("driver/unbind", Errno::IO);
    let daemon = start(&managed);
    daemon.until(|view| view.jobs.values().any(|job| job.kind == "claim-restore" && job.state == JobState::Failed));
    assert_eq!((view(&daemon, id).state, daemon.view().devices[&gpu()].state), (ClaimState::Active, DeviceState::Drifted));
    daemon.stop();
    let managed = managed.restart();
    let daemon = start(&managed);
    daemon.until(|view| view.devices[&gpu()].state == DeviceState::Claimed);
    assert_eq!(driver(&managed), "vfio-pci");
}

#[test]
fn a_claim_that_ends_by_itself_ends_after_a_reboot_and_its_gpu_is_reset_before_it_is_free() {
    let (managed, daemon) = dgx();
    claim(&daemon, "ttl = 1");
    daemon.stop();
    let managed = managed.reboot(gpu()).unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    let daemon = start(&managed);
    until_free(&daemon);
    bound_then_reset(&managed);
}

/// What was stored binds the GPU to its VFIO driver and resets it there.
fn bound_then_reset(managed: &Managed) {
    let stored = managed.sim.kernel.stored();
    let place = |end: &str| stored.iter().position(|(path, _)| path.ends_with(end)).unwrap_or_else(|| panic!("no {end} in {stored:?}"));
    assert!(place("drivers_probe") < place("reset"), "{stored:?}");
}

/// A machine that runs with the GPU.
fn running_machine(daemon: &Daemon, hold: &str) -> MachineId {
    let text = format!(
        "format = 1\nname = 'train-1'\nvcpus = 1\nmemory = '1GiB'\nhold = '{hold}'\n[[disk]]\nvolume = 'tank/a'\n[[device]]\nkind = 'gpu'\nidentity = '{}'\n",
        gpu()
    );
    let spec = MachineSpec::parse(Node::from_toml(&text).unwrap()).unwrap();
    let machine = MachineId(spec.uuid);
    done(daemon, Request::CreateMachine { spec: Box::new(spec) });
    done(daemon, Request::StartMachine(machine));
    machine
}

/// A machine runs, and the host loses power.
fn cut_off(hold: &str, on_demand: bool) -> (Managed, MachineId) {
    let managed = Managed::new("dgx-h100", &if on_demand { POOL.replace("pool", "on-demand") } else { POOL.into() }).unwrap();
    let (managed, daemon, _libvirt) = with_libvirt(managed);
    if !on_demand {
        daemon.apply(&[assign(gpu())]).unwrap();
    }
    let machine = running_machine(&daemon, hold);
    daemon.stop();
    standin::end_all(managed.sim.root());
    (managed.reboot(gpu()).unwrap(), machine)
}

#[test]
fn a_machine_that_the_host_took_down_with_it_is_closed_unclean_and_its_gpu_reset_before_it_is_free() {
    let (managed, machine) = cut_off("running", false);
    manager::restore::run(managed.options()).unwrap();
    bound_then_reset(&managed);
    let ledger = managed.ledger().unwrap();
    assert!(ledger.claims.is_empty() && ledger.quarantines.is_empty());
    let record = &ledger.machines[&machine];
    assert_eq!((record.state, record.reason.as_str()), (MachineState::Off, "the host was restarted while it ran"));
    let identity = managed.start().unwrap().ready().inventory.devices[&gpu()].identity.clone();
    let history = manager::history::read(&managed.files().join("state"), &identity, Page { limit: 100, before: None }).unwrap();
    let closed = history.iter().filter_map(|entry| entry.details.get("closed")).collect::<Vec<_>>();
    assert_eq!(closed, ["unclean"]);
}

#[test]
fn while_the_host_shuts_down_nothing_is_stored_and_claims_stay_for_the_next_boot() {
    let (managed, daemon, libvirt) = with_libvirt(Managed::new("dgx-h100", POOL).unwrap());
    daemon.apply(&[assign(gpu()), assign("0000:43:00.0".parse().unwrap())]).unwrap();
    let machine = running_machine(&daemon, "running");
    claim(&daemon, "release = 'domain-stopped'\nttl = 1");
    managed.sim.kernel.calm();
    daemon.engine().host_stops(true);
    // As libvirt-guests does.
    for domain in libvirt.list_all_domains(virt::sys::VIR_CONNECT_LIST_DOMAINS_ACTIVE).unwrap() {
        domain.destroy().unwrap();
    }
    std::thread::sleep(Duration::from_millis(1500));
    assert!(managed.sim.kernel.stored().is_empty(), "{:?}", managed.sim.kernel.stored());
    assert_eq!(daemon.view().claims.len(), 2);
    assert_eq!(daemon.submit(request("")).unwrap_err().message, "the host shuts down");
    // Somebody thought better of it.
    daemon.engine().host_stops(false);
    daemon.until(|view| view.machines[&machine].state == MachineState::Off && view.claims.is_empty());
    assert_eq!(managed.sim.kernel.stored().iter().filter(|(path, _)| path.ends_with("reset")).count(), 2);
    standin::end_all(managed.sim.root());
}

#[test]
fn a_gpu_that_cannot_be_reset_after_the_host_took_its_machine_down_is_in_quarantine() {
    let (managed, _) = cut_off("running", false);
    managed.sim.kernel.fail_on("reset", Errno::IO);
    let daemon = start(&managed);
    daemon.until(|view| view.devices[&gpu()].state == DeviceState::Quarantined);
    assert!(daemon.view().claims.is_empty());
}

#[test]
fn a_gpu_on_demand_of_a_machine_that_the_host_took_down_is_the_hosts_again() {
    let (managed, machine) = cut_off("running", true);
    let daemon = start(&managed);
    daemon.until(|view| view.machines[&machine].state == MachineState::Off && view.devices[&gpu()].state == DeviceState::Host);
    assert!(managed.sim.kernel.stored().iter().all(|(path, _)| !path.ends_with("bind")), "it is with its own driver already");
}

#[test]
fn a_machine_that_holds_its_gpu_while_it_is_defined_has_it_again_after_a_reboot() {
    let (managed, machine) = cut_off("defined", false);
    let daemon = start(&managed);
    daemon.until(|view| view.machines[&machine].state == MachineState::Off && view.devices[&gpu()].state == DeviceState::Claimed);
    assert_eq!((driver(&managed).as_str(), daemon.view().claims.len()), ("vfio-pci", 1));
}

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
    let named = Request::Claim { spec: spec(""), client: String::new() };
    let Request::Claim { mut spec, client } = named else { return };
    spec.devices[0].identity = Some(gpu().to_string());
    let refused = daemon.submit(Request::Claim { spec, client }).unwrap_err();
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
