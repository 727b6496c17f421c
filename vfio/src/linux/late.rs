//! Waiting for stores that have not returned in time, and telling how they ended. Each costs a sleeping thread.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::helper::Helper;
use super::{is_readable, notes};
use crate::{LateHook, LateStore, StuckStore};

#[derive(Default)]
struct State {
    hook: Option<LateHook>,
    watched: BTreeSet<u32>,
    /// Ended before there was a hook.
    untold: Vec<LateStore>,
}

/// Who waits for late stores.
#[derive(Clone, Default)]
pub(super) struct Late(Arc<Mutex<State>>);

impl fmt::Debug for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Late").field("watched", &self.state().watched).finish_non_exhaustive()
    }
}

impl Late {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells `hook` of stores that end from now on, and of those that have ended.
    pub(super) fn tell(&self, hook: LateHook) {
        let untold = {
            let mut state = self.state();
            state.hook = Some(hook.clone());
            std::mem::take(&mut state.untold)
        };
        untold.into_iter().for_each(|late| hook(late));
    }

    /// Waits for a child of this process.
    pub(super) fn watch_child(&self, store: StuckStore, mut storer: Helper) {
        self.watch(store, move |_| {
            is_readable(&storer.output, None);
            let errno = match storer.answer() {
                Ok(stored) => stored.map_or_else(|error| error.raw_os_error(), |_| Some(0)),
                Err(_) => None,
            };
            storer.end();
            errno
        });
    }

    /// Waits for a process that an earlier daemon started.
    pub(super) fn watch_process(&self, store: StuckStore) {
        let start = notes::start_of(store.pid);
        self.watch(store, move |store| {
            let pid = Pid::from_raw(store.pid.cast_signed())?;
            let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
            // Between its note and now it may have ended, and another one may have its id.
            if start.is_some() && notes::start_of(store.pid) == start {
                is_readable(&process, None);
            }
            None
        });
    }

    fn watch(&self, store: StuckStore, wait: impl FnOnce(&StuckStore) -> Option<i32> + Send + 'static) {
        if !self.state().watched.insert(store.pid) {
            return;
        }
        let (late, pid) = (self.clone(), store.pid);
        let run = move || {
            let errno = wait(&store);
            late.ended(LateStore { store, errno });
        };
        if let Err(error) = thread::Builder::new().name("late-store".into()).spawn(run) {
            self.state().watched.remove(&pid);
            tracing::error!(pid, "the end of a store that is stuck will not be noticed: {error}");
        }
    }

    fn ended(&self, late: LateStore) {
        let hook = {
            let mut state = self.state();
            state.watched.remove(&late.store.pid);
            let hook = state.hook.clone();
            if hook.is_none() {
                state.untold.push(late.clone());
            }
            hook
        };
        if let Some(hook) = hook {
            hook(late);
        }
    }
}
