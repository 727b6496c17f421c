//! An engine on a simulated host, with its files beside it: what the suites start, ask and let die.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use manager::engine::{Engine, EngineHandle, Options, StartFailed};
use manager::failure::Failure;
use manager::history::{self, Entry, Page};
use manager::id::JobId;
use manager::ledger::{Ledger, store};
use manager::request::{Ask, Goal, PlanReport, Request, Submission};
use manager::view::{Event, HostState, JobView, Update, View};
use tempfile::TempDir;
use vfio::{Binding, Change, Deadlines, Inventory, PciAddress};

use crate::simhost::{BuildError, SimHost};

/// How long a test waits for what has to come.
const PATIENCE: Duration = Duration::from_secs(20);

/// A simulated host and the files of the daemon that manages it.
#[derive(Debug)]
pub struct Managed {
    /// The host.
    pub sim: SimHost,
    files: TempDir,
    name: String,
}

impl Managed {
    /// The described host `name`, managed by this configuration (without its `format`).
    ///
    /// # Errors
    /// As [`SimHost::build`].
    pub fn new(name: &str, config: &str) -> Result<Self, BuildError> {
        let files = TempDir::with_prefix_in("gpuward-files-", "/dev/shm").or_else(|_| TempDir::with_prefix("gpuward-files-"))?;
        let managed = Self { sim: SimHost::build(name)?, files, name: name.into() };
        managed.configure(config)?;
        Ok(managed)
    }

    /// The same files with another host, as after a reboot with other cards in it.
    #[must_use]
    pub fn on(self, sim: SimHost) -> Self {
        Self { sim, ..self }
    }

    /// Replaces the configuration.
    ///
    /// # Errors
    /// The file system's.
    pub fn configure(&self, config: &str) -> io::Result<()> {
        fs::write(self.files().join("gpuward.toml"), format!("format = 1\n{config}"))
    }

    /// Where `gpuward.toml`, `state` and `run` lie.
    pub fn files(&self) -> &Path {
        self.files.path()
    }

    /// What an engine for it is made of.
    pub fn options(&self) -> Options {
        Options {
            host: self.sim.host(),
            config: self.files().join("gpuward.toml"),
            state_dir: self.files().join("state"),
            run_dir: self.files().join("run"),
            deadlines: Deadlines {
                read_back: Duration::from_millis(150),
                wake: Duration::from_millis(150),
                settle: Duration::from_millis(300),
                ..Deadlines::default()
            },
            machines: Default::default(),
        }
    }

    /// Starts an engine.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start(&self) -> Result<Daemon, StartFailed> {
        Daemon::start(self.options())
    }

    /// The host and the files as they are, for a daemon that starts anew.
    #[must_use]
    pub fn restart(self) -> Self {
        Self { sim: self.sim.restart(), ..self }
    }

    /// The host after a reboot, for a daemon that starts then: its own driver has `device` again, with the knobs of a boot.
    ///
    /// # Errors
    /// The host cannot be laid or changed.
    pub fn reboot(self, device: PciAddress) -> Result<Self, Box<dyn std::error::Error>> {
        let name = self.name.clone();
        let managed = self.restart();
        let was = Binding::read(&SimHost::build(&name)?.host(), device)?.unwrap_or_default();
        Change::Binding { device, from: Binding::default(), to: was }.make(&managed.sim.host(), &Deadlines::default())?;
        managed.sim.set(format!("sys/bus/pci/devices/{device}/d3cold_allowed"), "1")?;
        managed.sim.set("proc/sys/kernel/random/boot_id", &uuid::Uuid::new_v4().to_string())?;
        Ok(managed.restart())
    }

    /// What befell a device, newest first.
    ///
    /// # Panics
    /// There is no such device, or its history cannot be read.
    pub fn history(&self, device: PciAddress) -> Vec<Entry> {
        let inventory = Inventory::observe(&self.sim.host(), 0);
        let recorded = self.ledger().ok().and_then(|ledger| Some(ledger.devices.get(&device)?.identity.clone()));
        let identity = recorded.or_else(|| Some(inventory.devices.get(&device)?.identity.clone()));
        let identity = identity.unwrap_or_else(|| panic!("{device} is not there"));
        let page = Page { limit: usize::MAX, before: None };
        history::read(&self.files().join("state"), &identity, page).unwrap_or_else(|error| panic!("{identity}: {error}"))
    }

    /// The ledger on disk.
    ///
    /// # Errors
    /// It cannot be used.
    pub fn ledger(&self) -> Result<Ledger, store::StoreFailed> {
        store::load(&self.files().join("state"))
    }
}

#[derive(Debug, Default)]
struct Seen {
    view: Arc<View>,
    events: Vec<Event>,
    ended: Vec<JobId>,
}

/// A running engine and everything it published.
#[derive(Debug)]
pub struct Daemon {
    engine: EngineHandle,
    seen: Arc<(Mutex<Seen>, Condvar)>,
}

impl Daemon {
    /// Starts an engine.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start(options: Options) -> Result<Self, StartFailed> {
        let seen: Arc<(Mutex<Seen>, Condvar)> = Arc::default();
        let shared = Arc::clone(&seen);
        let publish = move |update: Update| {
            let mut seen = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
            seen.view = update.view;
            seen.events.extend(update.events);
            seen.ended.extend(update.ended);
            shared.1.notify_all();
        };
        Ok(Self { engine: Engine::start(options, Box::new(publish))?, seen })
    }

    /// The engine.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, holds: impl Fn(&Seen) -> bool) -> MutexGuard<'_, Seen> {
        let (seen, timeout) =
            self.seen.1.wait_timeout_while(self.seen(), PATIENCE, |seen| !holds(seen)).unwrap_or_else(PoisonError::into_inner);
        assert!(!timeout.timed_out(), "what was waited for did not come: {:#?}", seen.view.jobs);
        seen
    }

    /// The view published last.
    pub fn view(&self) -> Arc<View> {
        self.seen().view.clone()
    }

    /// Everything that happened so far.
    pub fn events(&self) -> Vec<Event> {
        self.seen().events.clone()
    }

    /// The first view from now for which this holds.
    pub fn until(&self, holds: impl Fn(&View) -> bool) -> Arc<View> {
        self.wait(|seen| holds(&seen.view)).view.clone()
    }

    /// The first view that takes changes.
    pub fn ready(&self) -> Arc<View> {
        self.until(|view| view.host_state == HostState::Ready)
    }

    /// Asks for a change, as root.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn submit(&self, request: Request) -> Result<JobId, Failure> {
        self.submit_as(Submission { request, uid: 0, request_id: String::new(), if_generation: None })
    }

    /// Asks for a change.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn submit_as(&self, submission: Submission) -> Result<JobId, Failure> {
        self.ask(|reply| Ask::Submit(submission, reply))
    }

    /// Asks what would be done.
    ///
    /// # Errors
    /// The engine's.
    pub fn plan(&self, goals: &[Goal]) -> Result<PlanReport, Failure> {
        self.ask(|reply| Ask::Plan(goals.to_vec(), reply))
    }

    /// Cancels a job.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn cancel(&self, job: JobId) -> Result<(), Failure> {
        self.ask(|reply| Ask::Cancel(job, reply))
    }

    fn ask<T: Send + 'static>(&self, ask: impl FnOnce(manager::request::Reply<T>) -> Ask) -> Result<T, Failure> {
        let (sender, answer) = mpsc::sync_channel(1);
        self.engine.ask(ask(Box::new(move |result| sender.send(result).unwrap_or_default())));
        answer.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("the engine does not answer"))
    }

    /// The job once its end was told.
    pub fn finish(&self, job: JobId) -> JobView {
        self.wait(|seen| seen.ended.contains(&job)).view.jobs[&job].clone()
    }

    /// Carries out goals and waits for the job's end.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn apply(&self, goals: &[Goal]) -> Result<JobView, Failure> {
        let job = self.submit(Request::Apply { goals: goals.to_vec(), plan_digest: None })?;
        Ok(self.finish(job))
    }

    /// Ends the engine. A job in hand is left where it is.
    pub fn stop(self) {
        self.engine.stop();
    }
}

/// From the host into the pool.
pub fn assign(device: PciAddress) -> Goal {
    Goal::Assign { device, force: false }
}

/// From the pool back to the host.
pub fn release(device: PciAddress) -> Goal {
    Goal::Release { device }
}
