//! The kernel of a simulated host: answers stores by the [`super::rules`], and fails, hangs or dies where a test says so.
//!
//! What it knows is the tree on disk, so a process that starts anew on the same root finds the host as it was. Each store runs in
//! a thread of its own, as the real one runs in a child: one that blocks holds the function's lock, and its effect comes late.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs;
use std::io;
use std::panic;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use vfio::{Kernel, LateHook, LateStore, StoreError, StuckStore, UnitAsk, UnitError};

use super::rules::Attribute;
use super::tree::Tree;
use super::units;

/// On which side of a store's effect the process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// The store has not happened.
    Before,
    /// The store has happened, nobody was told.
    After,
}

/// What a store is answered with instead of the kernel's own answer.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Fail(Errno),
    Hang,
    Die(Death),
}

/// Which stores a fault hits.
#[derive(Clone, Debug)]
enum When {
    Nth(usize),
    From(usize),
    Ending(String),
}

/// The panic of a process that dies at a store. Caught by [`survives`](super::survives).
#[derive(Debug)]
pub(super) struct Died;

#[derive(Default)]
struct State {
    hook: Option<LateHook>,
    stored: Vec<(PathBuf, String)>,
    faults: Vec<(When, Fault)>,
    armed_at: usize,
    locked: HashSet<String>,
    /// Reads that wait for a lock.
    waiting: HashSet<PathBuf>,
    hung: usize,
    started: usize,
    is_dead: bool,
    pause: Duration,
    /// Stores whose deadline has passed, by the number of their thread.
    late: BTreeMap<usize, StuckStore>,
}

struct Shared {
    tree: Tree,
    state: Mutex<State>,
    changed: Condvar,
    // Two rules never move the tree at once: the kernel's own locks are finer, what they guard is not.
    moving: Mutex<()>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("root", &self.tree.root()).finish_non_exhaustive()
    }
}

/// The kernel of a simulated host. Its faults count stores from the last call that set one: the next store is number 1.
#[derive(Clone, Debug)]
pub struct SimKernel {
    shared: Arc<Shared>,
}

impl SimKernel {
    /// The kernel of the host that was laid below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let shared = Shared { tree: Tree::new(root), state: Mutex::default(), changed: Condvar::new(), moving: Mutex::new(()) };
        Self { shared: Arc::new(shared) }
    }

    /// The stores it was asked for, also those it refused, oldest first.
    pub fn stored(&self) -> Vec<(PathBuf, String)> {
        self.shared.state().stored.clone()
    }

    /// The names of the attributes it was asked to store into (`driver_override`, `bind`), oldest first.
    pub fn stored_names(&self) -> Vec<String> {
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        self.shared.state().stored.iter().map(|(path, _)| name(path)).collect()
    }

    /// Refuses the `nth` store from now with `errno`.
    pub fn fail_at(&self, nth: usize, errno: Errno) {
        self.arm(When::Nth(nth), Fault::Fail(errno));
    }

    /// Refuses the `nth` store from now and all after it with `errno`.
    pub fn fail_from(&self, nth: usize, errno: Errno) {
        self.arm(When::From(nth), Fault::Fail(errno));
    }

    /// Refuses every store into an attribute whose path ends so (`nvidia/bind`) with `errno`.
    pub fn fail_on(&self, ending: &str, errno: Errno) {
        self.arm(When::Ending(ending.into()), Fault::Fail(errno));
    }

    /// Lets the `nth` store from now block, until [`SimKernel::let_go`] or its deadline.
    pub fn hang_at(&self, nth: usize) {
        self.arm(When::Nth(nth), Fault::Hang);
    }

    /// Lets every store into an attribute whose path ends so block, until [`SimKernel::let_go`] or its deadline.
    pub fn hang_on(&self, ending: &str) {
        self.arm(When::Ending(ending.into()), Fault::Hang);
    }

    /// Lets the process die at the `nth` store from now: see [`super::survives`].
    pub fn die_at(&self, nth: usize, death: Death) {
        self.arm(When::Nth(nth), Fault::Die(death));
    }

    /// Lets every store take so long.
    pub fn slow(&self, pause: Duration) {
        self.shared.state().pause = pause;
    }

    /// Forgets all faults, and the stores recorded so far.
    pub fn calm(&self) {
        let mut state = self.shared.state();
        state.faults.clear();
        state.stored.clear();
        state.armed_at = 0;
    }

    /// Lets every store go on that blocks by [`SimKernel::hang_at`], and returns when their effects have come.
    pub fn let_go(&self) {
        let mut state = self.shared.state();
        state.faults.retain(|(_, fault)| !matches!(fault, Fault::Hang));
        self.shared.changed.notify_all();
        while state.hung > 0 {
            state = self.shared.wait(state);
        }
    }

    fn arm(&self, when: When, fault: Fault) {
        let mut state = self.shared.state();
        state.armed_at = state.stored.len();
        state.faults.push((when, fault));
    }

    /// Records a store and says what is to happen to it.
    fn admit(&self, attribute: &Path, value: &str) -> Option<Fault> {
        let mut state = self.shared.state();
        if state.is_dead {
            drop(state);
            panic::resume_unwind(Box::new(Died));
        }
        state.stored.push((attribute.to_owned(), value.to_owned()));
        let nth = state.stored.len() - state.armed_at;
        let hits = |when: &When| match when {
            When::Nth(wanted) => nth == *wanted,
            When::From(first) => nth >= *first,
            When::Ending(ending) => attribute.ends_with(ending),
        };
        state.faults.iter().find(|(when, _)| hits(when)).map(|(_, fault)| *fault)
    }

    // A process that is dead stores nothing more, whichever of its threads asks.
    fn die(&self) -> ! {
        self.shared.state().is_dead = true;
        panic::resume_unwind(Box::new(Died))
    }

    /// Runs the store in its own thread; `None` where it has not answered by `deadline`.
    fn run(&self, attribute: &Path, value: &str, hangs: bool, deadline: Instant) -> Option<Result<(), Errno>> {
        let (answer, answered) = mpsc::channel();
        let store = StuckStore { attribute: attribute.to_owned(), value: value.to_owned(), pid: 0 };
        let (shared, of_thread) = (Arc::clone(&self.shared), store.clone());
        let number = {
            let mut state = shared.state();
            state.hung += usize::from(hangs);
            state.started += 1;
            state.started
        };
        thread::spawn(move || {
            let stored = shared.store(&of_thread.attribute, &of_thread.value, hangs);
            shared.answer(number, stored, &answer);
        });
        answered.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok().or_else(|| {
            let mut state = self.shared.state();
            // It may have answered just now.
            answered.try_recv().ok().or_else(|| {
                state.late.insert(number, store);
                None
            })
        })
    }
}

impl Kernel for SimKernel {
    fn store(&self, attribute: &Path, value: &str, deadline: Instant) -> Result<(), StoreError> {
        let fault = self.admit(attribute, value);
        let answer = match fault {
            Some(Fault::Fail(errno)) => Some(Err(errno)),
            Some(Fault::Die(Death::Before)) => self.die(),
            Some(Fault::Die(Death::After)) => {
                self.run(attribute, value, false, deadline);
                self.die()
            }
            Some(Fault::Hang) => self.run(attribute, value, true, deadline),
            None => self.run(attribute, value, false, deadline),
        };
        let (attribute, value) = (attribute.to_owned(), value.to_owned());
        match answer {
            Some(Ok(())) => Ok(()),
            Some(Err(errno)) => Err(StoreError::Refused { attribute, value, source: io::Error::from(errno) }),
            None => Err(StoreError::Stuck { attribute, value }),
        }
    }

    fn read_locked(&self, path: &Path, deadline: Instant) -> io::Result<Vec<u8>> {
        let device = path.parent().and_then(|dir| self.shared.tree.resolve(dir.strip_prefix(self.shared.tree.root()).ok()?));
        let device = device.unwrap_or_default().to_string_lossy().into_owned();
        let mut state = self.shared.state();
        // One that waits already is not waited for again.
        let deadline = if state.waiting.contains(path) { Instant::now() } else { deadline };
        while state.locked.contains(&device) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.waiting.insert(path.to_owned());
                return Err(io::ErrorKind::WouldBlock.into());
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.waiting.remove(path);
        drop(state);
        fs::read(path)
    }

    fn stuck_stores(&self) -> Vec<StuckStore> {
        self.shared.state().late.values().cloned().collect()
    }

    fn on_late_store(&self, hook: LateHook) {
        self.shared.state().hook = Some(hook);
    }

    fn unit_is_active(&self, unit: &str, _deadline: Instant) -> Result<bool, UnitError> {
        Ok(units::is_active(&self.shared.tree, unit))
    }

    fn is_shutting_down(&self, _deadline: Instant) -> Result<bool, UnitError> {
        Ok(self.shared.tree.exists(units::SHUTTING_DOWN))
    }

    // Counted, failed and killed as a store into `unit/<name>`.
    fn unit(&self, ask: &UnitAsk, _deadline: Instant) -> Result<(), UnitError> {
        let (verb, work) = units::work(&self.shared.tree, ask);
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| UnitError { verb, unit: ask.unit().into(), source };
        match self.admit(&Path::new("unit").join(ask.unit()), verb) {
            Some(Fault::Fail(errno)) => Err(failed(io::Error::from(errno).into())),
            Some(Fault::Hang) => Err(failed("it was not done in time".into())),
            Some(Fault::Die(Death::Before)) => self.die(),
            Some(Fault::Die(Death::After)) => {
                work().map_err(|error| failed(error.into()))?;
                self.die()
            }
            None => work().map_err(|error| failed(error.into())),
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Under one lock with the caller that gives up: an answer is in time, or told as late.
    fn answer(&self, number: usize, stored: Result<(), Errno>, answer: &mpsc::Sender<Result<(), Errno>>) {
        let told = {
            let mut state = self.state();
            // Nobody listens any more once the deadline has passed.
            answer.send(stored).unwrap_or_default();
            let late = state.late.remove(&number);
            state.hook.clone().zip(late)
        };
        if let Some((hook, store)) = told {
            hook(LateStore { store, errno: Some(stored.err().map_or(0, |errno| errno.raw_os_error())) });
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn store(&self, path: &Path, value: &str, hangs: bool) -> Result<(), Errno> {
        let pause = self.state().pause;
        thread::sleep(pause);
        let answer = self.locked(path, value, hangs);
        if hangs {
            self.state().hung -= 1;
            self.changed.notify_all();
        }
        answer
    }

    fn locked(&self, path: &Path, value: &str, hangs: bool) -> Result<(), Errno> {
        let attribute = Attribute::open(&self.tree, path)?;
        let device = attribute.locks(&self.tree, value);
        if let Some(device) = &device {
            self.lock(device);
        }
        if hangs {
            self.block();
        }
        while attribute.waits_for(&self.tree, value).iter().any(|node| self.tree.is_open(Path::new(node))) {
            thread::sleep(Duration::from_millis(5));
        }
        // What waited may have outlived its host.
        if !self.tree.root().exists() {
            return Err(Errno::IO);
        }
        let answer = {
            let _moving = self.moving.lock().unwrap_or_else(PoisonError::into_inner);
            attribute.store(&self.tree, value)
        };
        if let Some(device) = &device {
            self.state().locked.remove(device);
            self.changed.notify_all();
        }
        answer
    }

    /// `device_lock`: whoever comes second waits, as long as it takes.
    fn lock(&self, device: &str) {
        let mut state = self.state();
        while !state.locked.insert(device.to_owned()) {
            state = self.wait(state);
        }
    }

    fn block(&self) {
        let mut state = self.state();
        while state.faults.iter().any(|(_, fault)| matches!(fault, Fault::Hang)) {
            state = self.wait(state);
        }
    }
}
