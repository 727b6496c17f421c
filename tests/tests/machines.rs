//! Machines from specification to gone, on the simulated host: the real engine, libvirt's test driver, a process for each domain.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use std::fs;
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use manager::engine::machines::{self, Hypervisor};
use manager::engine::{Engine, EngineHandle, Options};
use manager::failure::{ErrorKind, Failure};
use manager::id::{JobId, MachineId, TenantId};
use manager::libvirt::Source;
use manager::request::{Ask, Goal, Request, Submission};
use manager::spec::{MachineSpec, Node};
use manager::view::{DeviceState, HostState, JobState, JobView, MachineState, MachineView, Update, View};
use rustix::process::{Pid, Signal, kill_process};
use tests::simhost::{Death, Errno, SimHost, SimKernel, SimRoot};
use tests::standin;
use vfio::{Deadlines, PciAddress};
use virt::connect::Connect;

const FIRST: &str = "0000:1b:00.0";
const SECOND: &str = "0000:43:00.0";

type Seen = Arc<(Mutex<Vec<Update>>, Condvar)>;

/// An engine on a simulated host, and what it published.
struct Daemon {
    sim: SimHost,
    libvirt: Connect,
    engine: EngineHandle,
    seen: Seen,
}

/// A connection that knows the machines which still run.
fn open(sim: &SimHost) -> Connect {
    standin::open(sim.root(), Path::new(env!("CARGO_BIN_EXE_gpuward-sim"))).expect("opened")
}

fn run_on(sim: &SimHost, source: Source) -> (EngineHandle, Seen) {
    let options = Options {
        host: sim.host(),
        config: sim.root().join("etc/gpuward/gpuward.toml"),
        state_dir: sim.root().join("var/lib/gpuward"),
        run_dir: sim.root().join("run/gpuward"),
        deadlines: Deadlines::default(),
        machines: machines::Options { hypervisor: Hypervisor::At(source) },
    };
    let seen = Seen::default();
    let sink = seen.clone();
    let publish = Box::new(move |update| {
        sink.0.lock().unwrap().push(update);
        sink.1.notify_all();
    });
    (Engine::start(options, publish).expect("started"), seen)
}

impl Daemon {
    fn start() -> Self {
        Self::start_with("match = { vendor = \"10de\" }\nuse = \"pool\"\n")
    }

    fn start_with(rule: &str) -> Self {
        Self::start_on("dgx-h100", rule)
    }

    fn start_on(host: &str, rule: &str) -> Self {
        let sim = SimHost::at(SimRoot::temporary(host).expect("laid"));
        let config = sim.root().join("etc/gpuward/gpuward.toml");
        fs::create_dir_all(config.parent().unwrap()).expect("made");
        fs::write(&config, format!("format = 1\n[[devices]]\n{rule}")).expect("written");
        Self::on(sim)
    }

    fn on(sim: SimHost) -> Self {
        let libvirt = open(&sim);
        let (engine, seen) = run_on(&sim, standin::source(sim.root(), &libvirt));
        Self { sim, libvirt, engine, seen }.ready()
    }

    /// The daemon ends, its machines run on, and it starts anew.
    fn restart(&mut self) {
        self.engine.stop();
        self.libvirt = open(&self.sim);
        (self.engine, self.seen) = run_on(&self.sim, standin::source(self.sim.root(), &self.libvirt));
    }

    fn ready(self) -> Self {
        self.until("it is ready", |view| (view.host_state == HostState::Ready).then_some(()));
        self
    }

    fn until<T>(&self, what: &str, look: impl Fn(&View) -> Option<T>) -> T {
        let until = Instant::now() + Duration::from_secs(20);
        let mut updates = self.seen.0.lock().unwrap();
        loop {
            if let Some(found) = updates.last().and_then(|update| look(&update.view)) {
                return found;
            }
            let left = until.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "{what} did not come about; last: {:#?}",
                updates.last().map(|update| (&update.view.machines, &update.view.claims, &update.view.jobs))
            );
            updates = self.seen.1.wait_timeout(updates, left).unwrap().0;
        }
    }

    fn submit(&self, request: Request) -> Result<JobId, Failure> {
        let (reply, answer) = sync_channel(1);
        let submission = Submission { request, uid: 0, request_id: String::new(), if_generation: None };
        self.engine.ask(Ask::Submit(submission, Box::new(move |result| reply.send(result).unwrap())));
        answer.recv().expect("answered")
    }

    fn finished(&self, job: JobId) -> JobView {
        self.until("the job's end", |view| view.jobs.get(&job).filter(|job| job.state.is_over()).cloned())
    }

    fn run(&self, request: Request) -> JobView {
        let job = self.submit(request).unwrap_or_else(|failure| panic!("{failure}"));
        self.finished(job)
    }

    fn done(&self, request: Request) {
        let job = self.run(request);
        assert_eq!((job.state, job.error), (JobState::Done, None), "{}", job.kind);
    }

    fn assign(&self, devices: &[&str]) {
        let goals = devices.iter().map(|device| Goal::Assign { device: at(device), force: false }).collect();
        self.done(Request::Apply { goals, plan_digest: None });
    }

    fn create(&self, name: &str, devices: &str) -> MachineId {
        let spec = spec(name, devices);
        let machine = MachineId(spec.uuid);
        self.done(Request::CreateMachine { tenant: TenantId::BUILT_IN, spec: Box::new(spec) });
        machine
    }

    fn machine(&self, machine: MachineId) -> MachineView {
        self.until("the machine", |view| view.machines.get(&machine).cloned())
    }

    fn until_state(&self, machine: MachineId, state: MachineState) -> MachineView {
        self.until(&format!("{state:?}"), |view| view.machines.get(&machine).filter(|machine| machine.state == state).cloned())
    }

    fn until_device(&self, device: &str, state: DeviceState) {
        self.until(&format!("{device} {state:?}"), |view| (view.devices.get(&at(device))?.state == state).then_some(()));
    }

    fn owned(&self) -> String {
        fs::read_to_string(self.sim.root().join("run/gpuward/owned.json")).unwrap_or_default()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.engine.stop();
        standin::end_all(self.sim.root());
    }
}

fn at(device: &str) -> PciAddress {
    device.parse().unwrap()
}

fn spec(name: &str, devices: &str) -> MachineSpec {
    let text = format!("format = 1\nname = \"{name}\"\nvcpus = 2\nmemory = \"1GiB\"\n[[disk]]\nvolume = \"tank/a\"\n{devices}");
    MachineSpec::parse(Node::from_toml(&text).unwrap()).unwrap()
}

fn kill(pid: u32) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::KILL).expect("killed");
}

const ONE_GPU: &str = "[[device]]\nkind = \"gpu\"\n";

#[test]
fn a_machine_is_created_started_stopped_and_removed() {
    let daemon = Daemon::start();
    daemon.assign(&[FIRST]);
    let machine = daemon.create("train-1", ONE_GPU);
    assert_eq!(daemon.machine(machine).state, MachineState::Off);

    daemon.done(Request::StartMachine(machine));
    let running = daemon.until_state(machine, MachineState::Running);
    assert_eq!((running.claims.len(), running.isolation_level), (1, "whole-gpu"));
    assert!(running.leader > 0 && running.domain_xml.contains("hostdev"), "{running:#?}");
    daemon.until_device(FIRST, DeviceState::Running);
    assert!(daemon.owned().contains(&machine.0.to_string()), "the hook knows whose it is");

    daemon.done(Request::StopMachine(machine));
    let off = daemon.until_state(machine, MachineState::Off);
    assert_eq!((off.claims.len(), off.leader, off.domain_xml.as_str()), (0, 0, ""));
    daemon.until_device(FIRST, DeviceState::Free);

    daemon.done(Request::RemoveMachine(machine));
    daemon.until("its end", |view| view.machines.is_empty().then_some(()));
}

#[test]
fn a_machine_whose_process_is_killed_frees_its_devices() {
    let daemon = Daemon::start();
    daemon.assign(&[FIRST]);
    let machine = daemon.create("train-1", ONE_GPU);
    daemon.done(Request::StartMachine(machine));
    kill(daemon.until_state(machine, MachineState::Running).leader);
    let off = daemon.until_state(machine, MachineState::Off);
    assert_eq!(off.reason, "the guest ended by itself, or its process was killed");
    daemon.until_device(FIRST, DeviceState::Free);
    daemon.done(Request::StartMachine(machine));
}

#[test]
fn kill_ends_a_machine_and_another_gets_its_device() {
    let daemon = Daemon::start();
    daemon.assign(&[FIRST]);
    let (one, two) = (daemon.create("one", ONE_GPU), daemon.create("two", ONE_GPU));
    daemon.done(Request::StartMachine(one));
    let first_epoch = daemon.until("the claim", |view| view.claims.values().next().map(|claim| claim.epoch));
    daemon.done(Request::KillMachine(one));
    daemon.until_state(one, MachineState::Off);
    daemon.done(Request::StartMachine(two));
    let second_epoch = daemon.until("the claim", |view| view.claims.values().next().map(|claim| claim.epoch));
    assert!(second_epoch > first_epoch);
}

#[test]
fn of_two_machines_that_ask_for_one_device_one_gets_it_and_the_other_hears_who_has_it() {
    let daemon = Daemon::start();
    daemon.assign(&[FIRST]);
    let named = format!("[[device]]\nkind = \"gpu\"\nidentity = \"{FIRST}\"\n");
    let machines = [daemon.create("one", &named), daemon.create("two", &named), daemon.create("three", ONE_GPU)];
    let [one, two, three] = machines.map(|machine| daemon.submit(Request::StartMachine(machine)));
    assert_eq!(daemon.finished(one.expect("the first gets it")).state, JobState::Done);
    let two = two.expect_err("the second does not");
    assert_eq!((two.kind, two.message.as_str()), (ErrorKind::AlreadyClaimed, "0000:1b:00.0 belongs to machine one"));
    let three = three.expect_err("the third does not");
    assert_eq!((three.kind, three.message.as_str()), (ErrorKind::NoFit, "device[0] wishes for 1 GPU; 0 are free"));
    assert!(three.why.contains(&"0000:1b:00.0 belongs to machine one".to_owned()), "{three}");
    assert!(three.why.contains(&"0000:43:00.0 is with the host, not in the pool".to_owned()), "{three}");
    daemon.until_state(machines[0], MachineState::Running);
    assert_eq!(daemon.machine(machines[1]).state, MachineState::Off);
}

#[test]
fn a_daemon_that_starts_anew_adopts_what_runs_and_stores_nothing() {
    let mut daemon = Daemon::start();
    daemon.assign(&[FIRST, SECOND]);
    let machine = daemon.create("train-1", "[[device]]\nkind = \"gpu\"\ncount = 2\n");
    daemon.done(Request::StartMachine(machine));
    let before = daemon.until_state(machine, MachineState::Running);
    let stored = daemon.sim.kernel.stored().len();
    daemon.restart();
    let after = daemon.until_state(machine, MachineState::Running);
    assert_eq!((after.leader, &after.claims), (before.leader, &before.claims));
    daemon.until_device(FIRST, DeviceState::Running);
    assert_eq!(daemon.sim.kernel.stored().len(), stored, "no store");
    daemon.done(Request::StopMachine(machine));
    daemon.until_device(SECOND, DeviceState::Free);
}

#[test]
fn a_machine_that_ended_while_the_daemon_was_away_is_cleaned_up() {
    let mut daemon = Daemon::start();
    daemon.assign(&[FIRST]);
    let machine = daemon.create("train-1", ONE_GPU);
    daemon.done(Request::StartMachine(machine));
    let leader = daemon.until_state(machine, MachineState::Running).leader;
    daemon.engine.stop();
    kill(leader);
    daemon.restart();
    daemon.until_state(machine, MachineState::Off);
    daemon.until_device(FIRST, DeviceState::Free);
}

#[test]
fn a_device_of_a_domain_that_is_not_ours_is_refused() {
    let daemon = Daemon::start();
    daemon.assign(&[FIRST]);
    let gpu = at(FIRST);
    let foreign = format!(
        "<domain type='test'><name>nova-7</name><memory unit='MiB'>64</memory><os><type>hvm</type></os><devices>
         <hostdev mode='subsystem' type='pci'><source><address domain='{}' bus='{}' slot='{}' function='{}'/></source></hostdev></devices></domain>",
        gpu.domain(), gpu.bus(), gpu.device(), gpu.function()
    );
    daemon.libvirt.create_domain_xml(&foreign, 0).expect("created");
    let goal = Goal::Release { device: gpu };
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let (reply, answer) = sync_channel(1);
        daemon.engine.ask(Ask::Plan(vec![goal.clone()], Box::new(move |report| reply.send(report).unwrap())));
        let refusals = answer.recv().unwrap().unwrap().refusals;
        if refusals.iter().any(|failure| failure.message.starts_with("0000:1b:00.0 belongs to the libvirt domain nova-7")) {
            return;
        }
        assert!(Instant::now() < until, "{refusals:#?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_device_on_demand_is_taken_for_the_machine_and_given_back_after_it() {
    let daemon = Daemon::start_with("match = { vendor = \"10de\" }\nuse = \"on-demand\"\n");
    let before = daemon.sim.snapshot();
    let machine = daemon.create("train-1", ONE_GPU);
    daemon.done(Request::StartMachine(machine));
    daemon.until_device(FIRST, DeviceState::Running);
    daemon.done(Request::StopMachine(machine));
    daemon.until_device(FIRST, DeviceState::Host);
    let of_sysfs = |files: std::collections::BTreeMap<std::path::PathBuf, String>| {
        files.into_iter().filter(|(path, _)| path.starts_with("sys")).collect::<Vec<_>>()
    };
    assert_eq!(of_sysfs(daemon.sim.snapshot()), of_sysfs(before));
}

#[test]
fn a_machine_holds_its_device_while_it_is_defined_where_it_says_so() {
    let daemon = Daemon::start();
    daemon.assign(&[FIRST]);
    let text =
        format!("format = 1\nname = \"keep\"\nvcpus = 1\nmemory = \"1GiB\"\nhold = \"defined\"\n[[disk]]\nvolume = \"tank/a\"\n{ONE_GPU}");
    let spec = MachineSpec::parse(Node::from_toml(&text).unwrap()).unwrap();
    let machine = MachineId(spec.uuid);
    daemon.done(Request::CreateMachine { tenant: TenantId::BUILT_IN, spec: Box::new(spec) });
    daemon.until_device(FIRST, DeviceState::Claimed);
    daemon.done(Request::StartMachine(machine));
    daemon.done(Request::KillMachine(machine));
    daemon.until_device(FIRST, DeviceState::Claimed);
    daemon.done(Request::RemoveMachine(machine));
    daemon.until_device(FIRST, DeviceState::Free);
}

#[test]
fn what_is_wrong_with_a_request_is_said_by_name_and_changes_nothing() {
    let daemon = Daemon::start();
    daemon.assign(&[FIRST]);
    let machine = daemon.create("train-1", ONE_GPU);
    let create = |spec| daemon.submit(Request::CreateMachine { tenant: TenantId::BUILT_IN, spec: Box::new(spec) }).unwrap_err();
    let taken = create(spec("train-1", ""));
    assert_eq!((taken.kind, taken.message.as_str()), (ErrorKind::NameTaken, "there is a machine called train-1 already"));
    let large = create(MachineSpec { memory: 1 << 50, ..spec("large", "") });
    assert_eq!(large.kind, ErrorKind::InvalidSpec);
    assert!(large.message.starts_with("memory is 1073741824 MiB; the host has "), "{large}");
    let wide = create(MachineSpec { vcpus: 100_000, ..spec("wide", "") });
    assert!(wide.message.starts_with("vcpus is 100000; the host has "), "{wide}");

    let stranger = MachineId::random();
    let cases = [
        (Request::StartMachine(stranger), ErrorKind::NoSuchMachine),
        (Request::StopMachine(stranger), ErrorKind::NoSuchMachine),
        (Request::StopMachine(machine), ErrorKind::Conflict),
        (Request::KillMachine(machine), ErrorKind::Conflict),
    ];
    for (request, kind) in cases {
        assert_eq!(daemon.submit(request.clone()).unwrap_err().kind, kind, "{request:?}");
    }
    daemon.done(Request::StartMachine(machine));
    for request in [Request::StartMachine(machine), Request::RemoveMachine(machine)] {
        let failure = daemon.submit(request).unwrap_err();
        assert_eq!((failure.kind, failure.message.as_str()), (ErrorKind::Conflict, "machine train-1 is running"));
    }
    let absent = daemon.create("absent", "[[device]]\nkind = \"gpu\"\nidentity = \"0000:99:00.0\"\n");
    let failure = daemon.submit(Request::StartMachine(absent)).unwrap_err();
    assert_eq!((failure.kind, failure.message.as_str()), (ErrorKind::NoSuchDevice, "there is no device 0000:99:00.0"));
}

#[test]
fn a_device_that_somebody_moved_meanwhile_is_not_handed_out() {
    let daemon = Daemon::start();
    daemon.assign(&[FIRST]);
    let machine = daemon.create("train-1", ONE_GPU);
    daemon.sim.hold(4711, "thief", "/dev/vfio/31").expect("held");
    let job = daemon.run(Request::StartMachine(machine));
    let error = job.error.expect("it fails");
    assert_eq!((error.kind, error.message.as_str()), (ErrorKind::Held, "0000:1b:00.0 is held by thief[4711]"));
    assert_eq!(daemon.until_state(machine, MachineState::Failed).reason, error.message);
    daemon.until_device(FIRST, DeviceState::Free);
    daemon.sim.end_process(4711).expect("ended");
    daemon.done(Request::StartMachine(machine));
}

#[test]
fn without_libvirt_the_daemon_is_ready_and_a_start_says_what_to_do() {
    let mut daemon = Daemon::start();
    daemon.assign(&[FIRST]);
    let machine = daemon.create("train-1", ONE_GPU);
    daemon.done(Request::StartMachine(machine));
    let other = daemon.create("other", "");
    daemon.engine.stop();
    (daemon.engine, daemon.seen) = run_on(&daemon.sim, Source::Uri("test:///nowhere/at/all".into()));
    let unknown = daemon.until_state(machine, MachineState::Unknown);
    assert!(unknown.reason.starts_with("libvirt cannot be asked: "), "{}", unknown.reason);
    assert_eq!(unknown.claims.len(), 1, "its claim stays");
    daemon.until("it is ready", |view| (view.host_state == HostState::Ready).then_some(()));
    for request in [Request::StartMachine(other), Request::StopMachine(machine), Request::KillMachine(machine)] {
        let failure = daemon.submit(request).unwrap_err();
        assert_eq!(
            (failure.kind, failure.message.as_str()),
            (ErrorKind::HypervisorFailed, "libvirt at test:///nowhere/at/all cannot be reached")
        );
        assert!(failure.remedy.contains("systemctl start libvirtd.socket"), "{failure}");
    }
    daemon.restart();
    daemon.until_state(machine, MachineState::Running);
}

#[test]
fn a_killed_start_leaves_nothing_behind() {
    let daemon = Daemon::start();
    daemon.assign(&[FIRST]);
    let machine = daemon.create("train-1", ONE_GPU);
    let start = daemon.submit(Request::StartMachine(machine)).expect("admitted");
    let kill = daemon.submit(Request::KillMachine(machine)).expect("beside the start");
    assert_eq!(daemon.finished(kill).state, JobState::Done);
    // On a busy machine the start may have ended before the kill came.
    let start = daemon.finished(start);
    assert!(matches!(start.state, JobState::Canceled | JobState::Done), "{:?}", start.error);
    daemon.until_state(machine, MachineState::Off);
    daemon.until_device(FIRST, DeviceState::Free);
    assert!(daemon.libvirt.list_all_domains(virt::sys::VIR_CONNECT_LIST_DOMAINS_ACTIVE).unwrap().is_empty());
}

#[test]
fn p32_p102_a_gpu_that_does_not_come_back_clean_is_nobodys_until_a_person_has_looked() {
    let daemon = Daemon::start();
    daemon.assign(&[FIRST]);
    let machine = daemon.create("train-1", ONE_GPU);
    daemon.done(Request::StartMachine(machine));
    daemon.sim.kernel.fail_on("reset", Errno::IO);
    daemon.done(Request::StopMachine(machine));
    daemon.until_device(FIRST, DeviceState::Quarantined);
    let reason = daemon.until("the reason", |view| Some(view.devices[&at(FIRST)].reason.clone()));
    assert!(reason.starts_with("0000:1b:00.0 could not be reset: the kernel refused"), "{reason}");
    assert!(daemon.until("no claim", |view| view.claims.is_empty().then_some(true)));
    assert!(daemon.owned().contains("\"0000:1b:00.0\": \"00000000-0000-0000-0000-000000000000\""), "nobody may use it");
    let refused =
        daemon.submit(Request::StartMachine(machine)).map(|job| daemon.finished(job).error.unwrap()).unwrap_or_else(|error| error);
    assert_eq!(refused.kind, ErrorKind::NoFit, "{refused}");
    daemon.sim.kernel.calm();
    daemon.done(Request::ClearQuarantine(at(FIRST)));
    daemon.done(Request::StartMachine(machine));
}

/// The daemon dies at a store of a machine's life and starts anew on the same host.
fn dies(daemon: &mut Daemon, nth: usize, death: Death, request: Request) {
    daemon.sim.kernel.die_at(nth, death);
    let job = daemon.run(request);
    assert_eq!(job.state, JobState::RollbackFailed, "it died");
    daemon.engine.stop();
    daemon.sim.kernel = Arc::new(SimKernel::new(daemon.sim.root()));
    daemon.restart();
}

#[test]
fn p68_wherever_the_daemon_dies_in_a_machines_life_its_device_comes_back() {
    let mut daemon = Daemon::start_with("match = { vendor = \"10de\" }\nuse = \"on-demand\"\n");
    let of_sysfs = |sim: &SimHost| sim.snapshot().into_iter().filter(|(path, _)| path.starts_with("sys")).collect::<Vec<_>>();
    let before = of_sysfs(&daemon.sim);
    let machine = daemon.create("train-1", ONE_GPU);
    daemon.sim.kernel.calm();
    daemon.done(Request::StartMachine(machine));
    let taking = daemon.sim.kernel.stored().len();
    daemon.done(Request::StopMachine(machine));
    let stores = daemon.sim.kernel.stored().len();
    let mut recoveries = 0;
    for nth in 1..=stores {
        for death in [Death::Before, Death::After] {
            daemon.sim.kernel.calm();
            if nth <= taking {
                dies(&mut daemon, nth, death, Request::StartMachine(machine));
            } else {
                daemon.done(Request::StartMachine(machine));
                dies(&mut daemon, nth - taking, death, Request::StopMachine(machine));
            }
            daemon.until_state(machine, MachineState::Off);
            daemon.until_device(FIRST, DeviceState::Host);
            daemon.until("all is over", |view| {
                let is_over = view.claims.is_empty() && view.jobs.values().all(|job| job.state.is_over());
                is_over.then_some(())
            });
            assert_eq!(of_sysfs(&daemon.sim), before, "died {death:?} store {nth}");
            recoveries += 1;
        }
    }
    println!("a machine's life with a device on demand: {stores} stores, died before and after each: {recoveries} recoveries");
}

#[test]
fn a_group_that_lost_its_isolation_meanwhile_is_not_handed_out() {
    let daemon = Daemon::start_on("crowded-group", "match = { vendor = \"10de\" }\nuse = \"pool\"\n");
    let soon = || Instant::now() + Duration::from_secs(5);
    let disk = "0000:01:00.1";
    let store = |attribute: &str| daemon.sim.host().store(format!("sys/bus/pci/drivers/nvme/{attribute}"), disk, soon()).expect("stored");
    store("unbind");
    daemon.assign(&["0000:01:00.0"]);
    let machine = daemon.create("train-1", "[[device]]\nkind = \"gpu\"\nidentity = \"0000:01:00.0\"\n");
    store("bind");
    let error = daemon.run(Request::StartMachine(machine)).error.expect("it fails");
    assert_eq!(error.kind, ErrorKind::NotViable);
    assert!(error.message.starts_with("0000:01:00.0 cannot be isolated any more: 0000:01:00.1"), "{error}");
    store("unbind");
    daemon.done(Request::StartMachine(machine));
}

impl Daemon {
    fn console(&self, machine: MachineId) -> Result<std::os::unix::net::UnixStream, Failure> {
        let (reply, answer) = sync_channel(1);
        self.engine.ask(Ask::Console(machine, Box::new(move |result| reply.send(result).unwrap())));
        answer.recv().expect("answered").map(Into::into)
    }
}

#[test]
fn a_console_has_one_reader_and_ends_with_either_side() {
    use std::io::{Read, Write};
    let daemon = Daemon::start();
    let machine = daemon.create("train-1", "");
    let off = daemon.console(machine).unwrap_err();
    assert_eq!((off.kind, off.message.as_str()), (ErrorKind::Conflict, "machine train-1 does not run"));
    daemon.done(Request::StartMachine(machine));
    let mut console = daemon.console(machine).expect("opened");
    let mut said = vec![0; standin::GREETING.len()];
    console.read_exact(&mut said).unwrap();
    assert_eq!(said, standin::GREETING.as_bytes());
    console.write_all(b"ls\r").unwrap();
    let mut echo = [0; 3];
    console.read_exact(&mut echo).unwrap();
    assert_eq!(&echo, b"ls\r");
    assert_eq!(daemon.console(machine).unwrap_err().kind, ErrorKind::Busy);

    drop(console);
    let until = Instant::now() + Duration::from_secs(10);
    let mut again = loop {
        match daemon.console(machine) {
            Ok(console) => break console,
            Err(failure) if failure.kind == ErrorKind::Busy && Instant::now() < until => std::thread::sleep(Duration::from_millis(10)),
            Err(failure) => panic!("{failure}"),
        }
    };
    daemon.done(Request::KillMachine(machine));
    let mut rest = Vec::new();
    again.read_to_end(&mut rest).expect("it ends with the machine");
}

#[test]
fn a_guest_is_asked_to_reboot_while_it_runs_and_keeps_its_device() {
    let daemon = Daemon::start();
    daemon.assign(&[FIRST]);
    let machine = daemon.create("train-1", ONE_GPU);
    let refused = daemon.submit(Request::RebootMachine(machine)).unwrap_err();
    assert_eq!((refused.kind, refused.message.as_str()), (ErrorKind::Conflict, "machine train-1 is off, not running"));
    daemon.done(Request::StartMachine(machine));
    let before = daemon.until_state(machine, MachineState::Running);
    daemon.done(Request::RebootMachine(machine));
    let after = daemon.until_state(machine, MachineState::Running);
    assert_eq!((after.leader, after.claims, after.guest_state), (before.leader, before.claims, "started"));
    let given = before.devices[0];
    assert_eq!((given.device, given.guest), (at(FIRST), Some(at("0000:01:00.0"))));
}

#[test]
fn what_others_do_to_a_domain_is_seen_and_cleaned_up() {
    let daemon = Daemon::start();
    daemon.assign(&[FIRST]);
    let machine = daemon.create("train-1", ONE_GPU);
    daemon.done(Request::StartMachine(machine));
    daemon.until_state(machine, MachineState::Running);
    let domain = daemon.libvirt.lookup_domain_by_uuid(machine.0).expect("there");
    domain.suspend().expect("paused");
    daemon.until_state(machine, MachineState::Paused);
    let refused = daemon.submit(Request::RebootMachine(machine)).unwrap_err();
    assert_eq!(refused.message, "machine train-1 is paused, not running");
    domain.resume().expect("resumed");
    daemon.until_state(machine, MachineState::Running);
    domain.destroy().expect("destroyed");
    let off = daemon.until_state(machine, MachineState::Off);
    assert_eq!(off.reason, "the guest ended by itself, or its process was killed");
    daemon.until_device(FIRST, DeviceState::Free);
    daemon.done(Request::StartMachine(machine));
}
