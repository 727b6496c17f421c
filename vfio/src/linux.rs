//! The kernel of this host.
//!
//! Attributes are opened for writing only, never created or truncated: `fs::write` on sysfs would turn a missing attribute
//! into EACCES. Writes that can block for ever, and reads under a device's lock, are made by child processes, so that a driver stuck
//! in the kernel costs a child and one device while the daemon lives and can restart.

mod child;
mod helper;
mod late;
mod notes;
mod reader;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

pub use child::run_store_child;
pub use reader::run_read_child;

use crate::{Kernel, LateHook, StoreError, StuckStore};
use helper::Helpers;
use late::Late;
use reader::Readers;

/// The argument by which a program is asked to run [`run_store_child`].
pub const STORE_ARGUMENT: &str = "--store";

/// The argument by which a program is asked to run [`run_read_child`].
pub const READ_ARGUMENT: &str = "--read";

/// Attributes whose write runs driver code that may wait for others, or takes the lock that such code holds. A closed list, by
/// file name.
const BLOCKING: [&str; 14] = [
    "bind",
    "unbind",
    "drivers_probe",
    "driver_override",
    "control",
    "sriov_numvfs",
    "reset",
    "reset_subordinate",
    "remove",
    "rescan",
    "create",
    "current_vgpu_type",
    "unbindLock",
    "reset_method",
];

/// The Linux kernel below a root, `/` on a host.
#[derive(Debug)]
pub struct Linux {
    root: PathBuf,
    notes: PathBuf,
    storers: Helpers,
    readers: Readers,
    late: Late,
}

impl Linux {
    /// Stores below `root`. `program` is started with [`STORE_ARGUMENT`] for writes that can block and with [`READ_ARGUMENT`] for
    /// reads that can, and kept for more of them; a child that writes notes itself in the directory `notes` (`/run/gpuward/stores`) meanwhile.
    pub fn new(root: impl Into<PathBuf>, program: impl Into<PathBuf>, notes: impl Into<PathBuf>) -> Self {
        let program = program.into();
        let (storers, readers) = (Helpers::new(&program, STORE_ARGUMENT), Readers::new(&program));
        Self { root: root.into(), notes: notes.into(), storers, readers, late: Late::default() }
    }

    fn store_in_child(&self, store: &StuckStore, deadline: Instant) -> Result<io::Result<()>, Stuck> {
        let request = child::Request { attribute: self.root.join(&store.attribute), value: store.value.clone(), notes: self.notes.clone() };
        let mut storer = match self.storers.ask(&request.encode()) {
            Ok(storer) => storer,
            Err(error) => return Ok(Err(error)),
        };
        if !is_readable(&storer.output, Some(deadline)) {
            self.late.watch_child(StuckStore { pid: storer.id(), ..store.clone() }, storer);
            return Err(Stuck);
        }
        let answer = match storer.answer() {
            Ok(answer) => answer,
            Err(error) => {
                storer.end();
                return Ok(Err(error));
            }
        };
        self.storers.keep(storer);
        Ok(answer.map(drop))
    }
}

/// The child has not answered before the deadline.
struct Stuck;

/// Whether `fd` has something to be read, or its other end was closed, before `deadline`; without one it is waited for.
fn is_readable(fd: &impl AsFd, deadline: Option<Instant>) -> bool {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::new(fd, PollFlags::IN)], timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(0) => return false,
            // What is wrong with it the read will say.
            Ok(_) | Err(_) => return true,
        }
    }
}

impl Kernel for Linux {
    fn store(&self, attribute: &Path, value: &str, deadline: Instant) -> Result<(), StoreError> {
        let blocks = attribute.file_name().is_some_and(|name| BLOCKING.iter().any(|blocking| name == *blocking));
        let store = StuckStore { attribute: attribute.into(), value: value.into(), pid: 0 };
        let stored = if blocks { self.store_in_child(&store, deadline) } else { Ok(write(&self.root.join(attribute), value)) };
        let StuckStore { attribute, value, .. } = store;
        match stored {
            Ok(Ok(())) => Ok(()),
            Ok(Err(source)) => Err(StoreError::Refused { attribute, value, source }),
            Err(Stuck) => Err(StoreError::Stuck { attribute, value }),
        }
    }

    fn read_locked(&self, path: &Path, deadline: Instant) -> io::Result<Vec<u8>> {
        self.readers.read(path, deadline)
    }

    fn stuck_stores(&self) -> Vec<StuckStore> {
        notes::living(&self.notes, &self.root)
    }

    fn on_late_store(&self, hook: LateHook) {
        self.late.tell(hook);
        // Those of a daemon that has ended.
        notes::living(&self.notes, &self.root).into_iter().for_each(|store| self.late.watch_process(store));
    }
}

/// One write of `value`, whole or not at all: sysfs takes a value in one piece.
fn write(path: &Path, value: &str) -> io::Result<()> {
    let mut file: File = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?.into();
    match file.write(value.as_bytes())? {
        written if written == value.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}
