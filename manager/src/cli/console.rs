//! `gpuward machine console`: this terminal, raw, and a guest's serial console.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write, stdin, stdout};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

use super::{Stop, warn};

/// Ctrl-], as virsh and telnet have it.
const ESCAPE: u8 = 0x1d;
const CHUNK: usize = 4 << 10;

/// Carries bytes between this terminal and the console until the escape is typed or the console ends. Input that ends, where it is
/// no terminal, leaves the console to be read on.
pub(super) fn talk(console: &UnixStream, name: &str) -> Result<(), Stop> {
    let failed = |error: io::Error| Stop::Local(format!("cannot talk to the console of machine {name}: {error}"));
    let raw = if stdin().is_terminal() {
        warn(&format!("connected to machine {name}; Ctrl-] leaves it"));
        Some(Raw::set().map_err(failed)?)
    } else {
        None
    };
    let ended = unbuffered().and_then(|mut input| carry(console, &mut input, raw.is_some()));
    drop(raw);
    match ended.map_err(failed)? {
        End::Left => warn(&format!("left the console of machine {name}")),
        End::Over => warn(&format!("the console of machine {name} is over")),
    }
    Ok(())
}

// What a buffer holds back is not seen by waiting.
fn unbuffered() -> io::Result<File> {
    Ok(stdin().as_fd().try_clone_to_owned()?.into())
}

#[derive(Debug, PartialEq, Eq)]
enum End {
    /// By the escape.
    Left,
    /// The other side has closed it.
    Over,
}

fn carry(console: &UnixStream, input: &mut (impl Read + AsFd), escapes: bool) -> io::Result<End> {
    let mut has_input = true;
    let mut chunk = [0; CHUNK];
    loop {
        let (from_console, from_input) = wait(console.as_fd(), input.as_fd(), has_input)?;
        if from_console {
            match (&*console).read(&mut chunk)? {
                0 => return Ok(End::Over),
                count => print(chunk.get(..count).unwrap_or_default())?,
            }
        }
        if from_input {
            let count = input.read(&mut chunk)?;
            let typed = chunk.get(..count).unwrap_or_default();
            has_input = count > 0;
            let until = if escapes { typed.iter().position(|byte| *byte == ESCAPE) } else { None };
            (&*console).write_all(typed.get(..until.unwrap_or(count)).unwrap_or_default())?;
            if until.is_some() {
                return Ok(End::Left);
            }
        }
    }
}

fn print(bytes: &[u8]) -> io::Result<()> {
    let mut output = stdout().lock();
    output.write_all(bytes)?;
    output.flush()
}

// What can be read without waiting, once anything can.
fn wait(console: BorrowedFd<'_>, input: BorrowedFd<'_>, has_input: bool) -> io::Result<(bool, bool)> {
    let wanted = if has_input { PollFlags::IN } else { PollFlags::empty() };
    let mut polled = [PollFd::from_borrowed_fd(console, PollFlags::IN), PollFd::from_borrowed_fd(input, wanted)];
    // Input that has ended is not looked at: it would be ready for ever.
    let watched = if has_input { 2 } else { 1 };
    match poll(polled.get_mut(..watched).unwrap_or_default(), None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let [console, input] = &polled;
    Ok((!console.revents().is_empty(), has_input && !input.revents().is_empty()))
}

/// The terminal without line editing, echo and signals, until it is dropped.
struct Raw(Termios);

impl Raw {
    fn set() -> io::Result<Self> {
        let before = tcgetattr(stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Flush, &raw)?;
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Err(error) = tcsetattr(stdin(), OptionalActions::Flush, &self.0) {
            warn(&format!("the terminal cannot be set back ({error}); `reset` does it"));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn the_escape_leaves_and_what_was_typed_before_it_is_sent() {
        let (console, mut guest) = UnixStream::pair().unwrap();
        let (mut input, mut keys) = UnixStream::pair().unwrap();
        keys.write_all(b"ls\r\x1drest").unwrap();
        assert_eq!(carry(&console, &mut input, true).unwrap(), End::Left);
        drop(console);
        let mut sent = String::new();
        guest.read_to_string(&mut sent).unwrap();
        assert_eq!(sent, "ls\r");
    }

    #[test]
    fn input_that_ends_leaves_the_console_to_be_read_until_it_is_over() {
        let (console, mut guest) = UnixStream::pair().unwrap();
        let (mut input, mut keys) = UnixStream::pair().unwrap();
        keys.write_all(b"\x1d").unwrap();
        drop(keys);
        let carrying = thread::spawn(move || carry(&console, &mut input, false));
        let mut sent = [0];
        guest.read_exact(&mut sent).unwrap();
        assert_eq!(sent, [ESCAPE], "what is piped in has no escape");
        drop(guest);
        assert_eq!(carrying.join().unwrap().unwrap(), End::Over);
    }
}
