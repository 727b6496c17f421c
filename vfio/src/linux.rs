//! The kernel of this host.
//!
//! Attributes are opened for writing only, never created or truncated: `fs::write` on sysfs would turn a missing attribute
//! into EACCES. Writes that can block for ever are made by a child process, so that a driver stuck in the kernel costs one
//! child and one device while the daemon lives and can restart.

mod child;

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

pub use child::run_store_child;

use crate::{Kernel, StoreError};

/// The argument by which a program is asked to run [`run_store_child`].
pub const STORE_ARGUMENT: &str = "--store";

/// Attributes whose write runs driver code that may wait for others. A closed list, by file name.
const BLOCKING: [&str; 10] =
    ["bind", "unbind", "drivers_probe", "sriov_numvfs", "reset", "remove", "rescan", "create", "current_vgpu_type", "unbindLock"];

/// The Linux kernel below a root, `/` on a host.
#[derive(Debug)]
pub struct Linux {
    root: PathBuf,
    program: PathBuf,
    notes: PathBuf,
    late: Mutex<Vec<Child>>,
}

impl Linux {
    /// Stores below `root`. `program` is started with [`STORE_ARGUMENT`] for writes that can block; such a child notes itself in
    /// the directory `notes` (`/run/gpuward/stores`) while it writes.
    pub fn new(root: impl Into<PathBuf>, program: impl Into<PathBuf>, notes: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), program: program.into(), notes: notes.into(), late: Mutex::default() }
    }

    fn store_in_child(&self, attribute: &Path, value: &str, deadline: Instant) -> Result<io::Result<()>, Stuck> {
        self.reap();
        let started = child::Request { attribute: self.root.join(attribute), value: value.to_owned(), notes: self.notes.clone() };
        let mut child = match self.start(&started) {
            Ok(child) => child,
            Err(error) => return Ok(Err(error)),
        };
        match answer(&mut child, deadline) {
            Some(answer) => Ok(child.wait().and(answer)),
            None => {
                self.late.lock().unwrap_or_else(PoisonError::into_inner).push(child);
                Err(Stuck)
            }
        }
    }

    fn start(&self, request: &child::Request) -> io::Result<Child> {
        let mut child = Command::new(&self.program)
            .arg(STORE_ARGUMENT)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        // The pipe is closed after the request: the child reads to the end.
        child.stdin.take().map_or(Ok(()), |mut pipe| pipe.write_all(&request.encode()))?;
        Ok(child)
    }

    // Children that answered late are collected when the next one starts; none is ever killed.
    fn reap(&self) {
        let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        late.retain_mut(|child| !matches!(child.try_wait(), Ok(Some(_))));
    }
}

/// The child has not answered before the deadline.
struct Stuck;

/// What the child answers before `deadline`; `None` where it does not.
fn answer(child: &mut Child, deadline: Instant) -> Option<io::Result<()>> {
    let mut pipe = child.stdout.take()?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 });
        match poll(&mut [PollFd::new(&pipe, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return None,
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Some(Err(errno.into())),
        }
    }
    let mut errno = [0; 4];
    Some(pipe.read_exact(&mut errno).and_then(|()| match i32::from_le_bytes(errno) {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }))
}

impl Kernel for Linux {
    fn store(&self, attribute: &Path, value: &str, deadline: Instant) -> Result<(), StoreError> {
        let blocks = attribute.file_name().is_some_and(|name| BLOCKING.iter().any(|blocking| name == *blocking));
        let stored = if blocks { self.store_in_child(attribute, value, deadline) } else { Ok(write(&self.root.join(attribute), value)) };
        match stored {
            Ok(Ok(())) => Ok(()),
            Ok(Err(source)) => Err(StoreError::Refused { attribute: attribute.into(), value: value.into(), source }),
            Err(Stuck) => Err(StoreError::Stuck { attribute: attribute.into(), value: value.into() }),
        }
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
