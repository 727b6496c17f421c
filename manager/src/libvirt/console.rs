//! A domain's serial console: bytes from and to its guest.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use uuid::Uuid;
use virt::connect::Connect;
use virt::error::{Error, ErrorDomain, ErrorNumber};
use virt::stream::Stream;
use virt_sys::{VIR_DOMAIN_CONSOLE_SAFE, VIR_STREAM_NONBLOCK};

use super::{Libvirt, LibvirtError, Source};
use crate::failure::{ErrorKind, Failure};
use crate::machine::domain_name;

/// Opening it: libvirt answers in milliseconds unless it hangs.
const OPEN: Duration = Duration::from_secs(20);

/// An open console. Nothing it does blocks; it is closed when dropped.
pub struct Console(End);

enum End {
    /// `None` once it was ended.
    Stream(Option<Stream>),
    /// What stands in for one with libvirt's test driver.
    Socket(UnixStream),
}

impl Libvirt {
    /// Opens the serial console of the domain `uuid`. libvirt gives it to one reader at a time, and does not break off another's.
    ///
    /// # Errors
    /// As every call; `Busy` where anybody has it open.
    pub fn console(&self, uuid: Uuid) -> Result<Console, Failure> {
        let socket = match self.link.source() {
            Source::Uri(_) => None,
            Source::Open(_, folder) => Some(folder.join(format!("{}.console", domain_name(uuid)))),
        };
        let opened = self.call("open the console", OPEN, move |connect| match socket {
            None => open(connect, uuid),
            // Without a stand-in the test driver's own answer says what it lacks.
            Some(socket) => stand_in(&socket).or_else(|_| open(connect, uuid)),
        });
        opened.map_err(|error| if is_in_use(&error) { in_use(&error) } else { error.into() })
    }
}

// SAFE, not FORCE: somebody else's session is not broken off, and two never read one another's bytes.
fn open(connect: &Connect, uuid: Uuid) -> Result<Console, Error> {
    let domain = connect.lookup_domain_by_uuid(uuid)?;
    let stream = Stream::new(connect, VIR_STREAM_NONBLOCK)?;
    domain.open_console(None, &stream, VIR_DOMAIN_CONSOLE_SAFE)?;
    Ok(Console(End::Stream(Some(stream))))
}

fn stand_in(socket: &Path) -> io::Result<Console> {
    let socket = UnixStream::connect(socket)?;
    socket.set_nonblocking(true)?;
    Ok(Console(End::Socket(socket)))
}

// "Active console session exists for this domain" (qemuDomainOpenConsole); what else it refuses has other codes.
fn is_in_use(error: &LibvirtError) -> bool {
    matches!(error, LibvirtError::Refused { source, .. } if source.code() == ErrorNumber::OperationFailed.into())
}

fn in_use(error: &LibvirtError) -> Failure {
    let failure = Failure::of(ErrorKind::Busy, error);
    failure.remedy("somebody has the console open in libvirt itself (`virsh console`): end that session, and ask again")
}

impl Read for Console {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match &mut self.0 {
            End::Stream(None) => Ok(0),
            End::Stream(Some(stream)) => moved(stream.recv(buffer)),
            End::Socket(socket) => socket.read(buffer),
        }
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.0 {
            End::Stream(None) => Err(io::ErrorKind::BrokenPipe.into()),
            End::Stream(Some(stream)) => moved(stream.send(bytes)),
            End::Socket(socket) => socket.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Console {
    // A stream that was not ended stays open in libvirt, and nobody else gets the console.
    fn drop(&mut self) {
        if let End::Stream(stream) = &mut self.0
            && let Some(Err(error)) = stream.take().map(Stream::abort)
        {
            tracing::debug!("a console's stream had ended before it was closed: {}", error.message());
        }
    }
}

// libvirt answers -2 for "not now" (virStreamRecv, virStreamSend), and has no error then: the crate makes one of no domain of it.
fn moved(answer: Result<isize, Error>) -> io::Result<usize> {
    match answer {
        Ok(count) => Ok(count.unsigned_abs()),
        Err(error) if error.domain() == ErrorDomain::None.into() => Err(io::ErrorKind::WouldBlock.into()),
        Err(error) => Err(io::Error::other(error.message().to_owned())),
    }
}
