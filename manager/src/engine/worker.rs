//! A job's own thread: it may wait for the kernel and for libvirt, the engine never does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};

use vfio::{Deadlines, Host, PciAddress};

use super::{Message, Options};
use crate::failure::{ErrorKind, Failure};
use crate::id::{ClaimId, JobId};
use crate::ledger::Ledger;
use crate::view::{EventKind, JobState, Subject};

/// What a job's thread has in hand.
#[derive(Clone, Debug)]
pub struct Worker {
    /// Its job.
    pub job: JobId,
    /// What the engine is made of.
    pub options: Arc<Options>,
    /// Bundles moved at once.
    pub parallel: usize,
    /// Whether devices may be taken off the bus and found again.
    pub remove_rescan: bool,
    pub(super) engine: Sender<Message>,
    pub(super) cancel: Arc<AtomicBool>,
    pub(super) host_stops: Arc<AtomicBool>,
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Done, failed, canceled or rollback-failed.
    pub state: JobState,
    /// Why it failed.
    pub error: Option<Failure>,
    /// Claims it made.
    pub claims: Vec<ClaimId>,
    /// What happened, oldest first.
    pub events: Vec<(EventKind, Subject, BTreeMap<String, String>)>,
    /// The device that the driver it was to have did not take, where that is why it failed.
    pub driver_refused: Option<PciAddress>,
}

impl Outcome {
    /// It did what was asked.
    pub fn done() -> Self {
        Self { state: JobState::Done, error: None, claims: Vec::new(), events: Vec::new(), driver_refused: None }
    }

    /// It did not, and nothing of it is left.
    pub fn failed(error: Failure) -> Self {
        let state = if error.kind == ErrorKind::Canceled { JobState::Canceled } else { JobState::Failed };
        Self { state, error: Some(error), ..Self::done() }
    }

    /// Adds an event.
    #[must_use]
    pub fn event(mut self, kind: EventKind, subject: Subject, detail: BTreeMap<String, String>) -> Self {
        self.events.push((kind, subject, detail));
        self
    }
}

impl Worker {
    /// The host.
    pub fn host(&self) -> &Host {
        &self.options.host
    }

    /// How long stores may take.
    pub fn deadlines(&self) -> &Deadlines {
        &self.options.deadlines
    }

    /// Whether the job was canceled. A worker looks before each change.
    pub fn is_canceled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    /// Whether the host shuts down: nothing is to be given back then.
    pub fn host_stops(&self) -> bool {
        self.host_stops.load(Ordering::Relaxed)
    }

    /// Has a change of the ledger made and waits until it is durable.
    ///
    /// # Errors
    /// The ledger could not be replaced, or the engine has stopped: go no further.
    pub fn commit(&self, entry: impl FnOnce(&mut Ledger) + Send + 'static) -> Result<(), Failure> {
        self.record(entry).map(|_| ())
    }

    /// As [`Worker::commit`], and gives the ledger as it then is.
    ///
    /// # Errors
    /// As [`Worker::commit`].
    pub fn record(&self, entry: impl FnOnce(&mut Ledger) + Send + 'static) -> Result<Box<Ledger>, Failure> {
        let stopped = || Failure::new(ErrorKind::HostNotReady, "the daemon stops");
        let (reply, answer) = mpsc::sync_channel(1);
        self.engine.send(Message::Commit(Box::new(entry), reply)).map_err(|_| stopped())?;
        answer.recv().map_err(|_| stopped())?
    }

    /// Says what the job does now; `progress` from 0 to 1.
    pub fn step(&self, step: impl Into<String>, progress: f64) {
        self.say(step.into(), progress, false);
    }

    /// Says that the job undoes what it did.
    pub fn rolling_back(&self, step: impl Into<String>) {
        self.say(step.into(), 0.0, true);
    }

    fn say(&self, step: String, progress: f64, rolling_back: bool) {
        let job = self.job;
        if self.engine.send(Message::Step { job, step, progress, rolling_back }).is_err() {
            tracing::debug!(%job, "the engine has stopped");
        }
    }
}
