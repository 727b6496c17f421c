//! Child processes that do for the daemon what may wait for a driver: asked and answered in frames over their pipes, one thing at a
//! time, and kept for the next one. A frame is a length as four bytes, little-endian, and so many bytes.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Children without work that are kept.
const MOST_IDLE: usize = 4;

pub(super) fn send(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    to.write_all(&[&length.to_le_bytes(), bytes].concat())
}

pub(super) fn receive(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let mut bytes = Vec::new();
    let length = u64::from(u32::from_le_bytes(length));
    let read = from.take(length).read_to_end(&mut bytes)?;
    if read as u64 == length { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Answers each frame on standard input with what `work` makes of it, an errno and a frame, until the input ends.
pub(super) fn serve(work: impl Fn(Vec<u8>) -> io::Result<Vec<u8>>) -> io::Result<()> {
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    while let Ok(asked) = receive(&mut input) {
        let (errno, content) = match work(asked) {
            Ok(content) => (0, content),
            Err(error) => (error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error()), Vec::new()),
        };
        output.write_all(&errno.to_le_bytes())?;
        send(&mut output, &content)?;
        output.flush()?;
    }
    Ok(())
}

/// A child that has work, or waits for it.
#[derive(Debug)]
pub(super) struct Helper {
    child: Child,
    input: ChildStdin,
    pub(super) output: ChildStdout,
}

impl Helper {
    fn start(program: &Path, argument: &str) -> io::Result<Self> {
        let mut command = Command::new(program);
        command.arg(argument).env_clear().current_dir("/");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(input), Some(output)) => Ok(Self { child, input, output }),
            (_, _) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Its process id.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it answers, once there is something to be read.
    ///
    /// # Errors
    /// Outside: it has ended without an answer. Inside: the errno it answered.
    pub(super) fn answer(&mut self) -> io::Result<io::Result<Vec<u8>>> {
        let mut errno = [0; 4];
        self.output.read_exact(&mut errno)?;
        let content = receive(&mut self.output)?;
        Ok(match i32::from_le_bytes(errno) {
            0 => Ok(content),
            errno => Err(io::Error::from_raw_os_error(errno)),
        })
    }

    /// Ends one that has no work: it reads the end of its input.
    pub(super) fn end(self) {
        let Self { mut child, input, output } = self;
        drop((input, output));
        if let Err(error) = child.wait() {
            tracing::warn!("a child without work cannot be waited for: {error}");
        }
    }
}

/// Children that do the same work.
#[derive(Debug)]
pub(super) struct Helpers {
    program: PathBuf,
    argument: &'static str,
    idle: Mutex<Vec<Helper>>,
}

impl Helpers {
    pub(super) fn new(program: &Path, argument: &'static str) -> Self {
        Self { program: program.to_owned(), argument, idle: Mutex::default() }
    }

    /// Gives work to a child. One that somebody has ended meanwhile has not begun it, and is replaced.
    pub(super) fn ask(&self, work: &[u8]) -> io::Result<Helper> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(mut helper) = idle {
            match send(&mut helper.input, work) {
                Ok(()) => return Ok(helper),
                Err(_) => helper.end(),
            }
        }
        let mut helper = Helper::start(&self.program, self.argument)?;
        match send(&mut helper.input, work) {
            Ok(()) => Ok(helper),
            Err(error) => {
                helper.end();
                Err(error)
            }
        }
    }

    /// Keeps a child that has answered.
    pub(super) fn keep(&self, helper: Helper) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MOST_IDLE {
            idle.push(helper);
            return;
        }
        drop(idle);
        helper.end();
    }
}
