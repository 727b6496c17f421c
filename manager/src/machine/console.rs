//! Carries bytes between a guest's console and a client, until either ends.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Between two looks at a console: libvirt's streams have nothing to wait on beside its own event loop. Each look that moves nothing
/// doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(40);
/// The most that is kept for a side that does not take it.
const MOST_KEPT: usize = 64 << 10;
/// Bytes moved at once.
const CHUNK: usize = 16 << 10;

/// Carries bytes until the guest's end is closed or the client has closed its own. Neither side's call may block.
///
/// A client that does not read loses what comes, as on a serial line: libvirt queues without limit what is not fetched, so it always is.
///
/// # Errors
/// Either side fails; the console is over then too.
pub fn carry(console: &mut (impl Read + Write), client: &UnixStream) -> io::Result<()> {
    client.set_nonblocking(true)?;
    let (mut to_client, mut to_guest) = (Kept::default(), Kept::default());
    let mut pause = FIRST_PAUSE;
    loop {
        let from_guest = to_client.fetch(console)?;
        let from_client = if to_guest.is_empty() { to_guest.fetch(&mut &*client)? } else { Fetched::Nothing };
        let sent = to_client.send(&mut &*client)? | to_guest.send(console)?;
        if from_guest == Fetched::End || from_client == Fetched::End {
            return Ok(());
        }
        let is_idle = from_guest == Fetched::Nothing && from_client == Fetched::Nothing && !sent;
        pause = if is_idle { (pause * 2).min(LONGEST_PAUSE) } else { FIRST_PAUSE };
        wait(client, to_guest.is_empty(), pause)?;
    }
}

// Until the client has sent something, where that is wanted, and no longer than the pause.
fn wait(client: &UnixStream, for_client: bool, pause: Duration) -> io::Result<()> {
    let wanted = if for_client { PollFlags::IN } else { PollFlags::empty() };
    let mut polled = [PollFd::from_borrowed_fd(client.as_fd(), wanted)];
    let pause = Timespec { tv_sec: 0, tv_nsec: i64::from(pause.subsec_nanos()) };
    match poll(&mut polled, Some(&pause)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fetched {
    Something,
    Nothing,
    End,
}

/// Bytes on their way to a side.
#[derive(Debug, Default)]
struct Kept(Vec<u8>);

impl Kept {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn fetch(&mut self, from: &mut impl Read) -> io::Result<Fetched> {
        let mut chunk = [0; CHUNK];
        let count = match from.read(&mut chunk) {
            Ok(0) => return Ok(Fetched::End),
            Ok(count) => count,
            Err(error) if is_not_now(&error) => return Ok(Fetched::Nothing),
            Err(error) => return Err(error),
        };
        if self.0.len() + count <= MOST_KEPT {
            self.0.extend_from_slice(chunk.get(..count).unwrap_or_default());
        }
        Ok(Fetched::Something)
    }

    // Whether some of it went.
    fn send(&mut self, to: &mut impl Write) -> io::Result<bool> {
        if self.0.is_empty() {
            return Ok(false);
        }
        match to.write(&self.0) {
            Ok(count) => {
                self.0.drain(..count);
                Ok(count > 0)
            }
            Err(error) if is_not_now(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn is_not_now(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use std::thread::{self, JoinHandle};

    use super::*;

    /// A guest, a client, and what carries between them.
    fn carried() -> (UnixStream, UnixStream, JoinHandle<io::Result<()>>) {
        let (guest, mut console) = UnixStream::pair().unwrap();
        let (client, ours) = UnixStream::pair().unwrap();
        console.set_nonblocking(true).unwrap();
        let carrying = thread::spawn(move || carry(&mut console, &ours));
        (guest, client, carrying)
    }

    fn read(from: &mut UnixStream, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        from.read_exact(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn bytes_go_both_ways_until_the_client_leaves() {
        let (mut guest, mut client, carrying) = carried();
        guest.write_all(b"login: ").unwrap();
        assert_eq!(read(&mut client, 7), b"login: ");
        client.write_all(b"root\r\x1b[A\0").unwrap();
        assert_eq!(read(&mut guest, 9), b"root\r\x1b[A\0");
        drop(client);
        carrying.join().unwrap().unwrap();
        assert_eq!(guest.read(&mut [0]).unwrap(), 0, "the console is closed");
    }

    #[test]
    fn what_the_guest_said_last_reaches_the_client() {
        let (mut guest, mut client, carrying) = carried();
        guest.write_all(b"Power down").unwrap();
        drop(guest);
        carrying.join().unwrap().unwrap();
        let mut said = String::new();
        client.read_to_string(&mut said).unwrap();
        assert_eq!(said, "Power down");
    }

    #[test]
    fn a_client_that_does_not_read_loses_what_comes_and_holds_nobody_up() {
        let (mut guest, client, carrying) = carried();
        // More than two sockets and the buffer hold: it must be fetched all the same.
        guest.write_all(&vec![b'x'; 4 << 20]).unwrap();
        drop(client);
        // Reset or closed: either way it ends.
        drop(carrying.join().unwrap());
    }
}
