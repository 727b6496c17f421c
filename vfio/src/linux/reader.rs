//! Reading what the kernel reads under a lock that a stuck driver may hold, in a child: one that waits is put aside, and asked again for
//! its answer when the same file is wanted once more.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::helper::{self, Helper, Helpers};
use super::{READ_ARGUMENT, is_readable};

/// The longest file that is read: the memory map of a large process.
const LONGEST: u64 = 16 << 20;

/// Most children that wait for stuck drivers at once: beyond that a file is not asked for.
const MOST_WAITING: usize = 32;

/// Answers paths on standard input with what is in them, until the input ends.
#[must_use]
pub fn run_read_child() -> ExitCode {
    let served = helper::serve(|path| {
        let mut content = Vec::new();
        File::open(PathBuf::from(std::ffi::OsString::from_vec(path)))?.take(LONGEST).read_to_end(&mut content)?;
        Ok(content)
    });
    if served.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The children that read.
#[derive(Debug)]
pub(super) struct Readers {
    readers: Helpers,
    waiting: Mutex<BTreeMap<PathBuf, Helper>>,
}

impl Readers {
    pub(super) fn new(program: &Path) -> Self {
        Self { readers: Helpers::new(program, READ_ARGUMENT), waiting: Mutex::default() }
    }

    fn waiting(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Helper>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is in the file at `path`; `WouldBlock` where that has not come by `deadline`, or is still not there since an earlier call.
    pub(super) fn read(&self, path: &Path, deadline: Instant) -> io::Result<Vec<u8>> {
        let (asked, deadline) = {
            let mut waiting = self.waiting();
            match waiting.remove(path) {
                Some(reader) => (Some(reader), Instant::now()),
                None if waiting.len() >= MOST_WAITING => return Err(io::ErrorKind::WouldBlock.into()),
                None => (None, deadline),
            }
        };
        let mut reader = match asked {
            Some(reader) => reader,
            None => self.readers.ask(path.as_os_str().as_bytes())?,
        };
        if !is_readable(&reader.output, Some(deadline)) {
            self.waiting().insert(path.to_owned(), reader);
            return Err(io::ErrorKind::WouldBlock.into());
        }
        match reader.answer() {
            Ok(answer) => {
                self.readers.keep(reader);
                answer
            }
            Err(error) => {
                reader.end();
                Err(error)
            }
        }
    }
}
