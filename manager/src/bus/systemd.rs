//! The kernel of a real host with its service manager: systemd on the bus (`org.freedesktop.systemd1`, org.freedesktop.systemd1(5)).
//!
//! Each call has a connection and a small runtime of its own: units are asked for seldom, and by workers' threads only.

use std::error::Error;
use std::future::Future;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use vfio::{Kernel, LateHook, Linux, StoreError, StuckStore, UnitAsk, UnitError};
use zbus::export::ordered_stream::OrderedStreamExt;
use zbus::{Connection, OwnedObjectPath, Variant, proxy};

use super::{Address, connect};

#[proxy(
    interface = "org.freedesktop.systemd1.Manager",
    default_service = "org.freedesktop.systemd1",
    default_path = "/org/freedesktop/systemd1"
)]
trait Systemd {
    fn subscribe(&self) -> zbus::Result<()>;
    fn load_unit(&self, name: &str) -> zbus::Result<OwnedObjectPath>;
    fn start_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;
    fn stop_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;
    fn start_transient_unit(
        &self,
        name: &str,
        mode: &str,
        properties: &[(&str, Variant<'_>)],
        auxiliary: &[(&str, &[(&str, Variant<'_>)])],
    ) -> zbus::Result<OwnedObjectPath>;
    #[zbus(property(emits_changed_signal = "false"))]
    fn system_state(&self) -> zbus::Result<String>;
    #[zbus(signal)]
    fn job_removed(&self, id: u32, job: OwnedObjectPath, unit: String, result: String) -> zbus::Result<()>;
}

#[proxy(interface = "org.freedesktop.systemd1.Unit", default_service = "org.freedesktop.systemd1")]
trait Unit {
    #[zbus(property)]
    fn active_state(&self) -> zbus::Result<String>;
}

/// This host's kernel, and systemd beside it.
#[derive(Debug)]
pub struct HostKernel {
    kernel: Linux,
    bus: Address,
}

type Failed = Box<dyn Error + Send + Sync>;

impl HostKernel {
    /// `kernel`, with the systemd that is on `bus`.
    pub fn new(kernel: Linux, bus: Address) -> Self {
        Self { kernel, bus }
    }

    fn ask<T>(&self, deadline: Instant, asking: impl AsyncFnOnce(Connection) -> Result<T, Failed>) -> Result<T, Failed> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let asked = async { asking(connect(&self.bus).await?).await };
        runtime.block_on(in_time(deadline, asked))
    }
}

async fn in_time<T>(deadline: Instant, asked: impl Future<Output = Result<T, Failed>>) -> Result<T, Failed> {
    let left = deadline.saturating_duration_since(Instant::now());
    tokio::time::timeout(left, asked).await.unwrap_or_else(|_| Err(format!("it was not done within {} s", left.as_secs()).into()))
}

async fn is_active(connection: Connection, unit: &str) -> Result<bool, Failed> {
    let path = SystemdProxy::new(&connection).await?.load_unit(unit).await?;
    let state = UnitProxy::builder(&connection).path(path).build().await?.active_state().await?;
    Ok(matches!(state.as_str(), "active" | "activating" | "reloading"))
}

// The job's end is waited for, whose signal may come before the answer that names the job.
async fn change(connection: Connection, ask: &UnitAsk, within: Duration) -> Result<(), Failed> {
    let systemd = SystemdProxy::new(&connection).await?;
    systemd.subscribe().await?;
    let mut removed = systemd.receive_job_removed().await?;
    let job = match ask {
        UnitAsk::Stop(unit) => systemd.stop_unit(unit, "replace").await?,
        UnitAsk::Start(unit) => systemd.start_unit(unit, "replace").await?,
        UnitAsk::Run { unit, command } => run(&systemd, unit, (command, within)).await?,
    };
    while let Some(signal) = removed.next().await {
        let ended = signal.args()?;
        if ended.job == job {
            return if ended.result == "done" { Ok(()) } else { Err(format!("systemd's job ended as {}", ended.result).into()) };
        }
    }
    Err("the bus has gone".into())
}

async fn run(systemd: &SystemdProxy<'_>, unit: &str, (command, within): (&[String], Duration)) -> zbus::Result<OwnedObjectPath> {
    let program = command.first().map(String::as_str).unwrap_or_default();
    let exec = vec![(program, command.iter().map(String::as_str).collect::<Vec<_>>(), false)];
    let properties = [
        ("Description", Variant::from("Vendor's tool, run for gpuward")),
        ("Type", Variant::from("oneshot")),
        ("CollectMode", Variant::from("inactive-or-failed")),
        ("TimeoutStartUSec", Variant::from(u64::try_from(within.as_micros()).unwrap_or(u64::MAX))),
        ("ExecStart", Variant::from(exec)),
    ];
    systemd.start_transient_unit(unit, "fail", &properties, &[]).await
}

impl Kernel for HostKernel {
    fn store(&self, attribute: &Path, value: &str, deadline: Instant) -> Result<(), StoreError> {
        self.kernel.store(attribute, value, deadline)
    }

    fn read_locked(&self, path: &Path, deadline: Instant) -> io::Result<Vec<u8>> {
        self.kernel.read_locked(path, deadline)
    }

    fn stuck_stores(&self) -> Vec<StuckStore> {
        self.kernel.stuck_stores()
    }

    fn on_late_store(&self, hook: LateHook) {
        self.kernel.on_late_store(hook);
    }

    fn unit_is_active(&self, unit: &str, deadline: Instant) -> Result<bool, UnitError> {
        let asked = self.ask(deadline, async |connection| is_active(connection, unit).await);
        asked.map_err(|source| UnitError { verb: "look at", unit: unit.into(), source })
    }

    fn is_shutting_down(&self, deadline: Instant) -> Result<bool, UnitError> {
        let asked = self.ask(deadline, async |connection| Ok(SystemdProxy::new(&connection).await?.system_state().await? == "stopping"));
        asked.map_err(|source| UnitError { verb: "look at", unit: "the system's state".into(), source })
    }

    fn unit(&self, ask: &UnitAsk, deadline: Instant) -> Result<(), UnitError> {
        let verb = match ask {
            UnitAsk::Stop(_) => "stop",
            UnitAsk::Start(_) => "start",
            UnitAsk::Run { .. } => "run",
        };
        let within = deadline.saturating_duration_since(Instant::now());
        let asked = self.ask(deadline, async |connection| change(connection, ask, within).await);
        asked.map_err(|source| UnitError { verb, unit: ask.unit().into(), source })
    }
}
