//! The connection and the thread that makes it anew when it ends.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use virt::connect::Connect;
use virt::error::Error;

use super::events::{Callbacks, Listener, start_event_loop};
use super::facts::HostFacts;
use super::{LibvirtError, Notice, Notify, Source};

/// The first pause between two attempts to connect; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Calls without an answer after which a connection is given up: each of them keeps a thread.
const MOST_UNANSWERED: usize = 8;

/// The state of the connection, shared by its thread and the callers.
pub(super) struct Link {
    source: Source,
    state: Arc<Mutex<State>>,
    wake: Sender<Wake>,
    unanswered: AtomicUsize,
}

enum State {
    Up(Connect, HostFacts),
    Down(String),
}

enum Wake {
    /// The connection is of no use any more.
    Lost(String),
    /// Somebody wants it: try now.
    Wanted,
    /// The last handle is gone.
    Quit,
}

impl Link {
    pub(super) fn start(source: Source, notify: Notify) -> Arc<Self> {
        let (wake, woken) = mpsc::channel();
        let state = Arc::new(Mutex::new(State::Down("not connected yet".into())));
        let keeper = Keeper { source: source.clone(), state: state.clone(), wake: wake.clone(), woken, notify };
        if let Err(error) = thread::Builder::new().name("virt-link".into()).spawn(move || keeper.run()) {
            *lock(&state) = State::Down(format!("no thread for the connection: {error}"));
        }
        Arc::new(Self { source, state, wake, unanswered: AtomicUsize::new(0) })
    }

    pub(super) fn source(&self) -> &Source {
        &self.source
    }

    pub(super) fn up(&self) -> Result<(Connect, HostFacts), LibvirtError> {
        let reason = match &*lock(&self.state) {
            State::Up(connect, facts) => return Ok((connect.clone(), *facts)),
            State::Down(reason) => reason.clone(),
        };
        self.tell(Wake::Wanted);
        Err(LibvirtError::NotConnected { uri: uri(&self.source), reason })
    }

    /// A call had no answer. A service that answers none of them is connected to anew: a new one may have taken its place, and
    /// while there is no connection no more threads are left behind.
    pub(super) fn note_unanswered(&self) {
        if self.unanswered.fetch_add(1, Ordering::Relaxed) + 1 >= MOST_UNANSWERED {
            self.unanswered.store(0, Ordering::Relaxed);
            self.tell(Wake::Lost(format!("libvirt has not answered {MOST_UNANSWERED} calls")));
        }
    }

    fn tell(&self, wake: Wake) {
        if self.wake.send(wake).is_err() {
            tracing::error!("the thread of the connection to libvirt has ended");
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.tell(Wake::Quit);
    }
}

struct Keeper {
    source: Source,
    state: Arc<Mutex<State>>,
    wake: Sender<Wake>,
    woken: Receiver<Wake>,
    notify: Notify,
}

impl Keeper {
    fn run(self) {
        start_event_loop();
        let mut pause = FIRST_PAUSE;
        loop {
            let goes_on = match self.open() {
                Ok((callbacks, connect, facts)) => {
                    pause = FIRST_PAUSE;
                    self.up(callbacks, connect, facts) && self.rest(pause)
                }
                Err(error) => {
                    self.down(error.message().to_owned());
                    self.rest(pause)
                }
            };
            if !goes_on {
                return;
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn open(&self) -> Result<(Callbacks, Connect, HostFacts), Error> {
        let connect = match &self.source {
            Source::Uri(uri) => Connect::open(Some(uri))?,
            Source::Open(connect, _) => connect.clone(),
        };
        let (notify, wake) = (self.notify.clone(), self.wake.clone());
        let changed = Box::new(move |uuid| notify(Notice::Changed(uuid)));
        let notify = self.notify.clone();
        let rebooted = Box::new(move |uuid| notify(Notice::Rebooted(uuid)));
        let closed = Box::new(move |reason: &'static str| {
            if wake.send(Wake::Lost(reason.into())).is_err() {
                tracing::debug!("libvirt closed a connection that nobody uses");
            }
        });
        // Callbacks before anything is listed: what changes in between is told.
        let callbacks = Callbacks::register(&connect, Listener { changed, rebooted, closed })?;
        let facts = HostFacts::read(&connect)?;
        Ok((callbacks, connect, facts))
    }

    // Returns when the connection is of no use any more: whether to make it anew.
    fn up(&self, callbacks: Callbacks, connect: Connect, facts: HostFacts) -> bool {
        *lock(&self.state) = State::Up(connect, facts);
        (self.notify)(Notice::Connected(facts));
        loop {
            match self.woken.recv() {
                Ok(Wake::Wanted) => {}
                Ok(Wake::Lost(reason)) => {
                    self.down(reason);
                    drop(callbacks);
                    return true;
                }
                Ok(Wake::Quit) | Err(mpsc::RecvError) => return false,
            }
        }
    }

    fn down(&self, reason: String) {
        let before = std::mem::replace(&mut *lock(&self.state), State::Down(reason.clone()));
        let news = match before {
            State::Up(..) => true,
            State::Down(before) => before != reason,
        };
        if news {
            tracing::warn!("no connection to libvirt at {}: {reason}", uri(&self.source));
            (self.notify)(Notice::Lost { reason });
        }
    }

    fn rest(&self, pause: Duration) -> bool {
        match self.woken.recv_timeout(pause) {
            Ok(Wake::Wanted | Wake::Lost(_)) | Err(RecvTimeoutError::Timeout) => true,
            Ok(Wake::Quit) | Err(RecvTimeoutError::Disconnected) => false,
        }
    }
}

fn uri(source: &Source) -> String {
    match source {
        Source::Uri(uri) => uri.clone(),
        Source::Open(..) => "the test driver".into(),
    }
}

// A panic elsewhere while the lock is held leaves a whole value behind: it is replaced in one assignment.
fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
