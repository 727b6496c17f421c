//! A started domain has a process that holds its devices' nodes; either ends with the other, and processes outlive the daemon.
#![allow(clippy::expect_used)]

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tests::simhost::{SimHost, SimRoot};
use tests::standin;
use vfio::PciAddress;
use virt::connect::Connect;

const UUID: &str = "6b2f5c1e-2f6a-4d55-9f0e-5c7f3f3f0007";
const NAME: &str = "gpuward-6b2f5c1e";
const GPU: &str = "0000:1b:00.0";

/// A host whose first GPU is with vfio-pci.
fn host() -> SimHost {
    let sim = SimHost::at(SimRoot::temporary("dgx-h100").expect("laid"));
    let soon = Instant::now() + Duration::from_secs(5);
    let device = format!("sys/bus/pci/devices/{GPU}");
    sim.host().store(format!("{device}/driver_override"), "vfio-pci", soon).expect("stored");
    sim.host().store(format!("{device}/driver/unbind"), GPU, soon).expect("stored");
    sim.host().store("sys/bus/pci/drivers_probe", GPU, soon).expect("stored");
    sim
}

fn open(sim: &SimHost) -> Connect {
    standin::open(sim.root(), Path::new(env!("CARGO_BIN_EXE_gpuward-sim"))).expect("opened")
}

fn domain() -> String {
    let gpu: PciAddress = GPU.parse().expect("an address");
    format!(
        "<domain type='test'><name>{NAME}</name><uuid>{UUID}</uuid><memory unit='MiB'>512</memory><os><type>hvm</type></os>
         <devices><hostdev mode='subsystem' type='pci' managed='no'><source>
         <address domain='{}' bus='{}' slot='{}' function='{}'/></source></hostdev></devices></domain>",
        gpu.domain(),
        gpu.bus(),
        gpu.device(),
        gpu.function()
    )
}

fn pid_of(sim: &SimHost) -> Option<Pid> {
    let text = fs::read_to_string(sim.root().join(format!("run/libvirt/qemu/{NAME}.pid"))).ok()?;
    Pid::from_raw(text.trim().parse().ok()?)
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what} did not come");
        thread::sleep(Duration::from_millis(5));
    }
}

fn runs(connect: &Connect) -> bool {
    connect.lookup_domain_by_uuid(UUID.parse().expect("a uuid")).is_ok()
}

#[test]
fn a_domain_has_a_process_that_holds_its_nodes_until_it_is_destroyed() {
    let sim = host();
    let connect = open(&sim);
    let domain = connect.create_domain_xml(&domain(), 0).expect("created");
    until("the stand-in", || pid_of(&sim).is_some());
    let pid = pid_of(&sim).expect("it runs").as_raw_nonzero();
    let fds = fs::read_dir(sim.root().join(format!("proc/{pid}/fd"))).expect("readable").flatten();
    let node = sim.root().join("dev/vfio/31");
    assert!(fds.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|target| target == node), "it holds the group's node");
    domain.destroy().expect("destroyed");
    until("the stand-in's end", || pid_of(&sim).is_none());
    assert!(!sim.host().exists(format!("proc/{pid}")));
}

#[test]
fn a_domain_ends_with_its_process() {
    let sim = host();
    let connect = open(&sim);
    connect.create_domain_xml(&domain(), 0).expect("created");
    until("the stand-in", || pid_of(&sim).is_some());
    kill_process(pid_of(&sim).expect("it runs"), Signal::KILL).expect("killed");
    until("the domain's end", || !runs(&connect));
    assert_eq!(pid_of(&sim), None, "as with libvirt, the pid file goes first");
}

#[test]
fn a_domain_whose_device_has_no_node_is_stopped() {
    let sim = host();
    fs::remove_file(sim.root().join("dev/vfio/31")).expect("removed");
    let connect = open(&sim);
    connect.create_domain_xml(&domain(), 0).expect("created");
    until("the domain's end", || !runs(&connect));
}

#[test]
fn a_connection_that_is_opened_later_knows_the_domains_that_still_run() {
    let sim = host();
    let first = open(&sim);
    first.create_domain_xml(&domain(), 0).expect("created");
    until("the stand-in", || pid_of(&sim).is_some());
    let second = open(&sim);
    assert!(runs(&second));
    let domain = second.lookup_domain_by_uuid(UUID.parse().expect("a uuid")).expect("it runs");
    assert_eq!(domain.is_persistent(), Ok(false));
    kill_process(pid_of(&sim).expect("it runs"), Signal::KILL).expect("killed");
    until("the domain's end", || !runs(&second));
}
