//! The shipped daemon and command on a laid `dgx-h100`, on a private bus and without libvirt: start to name, round trips, the
//! command, resident memory, wake-ups when idle. `make bench` builds both in release mode first.
//!
//! Goals: ready under 100 ms, `gpuward list` under 50 ms, under 20 MiB resident, no wake-ups when idle.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use manager::id::{ClaimId, TenantId};
use manager::ledger::{ClaimRecord, DeviceRecord, Isolation, Ledger, Original, ReleaseOn, Standing, Terms, store};
use tests::bus::PrivateBus;
use tests::simhost::SimHost;
use vfio::{Binding, Identity, Ids, PciAddress};
use zbus::Connection;
use zbus::fdo::ObjectManagerProxy;

/// So many samples of each figure.
const SAMPLES: usize = 20;
const CLAIMS: u32 = 1000;
const IDLE: Duration = Duration::from_secs(10);

fn main() {
    let sim = SimHost::build("dgx-h100").unwrap();
    let files = tempfile::tempdir().unwrap();
    let bus = PrivateBus::start(files.path()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let connection = runtime.block_on(async { zbus::connection::Builder::address(bus.address()).build().await.unwrap() });
    let start = || Daemon::start(sim.root(), files.path(), bus.address());

    figures("start to name", (0..SAMPLES).map(|_| runtime.block_on(start().until_named(&connection))).collect());
    record_claims(&files.path().join("state"));
    figures("start with 1,000 claims", (0..SAMPLES).map(|_| runtime.block_on(start().until_named(&connection))).collect());
    fs::remove_dir_all(files.path().join("state")).unwrap();
    let daemon = start();
    runtime.block_on(daemon.until_named(&connection));
    figures("Manager.GetDevice", (0..SAMPLES).map(|_| timed(|| runtime.block_on(get_device(&connection)))).collect());
    figures("GetManagedObjects", (0..SAMPLES).map(|_| timed(|| runtime.block_on(get_all(&connection)))).collect());
    figures("gpuward list", (0..SAMPLES).map(|_| timed(|| list(bus.address()))).collect());
    println!("{:<28} {:>9.1} MiB", "resident", daemon.resident_kib() as f64 / 1024.0);
    let before = daemon.wake_ups();
    thread::sleep(IDLE);
    println!("{:<28} {:>9} in {} s", "wake-ups when idle", daemon.wake_ups() - before, IDLE.as_secs());
}

/// A ledger with as many claims of other managers, on devices that are not on this host.
fn record_claims(state_dir: &Path) {
    let mut ledger = Ledger::default();
    for number in 0..CLAIMS {
        let device: PciAddress = format!("{:04x}:{:02x}:00.0", 1 + number / 256, number % 256).parse().unwrap();
        let identity = Identity { slot: format!("pci{number:04x}:00/00.0"), ids: Ids::default(), serial: None };
        let original = Original { binding: Binding::default(), power_control: None, d3cold_allowed: None, reset_method: None };
        let record = DeviceRecord { identity, standing: Standing::Active, boot: String::new(), original, lent: false, again: false };
        let terms = Terms { release: ReleaseOn::Manual, client: String::new(), expires: 0, was_running: false };
        let claim = ClaimRecord {
            standing: Standing::Active,
            tenant: TenantId::BUILT_IN,
            machine: None,
            domain: uuid::Uuid::new_v4(),
            devices: vec![device],
            isolation: Isolation::WholeGpu,
            since: 0,
            epoch: ledger.take_epoch(),
            on_demand: false,
            boot: String::new(),
            terms: Some(terms),
        };
        ledger.devices.insert(device, record);
        ledger.claims.insert(ClaimId::random(), claim);
    }
    store::save(state_dir, &ledger).unwrap();
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

fn figures(what: &str, mut samples: Vec<Duration>) {
    samples.sort();
    let ms = |sample: Duration| sample.as_secs_f64() * 1000.0;
    let (least, median, most) = (samples[0], samples[samples.len() / 2], samples[samples.len() - 1]);
    println!("{what:<28} {:>9.2} ms median  ({:.2} to {:.2}, {} samples)", ms(median), ms(least), ms(most), samples.len());
}

/// A program of the release build, beside this one.
fn program(name: &str) -> PathBuf {
    let deps = std::env::current_exe().unwrap();
    let program = deps.parent().and_then(Path::parent).unwrap().join(name);
    assert!(program.exists(), "{} is not built; `make bench` builds it", program.display());
    program
}

fn list(bus: &str) {
    let status = Command::new(program("gpuward")).args(["--bus", bus, "list"]).stdout(Stdio::null()).status().unwrap();
    assert!(status.success());
}

async fn get_device(connection: &Connection) {
    let manager = manager::client::ManagerProxy::new(connection).await.unwrap();
    manager.get_device("0000:1b:00.0").await.unwrap();
}

async fn get_all(connection: &Connection) {
    let objects = ObjectManagerProxy::builder(connection).destination("org.gpuward1").path("/org/gpuward1").build().await.unwrap();
    assert!(objects.get_managed_objects().await.unwrap().len() > 12);
}

struct Daemon {
    process: Child,
    started: Instant,
}

impl Daemon {
    fn start(root: &Path, files: &Path, bus: &str) -> Self {
        let started = Instant::now();
        let process = Command::new(program("gpuwardd"))
            .args(["--libvirt", "none", "--bus", bus, "--root"])
            .arg(root)
            .arg("--config")
            .arg(files.join("gpuward.toml"))
            .arg("--state-dir")
            .arg(files.join("state"))
            .arg("--run-dir")
            .arg(files.join("run"))
            .env("RUST_LOG", "error")
            .spawn()
            .unwrap();
        Self { process, started }
    }

    async fn until_named(&self, connection: &Connection) -> Duration {
        let bus = zbus::fdo::DBusProxy::new(connection).await.unwrap();
        while !bus.name_has_owner("org.gpuward1".try_into().unwrap()).await.unwrap() {
            tokio::time::sleep(Duration::from_micros(500)).await;
        }
        self.started.elapsed()
    }

    fn resident_kib(&self) -> u64 {
        self.status("VmRSS:")
    }

    fn wake_ups(&self) -> u64 {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.process.id())).unwrap();
        tasks.map(|task| field(&task.unwrap().path().join("status"), "voluntary_ctxt_switches:")).sum()
    }

    fn status(&self, name: &str) -> u64 {
        field(Path::new(&format!("/proc/{}/status", self.process.id())), name)
    }
}

fn field(file: &Path, name: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}
