//! Reading what the kernel reads under a device's lock, in a child: one that waits for a stuck driver is put aside, and asked again
//! for its answer when the same file is wanted once more.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, ExitCode};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{READ_ARGUMENT, is_readable, spawn};

/// The longest file that is read: the memory map of a large process.
const LONGEST: u64 = 16 << 20;

/// Most children that wait for stuck drivers at once: beyond that a file is not asked for.
const MOST_WAITING: usize = 32;

/// Children without work that are kept.
const MOST_IDLE: usize = 2;

/// Answers paths on standard input with what is in them, until the input ends.
#[must_use]
pub fn run_read_child() -> ExitCode {
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    while let Ok(path) = receive(&mut input) {
        let (errno, content) = match read(&PathBuf::from(std::ffi::OsString::from_vec(path))) {
            Ok(content) => (0, content),
            Err(error) => (error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error()), Vec::new()),
        };
        let answered = output.write_all(&errno.to_le_bytes()).and_then(|()| send(&mut output, &content)).and_then(|()| output.flush());
        if answered.is_err() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(path)?.take(LONGEST).read_to_end(&mut content)?;
    Ok(content)
}

fn send(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(bytes)
}

fn receive(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let mut bytes = Vec::new();
    let length = u64::from(u32::from_le_bytes(length));
    let read = from.take(length).read_to_end(&mut bytes)?;
    if read as u64 == length { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// A child that reads.
#[derive(Debug)]
struct Reader {
    child: Child,
    input: ChildStdin,
    output: ChildStdout,
}

impl Reader {
    fn start(program: &Path) -> io::Result<Self> {
        let mut child = spawn(program, READ_ARGUMENT)?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(input), Some(output)) => Ok(Self { child, input, output }),
            (_, _) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn ask(&mut self, path: &Path) -> io::Result<()> {
        send(&mut self.input, path.as_os_str().as_bytes())
    }

    fn answer(&mut self) -> io::Result<io::Result<Vec<u8>>> {
        let mut errno = [0; 4];
        self.output.read_exact(&mut errno)?;
        let content = receive(&mut self.output)?;
        Ok(match i32::from_le_bytes(errno) {
            0 => Ok(content),
            errno => Err(io::Error::from_raw_os_error(errno)),
        })
    }

    /// Ends a child that waits for work.
    fn end(self) {
        let Self { mut child, input, output } = self;
        drop((input, output));
        if let Err(error) = child.wait() {
            tracing::warn!("a child that reads cannot be waited for: {error}");
        }
    }
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<Reader>,
    waiting: BTreeMap<PathBuf, Reader>,
}

/// The children that read.
#[derive(Debug)]
pub(super) struct Readers {
    program: PathBuf,
    state: Mutex<State>,
}

impl Readers {
    pub(super) fn new(program: &Path) -> Self {
        Self { program: program.to_owned(), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is in the file at `path`; `WouldBlock` where that has not come by `deadline`, or is still not there since an earlier call.
    pub(super) fn read(&self, path: &Path, deadline: Instant) -> io::Result<Vec<u8>> {
        let (asked, deadline) = {
            let mut state = self.state();
            match state.waiting.remove(path) {
                Some(reader) => (Some(reader), Instant::now()),
                None if state.waiting.len() >= MOST_WAITING => return Err(io::ErrorKind::WouldBlock.into()),
                None => (None, deadline),
            }
        };
        let mut reader = match asked {
            Some(reader) => reader,
            None => self.ask(path)?,
        };
        if !is_readable(&reader.output, Some(deadline)) {
            self.state().waiting.insert(path.to_owned(), reader);
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let answer = reader.answer()?;
        self.keep(reader);
        answer
    }

    // One that somebody has ended meanwhile is replaced.
    fn ask(&self, path: &Path) -> io::Result<Reader> {
        let idle = self.state().idle.pop();
        if let Some(mut reader) = idle {
            match reader.ask(path) {
                Ok(()) => return Ok(reader),
                Err(_) => reader.end(),
            }
        }
        let mut reader = Reader::start(&self.program)?;
        reader.ask(path).map(|()| reader)
    }

    fn keep(&self, reader: Reader) {
        let mut state = self.state();
        if state.idle.len() < MOST_IDLE {
            state.idle.push(reader);
            return;
        }
        drop(state);
        reader.end();
    }
}
