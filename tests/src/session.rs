//! The real daemon on a simulated host: private bus, stand-in for polkit, libvirt's test driver, and the daemon as a child that
//! can be killed and started anew.
//!
//! The child is `gpuward-sim daemon <root> <bus address>`; everything it must find again lies below the root.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use manager::bus::Address;
use manager::daemon;
use manager::engine;
use manager::engine::machines::{self, Hypervisor};
use rustix::process::{Pid, Signal, kill_process};
use vfio::{Deadlines, Host};
use zbus::connection::Builder;
use zbus::fdo::DBusProxy;

use crate::bus::{OPEN_POLICY, PrivateBus};
use crate::polkit::Polkit;
use crate::simhost::{BuildError, SimKernel, SimRoot};
use crate::standin;

/// The word that makes `gpuward-sim` the daemon of a session.
pub const DAEMON_WORD: &str = "daemon";

/// What the daemon may do on a simulated host: hand out NVIDIA's GPUs, with their companions, and virtual functions.
const CONFIGURATION: &str = r#"format = 1

[[devices]]
match = { vendor = "10de", kind = "gpu" }
use = "pool"

[[devices]]
match = { kind = "virtual-function" }
use = "pool"
"#;

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The host cannot be laid.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A file, a process or the bus.
    #[error("cannot {doing}")]
    Io {
        /// What was tried.
        doing: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The daemon ended, or did not take its name in time.
    #[error("the daemon has not come up within {within:?}; its log says why")]
    NotReady {
        /// How long it was waited for.
        within: Duration,
    },
}

/// A simulated host with the daemon on it. Everything ends when it is dropped.
#[derive(Debug)]
pub struct Session {
    daemon: Option<Child>,
    /// What polkit allows, and what it was asked.
    pub polkit: Polkit,
    bus: PrivateBus,
    program: PathBuf,
    host: SimRoot,
}

impl Session {
    /// Lays out everything for the simulated host at `host`, and starts the daemon: `program`, which is `gpuward-sim`.
    ///
    /// Polkit allows nothing yet.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn start(host: SimRoot, program: &Path) -> Result<Self, SessionError> {
        Self::with_policy(host, program, OPEN_POLICY)
    }

    /// As [`Self::start`], on a bus with these `<policy>` elements.
    ///
    /// # Errors
    /// See [`SessionError`].
    pub fn with_policy(host: SimRoot, program: &Path, policy: &str) -> Result<Self, SessionError> {
        let root = host.path();
        let failed = |doing| move |source| SessionError::Io { doing, source };
        for dir in ["etc/gpuward", "var/lib/gpuward", "run/gpuward", "run/libvirt/qemu", "run/dbus"] {
            fs::create_dir_all(root.join(dir)).map_err(failed("make the daemon's directories"))?;
        }
        let configuration = root.join("etc/gpuward/gpuward.toml");
        if !configuration.exists() {
            fs::write(configuration, CONFIGURATION).map_err(failed("write the configuration"))?;
        }
        let bus = PrivateBus::with_policy(&root.join("run/dbus"), policy).map_err(failed("start a bus"))?;
        let polkit = Polkit::start(bus.address()).map_err(failed("start polkit's stand-in"))?;
        let mut session = Self { daemon: None, polkit, bus, program: program.into(), host };
        session.start_daemon()?;
        Ok(session)
    }

    /// The bus, as in `DBUS_SYSTEM_BUS_ADDRESS`.
    pub fn address(&self) -> &str {
        self.bus.address()
    }

    /// Where the simulated host's tree is.
    pub fn root(&self) -> &Path {
        self.host.path()
    }

    /// Process id of the daemon, while there is one.
    pub fn daemon_pid(&self) -> Option<u32> {
        self.daemon.as_ref().map(Child::id)
    }

    /// Starts the daemon and waits until it takes changes or says why it does not.
    ///
    /// # Errors
    /// It does not come up.
    pub fn start_daemon(&mut self) -> Result<(), SessionError> {
        const WITHIN: Duration = Duration::from_secs(20);
        let log = fs::File::options().create(true).append(true).open(self.root().join("run/gpuwardd.log"));
        let started = log.and_then(|log| {
            Command::new(&self.program)
                .args([DAEMON_WORD.as_ref(), self.root().as_os_str(), self.address().as_ref()])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(log)
                .process_group(0)
                .spawn()
        });
        let daemon = started.map_err(|source| SessionError::Io { doing: "start the daemon", source })?;
        self.daemon = Some(daemon);
        if is_up(self.address(), WITHIN) { Ok(()) } else { Err(SessionError::NotReady { within: WITHIN }) }
    }

    /// Kills the daemon, so that it can tidy nothing up.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn kill_daemon(&mut self) -> io::Result<()> {
        let Some(mut daemon) = self.daemon.take() else { return Ok(()) };
        daemon.kill()?;
        daemon.wait().map(drop)
    }

    /// Asks the daemon to end, and gives what it ended with.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn stop_daemon(&mut self) -> io::Result<Option<ExitStatus>> {
        let Some(mut daemon) = self.daemon.take() else { return Ok(None) };
        kill_process(Pid::from_child(&daemon), Signal::TERM)?;
        daemon.wait().map(Some)
    }

    /// What the daemon ended with, if it has ended by itself.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn daemon_ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.daemon.as_mut().map_or(Ok(None), Child::try_wait)
    }

    /// A command with the environment in which `gpuward` and `busctl` talk to this daemon.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let ours = self.program.parent().unwrap_or(Path::new("."));
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths([ours.to_owned()].into_iter().chain(std::env::split_paths(&path))).unwrap_or(path);
        command.env("PATH", path).env("DBUS_SYSTEM_BUS_ADDRESS", self.address()).env("GPUWARD_BUS", self.address());
        command.env("GPUWARD_SIM_ROOT", self.root());
        command
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // What has ended already cannot be ended again.
        self.kill_daemon().unwrap_or_default();
        standin::end_all(self.host.path());
    }
}

/// Waits until the daemon has its name and its state is no longer `recovering`. In a thread of its own: the caller may be inside
/// a runtime already.
fn is_up(address: &str, within: Duration) -> bool {
    let address = address.to_owned();
    let waiting = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        runtime.block_on(async { tokio::time::timeout(within, poll_until_up(&address)).await }).ok()?.ok()
    });
    waiting.join().ok().flatten().is_some()
}

async fn poll_until_up(address: &str) -> zbus::Result<()> {
    const PAUSE: Duration = Duration::from_millis(10);
    let connection = Builder::address(address).build().await?;
    let bus = DBusProxy::new(&connection).await?;
    let name = manager::bus::NAME.try_into()?;
    let started = Instant::now();
    loop {
        if bus.name_has_owner(zbus::names::BusName::clone(&name)).await? {
            let manager = zbus::Proxy::new(&connection, manager::bus::NAME, "/org/gpuward1", "org.gpuward1.Manager").await?;
            match manager.get_property::<String>("HostState").await {
                Ok(state) if state != "recovering" => return Ok(()),
                Ok(_) => {}
                // The daemon may end while it is looked at; whoever waits has a limit of its own.
                Err(error) if started.elapsed() > Duration::from_secs(5) => return Err(error),
                Err(_) => {}
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Runs as the daemon of a session, until it is told to end. Its log goes to standard error.
///
/// # Errors
/// It does not start.
pub fn run_daemon(root: &Path, address: &str, program: &Path) -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().with_writer(io::stderr).with_ansi(false).init();
    let connect = standin::open(root, program)?;
    let engine = engine::Options {
        host: Host::new(root, Arc::new(SimKernel::new(root))),
        config: root.join("etc/gpuward/gpuward.toml"),
        state_dir: root.join("var/lib/gpuward"),
        run_dir: root.join("run/gpuward"),
        deadlines: Deadlines::default(),
        machines: machines::Options { hypervisor: Hypervisor::At(standin::source(root, &connect)) },
    };
    Ok(daemon::run(daemon::Options { engine, bus: Address::At(address.into()) })?)
}
