//! While the host shuts down: guests end, the daemon is told to end, and nothing is stored.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use manager::bus::{Address, HostKernel};
use manager::engine::Options;
use manager::engine::machines::{self, Hypervisor};
use manager::id::{MachineId, TenantId};
use manager::request::Request;
use manager::spec::{MachineSpec, Node};
use manager::view::{DeviceState, JobState, MachineState};
use rustix::process::{Pid, Signal, kill_process};
use tests::bus::PrivateBus;
use tests::engine::{Daemon, Managed, assign};
use tests::standin;
use vfio::{Host, Linux, PciAddress};
use zbus::connection::Builder;
use zbus::interface;

const POOL: &str = "[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'\n";

fn gpu() -> PciAddress {
    "0000:1b:00.0".parse().unwrap()
}

fn second() -> PciAddress {
    "0000:43:00.0".parse().unwrap()
}

/// The host with libvirt's stand-in, its first GPU in the pool, and nothing stored since.
fn start() -> (Managed, Daemon) {
    let managed = Managed::new("dgx-h100", POOL).unwrap();
    let libvirt = standin::open(managed.sim.root(), env!("CARGO_BIN_EXE_gpuward-sim").as_ref()).unwrap();
    let daemon = daemon(&managed, Hypervisor::At(standin::source(managed.sim.root(), &libvirt)));
    assert_eq!(daemon.apply(&[assign(gpu())]).unwrap().state, JobState::Done);
    (managed, daemon)
}

fn daemon(managed: &Managed, hypervisor: Hypervisor) -> Daemon {
    let options =
        Options { run_dir: managed.sim.root().join("run/gpuward"), machines: machines::Options { hypervisor }, ..managed.options() };
    let daemon = Daemon::start(options).unwrap();
    daemon.ready();
    daemon
}

fn done(daemon: &Daemon, request: Request) {
    let job = daemon.finish(daemon.submit(request).unwrap());
    assert_eq!((job.state, job.error), (JobState::Done, None));
}

fn machine(daemon: &Daemon) -> MachineId {
    let text = "format = 1\nname = 'train-1'\nvcpus = 1\nmemory = '1GiB'\n[[disk]]\nvolume = 'tank/a'\n[[device]]\nkind = 'gpu'\n";
    let spec = MachineSpec::parse(Node::from_toml(text).unwrap()).unwrap();
    let machine = MachineId(spec.uuid);
    done(daemon, Request::CreateMachine { tenant: TenantId::BUILT_IN, spec: Box::new(spec) });
    done(daemon, Request::StartMachine(machine));
    machine
}

#[test]
fn a_guest_that_ends_while_the_host_shuts_down_is_cleaned_up_at_the_next_boot() {
    let (managed, daemon) = start();
    let machine = machine(&daemon);
    let leader = daemon.until(|view| view.machines[&machine].leader != 0).machines[&machine].leader;
    let stored = managed.sim.kernel.stored().len();
    daemon.engine().host_stops(true);
    kill_process(Pid::from_raw(leader.cast_signed()).unwrap(), Signal::KILL).unwrap();
    standin::end_all(managed.sim.root());
    std::thread::sleep(Duration::from_millis(500));
    let view = daemon.view();
    assert_eq!(view.devices[&gpu()].claim.map(|claim| view.claims[&claim].machine), Some(Some(machine)), "its claim stays");
    assert_eq!(managed.sim.kernel.stored().len(), stored, "neither reset nor rebound");
    daemon.stop();
    assert_eq!(managed.sim.kernel.stored().len(), stored);
    let managed = managed.reboot(gpu()).unwrap();
    let daemon = self::daemon(&managed, Hypervisor::None);
    daemon.until(|view| view.machines[&machine].state == MachineState::Off && view.devices[&gpu()].state == DeviceState::Free);
    let closed = managed.history(gpu()).into_iter().find_map(|entry| entry.details.get("closed").cloned());
    assert_eq!(closed.as_deref(), Some("unclean"));
    assert!(managed.sim.resets(&gpu().to_string()) > 0, "it was cleaned before anybody gets it");
}

#[test]
fn a_daemon_that_is_ended_by_a_shutdown_undoes_nothing_and_the_boot_forgets_it() {
    let (managed, daemon) = start();
    managed.sim.kernel.hang_on("driver/unbind");
    let job = daemon.submit(Request::Apply { goals: vec![assign(second())], plan_digest: None }).unwrap();
    daemon.until(|view| view.devices[&second()].state == DeviceState::Assigning && view.jobs[&job].state == JobState::Running);
    while !managed.sim.kernel.stored().iter().any(|(path, _)| path.ends_with("driver_override")) {
        std::thread::sleep(Duration::from_millis(5));
    }
    managed.sim.shut_down(true).unwrap();
    let began = Instant::now();
    daemon.stop();
    assert!(began.elapsed() < Duration::from_secs(3), "nothing is waited for");
    let managed = managed.reboot(gpu()).unwrap();
    managed.sim.set("sys/bus/pci/devices/0000:43:00.0/driver_override", "(null)").unwrap();
    managed.sim.shut_down(false).unwrap();
    let daemon = self::daemon(&managed, Hypervisor::None);
    let view = daemon.until(|view| view.devices[&gpu()].state == DeviceState::Free);
    assert_eq!(view.devices[&second()].state, DeviceState::Host);
    assert!(!managed.sim.kernel.stored().iter().any(|(path, _)| path.to_string_lossy().contains("0000:43:00.0")));
}

/// As `org.freedesktop.systemd1`, as far as it is asked.
struct Systemd(&'static str);

#[interface(name = "org.freedesktop.systemd1.Manager")]
impl Systemd {
    #[zbus(property)]
    fn system_state(&self) -> &str {
        self.0
    }
}

#[test]
fn systemd_is_asked_whether_the_host_shuts_down() {
    let dir = tempfile::tempdir().unwrap();
    let bus = PrivateBus::start(dir.path()).unwrap();
    let kernel = HostKernel::new(Linux::new("/", "/bin/false", dir.path().join("stores")), Address::At(bus.address().to_owned()));
    let host = Host::new("/", Arc::new(kernel));
    let asked = || host.is_shutting_down(Instant::now() + Duration::from_secs(5));
    assert!(asked().is_err(), "nobody is there to be asked");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for (state, expected) in [("running", false), ("degraded", false), ("starting", false), ("stopping", true)] {
        let standing_in = runtime.block_on(async {
            let builder = Builder::address(bus.address()).name("org.freedesktop.systemd1");
            builder.serve_at("/org/freedesktop/systemd1", Systemd(state)).build().await.unwrap()
        });
        assert_eq!(asked().unwrap(), expected, "{state}");
        runtime.block_on(standing_in.close()).unwrap();
    }
}
