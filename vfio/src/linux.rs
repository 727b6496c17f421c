//! The kernel of this host.
//!
//! Attributes are opened for writing only, never created or truncated: `fs::write` on sysfs would turn a missing attribute
//! into EACCES. Writes that can block for ever, and reads under a device's lock, are made by child processes, so that a driver stuck
//! in the kernel costs a child and one device while the daemon lives and can restart.

mod child;
mod late;
mod notes;
mod reader;

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

pub use child::run_store_child;
pub use reader::run_read_child;

use crate::{Kernel, LateHook, StoreError, StuckStore};
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
    program: PathBuf,
    notes: PathBuf,
    readers: Readers,
    late: Late,
}

impl Linux {
    /// Stores below `root`. `program` is started with [`STORE_ARGUMENT`] for writes that can block and with [`READ_ARGUMENT`] for
    /// reads that can; a child that writes notes itself in the directory `notes` (`/run/gpuward/stores`) meanwhile.
    pub fn new(root: impl Into<PathBuf>, program: impl Into<PathBuf>, notes: impl Into<PathBuf>) -> Self {
        let (root, program, notes) = (root.into(), program.into(), notes.into());
        Self { late: Late::default(), readers: Readers::new(&program), root, program, notes }
    }

    fn store_in_child(&self, store: &StuckStore, deadline: Instant) -> Result<io::Result<()>, Stuck> {
        let request = child::Request { attribute: self.root.join(&store.attribute), value: store.value.clone(), notes: self.notes.clone() };
        let (mut child, mut pipe) = match start(&self.program, STORE_ARGUMENT, &request.encode()) {
            Ok(started) => started,
            Err(error) => return Ok(Err(error)),
        };
        if !is_readable(&pipe, Some(deadline)) {
            let store = StuckStore { pid: child.id(), ..store.clone() };
            self.late.watch_child(store, child, pipe);
            return Err(Stuck);
        }
        Ok(child.wait().and(answer(&mut pipe)))
    }
}

/// The child has not answered before the deadline.
struct Stuck;

/// Starts a child of `program` with a request on its standard input, which is closed after it.
fn start(program: &Path, argument: &str, request: &[u8]) -> io::Result<(Child, ChildStdout)> {
    let mut child = spawn(program, argument)?;
    let sent = child.stdin.take().map_or(Ok(()), |mut pipe| pipe.write_all(request));
    match (sent, child.stdout.take()) {
        (Ok(()), Some(pipe)) => Ok((child, pipe)),
        (sent, _) => {
            // It reads the end of its input, and ends by itself.
            child.wait()?;
            sent.and(Err(io::ErrorKind::BrokenPipe.into()))
        }
    }
}

fn spawn(program: &Path, argument: &str) -> io::Result<Child> {
    let mut command = Command::new(program);
    command.arg(argument).env_clear().current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
}

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

/// The errno that a store's child answers.
fn answer(pipe: &mut ChildStdout) -> io::Result<()> {
    let mut errno = [0; 4];
    pipe.read_exact(&mut errno)?;
    match i32::from_le_bytes(errno) {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
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
