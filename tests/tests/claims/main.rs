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
use manager::id::{ClaimId, MachineId, TenantId};
use manager::ledger::{ReleaseOn, Standing};
use manager::request::{Goal, Request, Submission};
use manager::spec::{ClaimSpec, MachineSpec, Node};
use manager::view::{ClaimState, ClaimView, DeviceState, EventKind, JobState, JobView, MachineState};
use tests::engine::{Daemon, Managed, assign, release};
use tests::simhost::{Errno, SimHost};
use tests::standin;
use uuid::Uuid;
use vfio::PciAddress;
use virt::connect::Connect;
use virt::domain::Domain;

mod boot;
mod ends;
mod lent;
mod made;

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
    Request::Claim { tenant: TenantId::BUILT_IN, spec: spec(more), client: "client".into() }
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

/// The same with libvirt's test driver.
fn with_libvirt(managed: Managed) -> (Managed, Daemon, Connect) {
    let libvirt = standin::open(managed.sim.root(), Path::new(env!("CARGO_BIN_EXE_gpuward-sim"))).expect("opened");
    let hypervisor = Hypervisor::At(standin::source(managed.sim.root(), &libvirt));
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

/// A machine that runs with the GPU.
fn running_machine(daemon: &Daemon, hold: &str) -> MachineId {
    let text = format!(
        "format = 1\nname = 'train-1'\nvcpus = 1\nmemory = '1GiB'\nhold = '{hold}'\n[[disk]]\nvolume = 'tank/a'\n[[device]]\nkind = 'gpu'\nidentity = '{}'\n",
        gpu()
    );
    let spec = MachineSpec::parse(Node::from_toml(&text).unwrap()).unwrap();
    let machine = MachineId(spec.uuid);
    done(daemon, Request::CreateMachine { tenant: TenantId::BUILT_IN, spec: Box::new(spec) });
    done(daemon, Request::StartMachine(machine));
    machine
}

#[test]
fn the_words_of_the_ledger_are_those_of_the_bus() {
    for release in [ReleaseOn::Manual, ReleaseOn::DomainStopped, ReleaseOn::ClientGone] {
        assert_eq!(serde_json::to_value(release).unwrap(), release.word());
    }
    assert_eq!(spec("").domain, DOMAIN.parse::<Uuid>().unwrap());
}
