//! The engine: one thread that decides, and owns inventory, ledger and jobs.
//!
//! Everything reaches it as a [`Message`]; everything it knows leaves it as an [`Update`]. It never waits for the kernel's stores
//! or for libvirt: a job runs in a [`Worker`]'s thread, which asks the engine for each entry in the ledger and says how it ended.
//! What a job means for the ledger is decided here, before its worker starts and after it ends.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, io};

use vfio::{Deadlines, Host, Inventory, LateStore, Uevents};

use crate::config::Config;
use crate::failure::{ErrorKind, Failure};
use crate::history;
use crate::id::{ClaimId, JobId};
use crate::ledger::Ledger;
use crate::ledger::store::{self, Lock, StoreFailed};
use crate::request::Ask;
use crate::view::{HostState, Update};

mod admit;
pub mod carry;
pub mod claims;
mod devices;
pub mod external;
mod give_back;
mod jobs;
pub mod machines;
mod pause;
mod pinned;
mod publish;
mod quarantine;
mod reboot;
mod recover;
mod restore;
pub mod sanitise;
mod shutdown;
mod stuck;
mod tenants;
mod vfs;
mod worker;

use jobs::Jobs;
use publish::Publisher;
pub use worker::{Outcome, Worker};

/// What an engine is made of.
#[derive(Clone, Debug)]
pub struct Options {
    /// The host it manages.
    pub host: Host,
    /// `gpuward.toml`; its drop-ins lie in the folder of that name with `.d`.
    pub config: PathBuf,
    /// Where the ledger lies (`/var/lib/gpuward`).
    pub state_dir: PathBuf,
    /// Where what ends with the boot lies (`/run/gpuward`): lock, journals, `owned.json`.
    pub run_dir: PathBuf,
    /// How long stores and read-backs may take.
    pub deadlines: Deadlines,
    /// What machines need.
    pub machines: machines::Options,
}

/// Why an engine does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartFailed {
    /// The run directory cannot be used or another daemon holds it.
    #[error(transparent)]
    Lock(#[from] StoreFailed),
    /// No thread.
    #[error("cannot start the engine's thread")]
    Thread(#[source] io::Error),
}

/// Where updates go: called from the engine's thread, so it must not block.
pub type Publish = Box<dyn FnMut(Update) + Send>;

/// How long the kernel's messages about one event keep coming.
const SETTLING: Duration = Duration::from_millis(200);

/// How long the engine waits for jobs to undo what they did when it is to end.
const WIND_UP: Duration = Duration::from_secs(8);

/// What reaches the engine's thread.
pub enum Message {
    /// Somebody asks.
    Ask(Ask),
    /// A worker says what it does.
    Step {
        /// Its job.
        job: JobId,
        /// What it does now, for a person.
        step: String,
        /// 0 to 1.
        progress: f64,
        /// Whether it undoes what it did.
        rolling_back: bool,
    },
    /// A worker wants something recorded before it goes on.
    Commit(Entry, SyncSender<Result<Box<Ledger>, Failure>>),
    /// A worker is done.
    Ended(JobId, Outcome),
    /// Something happened to machines.
    Machines(machines::Hint),
    /// Something happened to claims of managers that run their own domains.
    Claims(external::Hint),
    /// Something happened to the host's devices.
    Observe,
    /// A store that was stuck has returned.
    Late(LateStore),
    /// Reads the configuration again (SIGHUP).
    Reload,
    /// The host begins to shut down, or does not after all.
    HostStops(bool),
    /// The engine is to end.
    Stop,
}

/// A change of the ledger, made by the engine's thread.
pub type Entry = Box<dyn FnOnce(&mut Ledger) + Send>;

type OnStep<'a> = &'a (dyn Fn(usize, &vfio::Change) + Sync);

/// The way to a running engine. Cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    inbox: Sender<Message>,
    thread: Arc<std::sync::Mutex<Option<JoinHandle<()>>>>,
}

impl fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineHandle").finish_non_exhaustive()
    }
}

impl EngineHandle {
    /// Asks the engine. The reply comes from its thread; none comes where it has stopped.
    pub fn ask(&self, ask: Ask) {
        self.send(Message::Ask(ask));
    }

    /// Has the configuration read again.
    pub fn reload(&self) {
        self.send(Message::Reload);
    }

    /// Says that a client has left the bus, by the name that its claims were made with.
    pub fn client_left(&self, client: String) {
        self.send(Message::Claims(external::Hint::ClientLeft(client)));
    }

    /// Says that the host begins to shut down, or does not after all.
    pub fn host_stops(&self, stops: bool) {
        self.send(Message::HostStops(stops));
    }

    /// Ends the engine and waits for it. Jobs on devices are canceled and undone, as far as that takes 8 s; other jobs in hand are
    /// left as a crash would leave them: the next start mends them.
    pub fn stop(&self) {
        self.send(Message::Stop);
        let thread = self.thread.lock().ok().and_then(|mut thread| thread.take());
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the engine's thread panicked");
        }
    }

    fn send(&self, message: Message) {
        if self.inbox.send(message).is_err() {
            tracing::warn!("asked an engine that has stopped");
        }
    }
}

/// The state of the one thread that decides.
pub struct Engine {
    options: Options,
    config: Config,
    /// Why changes are refused although the ledger is good.
    config_fault: Option<String>,
    /// Why nothing may be stored.
    ledger_fault: Option<String>,
    recovery: Option<JobId>,
    recovered: bool,
    stopping: bool,
    /// The host shuts down: what ends now is cleaned up at the next boot.
    host_stops: Arc<AtomicBool>,
    /// Claims of an earlier boot that had their turn.
    settled: BTreeSet<ClaimId>,
    restoring: restore::Restoring,
    vfs_tried: vfs::Tried,
    ledger: Ledger,
    /// Pins as they lie in the state directory, once they were looked at.
    pins: Option<String>,
    inventory: Arc<Inventory>,
    jobs: Jobs,
    machines: machines::Machines,
    external: external::External,
    publisher: Publisher,
    inbox: Sender<Message>,
    lock: Lock,
}

impl Engine {
    /// Takes the lock, reads what is recorded, and starts the thread; recovery is its first job.
    ///
    /// # Errors
    /// Another daemon runs, or the run directory cannot be used. A bad ledger is no error: the engine then only reads.
    pub fn start(options: Options, publish: Publish) -> Result<EngineHandle, StartFailed> {
        let lock = store::lock(&options.run_dir)?;
        let (inbox, messages) = mpsc::channel();
        let sender = inbox.clone();
        let run = move || Self::new(options, publish, inbox, lock).run(&messages);
        let thread = thread::Builder::new().name("engine".into()).spawn(run).map_err(StartFailed::Thread)?;
        Ok(EngineHandle { inbox: sender, thread: Arc::new(std::sync::Mutex::new(Some(thread))) })
    }

    fn new(options: Options, publish: Publish, inbox: Sender<Message>, lock: Lock) -> Self {
        let (ledger, ledger_fault) = match store::load(&options.state_dir) {
            Ok(ledger) => (ledger, None),
            Err(error) => (Ledger::default(), Some(Failure::of(ErrorKind::HostNotReady, &error).to_string())),
        };
        let mut engine = Self {
            options,
            config: Config::default(),
            config_fault: None,
            ledger_fault,
            recovery: None,
            recovered: false,
            stopping: false,
            host_stops: Arc::default(),
            settled: BTreeSet::new(),
            restoring: restore::Restoring::default(),
            vfs_tried: vfs::Tried::new(),
            ledger,
            pins: None,
            inventory: Arc::default(),
            jobs: Jobs::default(),
            machines: machines::Machines::default(),
            external: external::External::default(),
            publisher: Publisher::new(publish),
            inbox,
            lock,
        };
        engine.load_config();
        machines::start(&mut engine);
        engine
    }

    fn run(mut self, messages: &Receiver<Message>) {
        if self.options.host.root() == Path::new("/") {
            listen(self.inbox.clone());
        }
        self.hear_of_late_stores();
        self.observe();
        self.publish();
        self.begin_recovery();
        while let Some(message) = self.next(messages) {
            if matches!(message, Message::Stop) {
                break;
            }
            self.handle(message);
        }
        self.wind_up(messages);
        tracing::debug!(lock = ?self.lock, "the engine ends");
    }

    // The next message; one of our own when a claim wants to be looked at before any other comes.
    fn next(&self, messages: &Receiver<Message>) -> Option<Message> {
        let Some(sleep) = external::next_look(self) else { return messages.recv().ok() };
        match messages.recv_timeout(sleep) {
            Ok(message) => Some(message),
            Err(RecvTimeoutError::Timeout) => Some(Message::Claims(external::Hint::Time)),
            Err(RecvTimeoutError::Disconnected) => None,
        }
    }

    // Jobs on devices undo what they did. Machines' jobs wait for libvirt, maybe for minutes: they are left to the next start.
    fn wind_up(&mut self, messages: &Receiver<Message>) {
        self.stopping = true;
        // Nobody would wait for what is undone, and the reboot forgets it.
        if self.host_stops() || shutdown::has_begun(&self.options.host) {
            return;
        }
        self.cancel_device_jobs();
        let until = Instant::now() + WIND_UP;
        while self.jobs.of_devices() > 0 {
            match messages.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(message) => self.handle(message),
                Err(_) => break,
            }
        }
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Ask(Ask::Submit(submission, reply)) => {
                let submitted = self.submit(submission);
                reply(submitted);
                self.dispatch();
            }
            Message::Ask(Ask::Plan(goals, reply)) => reply(self.report(&goals)),
            Message::Ask(Ask::Preflight(planned, reply)) => reply(machines::case(self, planned)),
            Message::Ask(Ask::History(device, reply)) => reply(self.history_of(device)),
            Message::Ask(Ask::Cancel(job, reply)) => reply(self.cancel(job)),
            Message::Ask(Ask::Console(machine, reply)) => machines::open_console(self, machine, reply),
            Message::Step { job, step, progress, rolling_back } => self.note_step(job, step, progress, rolling_back),
            Message::Commit(entry, reply) => {
                let committed = self.commit(entry).map(|()| Box::new(self.ledger.clone()));
                self.observe();
                self.publish();
                if reply.send(committed).is_err() {
                    tracing::warn!("a worker did not wait for its entry in the ledger");
                }
            }
            Message::Ended(job, outcome) => self.end(job, outcome),
            Message::Machines(hint) => machines::hint(self, hint),
            Message::Claims(hint) => external::hint(self, hint),
            Message::Late(late) => self.returned(&late),
            Message::Observe => {
                let before = self.inventory.generation;
                self.observe();
                if self.inventory.generation != before {
                    self.restore_vfs();
                    self.publish();
                }
            }
            Message::Reload => {
                self.load_config();
                self.publish();
            }
            Message::HostStops(stops) => self.note_shutdown(stops),
            Message::Stop => {}
        }
    }

    /// Whether the host takes changes.
    fn host_state(&self) -> HostState {
        match self.ledger_fault.as_ref().or(self.config_fault.as_ref()) {
            Some(reason) => HostState::Degraded { reason: reason.clone() },
            None if self.recovered => HostState::Ready,
            None => HostState::Recovering,
        }
    }

    /// Records a change of the ledger, and then who may use which device; changes nothing where the ledger cannot be replaced.
    ///
    /// # Errors
    /// `HostNotReady` where the ledger may not be stored, `Internal` where it cannot be.
    pub(crate) fn commit(&mut self, entry: impl FnOnce(&mut Ledger)) -> Result<(), Failure> {
        if let Some(reason) = &self.ledger_fault {
            return Err(Failure::new(ErrorKind::HostNotReady, reason));
        }
        let mut ledger = self.ledger.clone();
        entry(&mut ledger);
        let failed = |error: StoreFailed| Failure::of(ErrorKind::Internal, &error);
        store::save(&self.options.state_dir, &ledger).map_err(failed)?;
        if let Err(error) = store::save_owners(&self.options.run_dir, &ledger.owners()) {
            self.take_back();
            return Err(failed(error));
        }
        let before = std::mem::replace(&mut self.ledger, ledger);
        for (identity, entry) in history::between(&before, &self.ledger, &self.inventory) {
            history::append(&self.options.state_dir, &identity, entry);
        }
        Ok(())
    }

    // What libvirt's hook could not be told was not decided.
    fn take_back(&mut self) {
        if let Err(error) = store::save(&self.options.state_dir, &self.ledger) {
            self.ledger_fault = Some(Failure::of(ErrorKind::HostNotReady, &error).to_string());
        }
    }

    /// Looks at the host anew.
    pub(crate) fn observe(&mut self) {
        let mut seen = Inventory::observe(&self.options.host, self.inventory.generation);
        seen.remember(&self.inventory);
        if seen != *self.inventory {
            seen.generation += 1;
            self.inventory = Arc::new(seen);
        }
    }

    fn load_config(&mut self) {
        match Config::load(&self.options.config) {
            Ok(config) => {
                self.config = config;
                self.config_fault = None;
            }
            Err(faults) => {
                let lines: Vec<_> = faults.iter().map(ToString::to_string).collect();
                self.config_fault = Some(lines.join("\n"));
            }
        }
    }
}

/// Has the host looked at when the kernel says that something happened to a PCI device. The thread sleeps until then, and ends with
/// the process.
fn listen(inbox: Sender<Message>) {
    let listening = Uevents::open().and_then(|uevents| {
        thread::Builder::new().name("uevents".into()).spawn(move || {
            while uevents.wait().is_ok() {
                // One rebind is many messages.
                thread::sleep(SETTLING);
                if uevents.drain().is_err() || inbox.send(Message::Observe).is_err() {
                    break;
                }
            }
        })
    });
    if let Err(error) = listening {
        tracing::warn!("the kernel's news of devices cannot be heard ({error}): rescan after changes by hand");
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
