//! The process behind a domain: found by its pid file, held by a pidfd, so that its number can be given to another unnoticed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use uuid::Uuid;
use vfio::{Host, HostError};

/// A domain's QEMU. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its process id, as long as it lives.
    pub pid: u32,
    pidfd: Arc<OwnedFd>,
}

impl Process {
    /// Finds the QEMU of the domain `name` with `uuid`; `None` where there is none.
    ///
    /// libvirt tells nobody QEMU's process id. It leaves it in a file, which may be old: the process is opened first, then its
    /// command line has to name the UUID, and it must still live after that.
    ///
    /// # Errors
    /// The file or the process cannot be looked at.
    pub fn find(host: &Host, name: &str, uuid: Uuid) -> Result<Option<Self>, HostError> {
        let file = format!("run/libvirt/qemu/{name}.pid");
        let Some(text) = host.read(&file)? else { return Ok(None) };
        let Some(pid) = text.trim().parse().ok().and_then(Pid::from_raw) else { return Ok(None) };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(Errno::SRCH) => return Ok(None),
            Err(error) => return Err(HostError::new("open the process of", host.path(file), error.into())),
        };
        let process = Self { pid: pid.as_raw_nonzero().get().cast_unsigned(), pidfd: Arc::new(pidfd) };
        let command = host.read_bytes(format!("proc/{}/cmdline", process.pid), LONGEST_COMMAND)?;
        let is_it = command.is_some_and(|command| names_uuid(&command, uuid));
        Ok((is_it && !process.is_dead()).then_some(process))
    }

    /// Whether it has ended.
    pub fn is_dead(&self) -> bool {
        is_readable(&[self.pidfd.as_fd()]).unwrap_or(false)
    }

    #[cfg(test)]
    pub(super) fn of_child(pid: u32) -> Self {
        let raw = Pid::from_raw(pid.cast_signed()).unwrap();
        Self { pid, pidfd: Arc::new(pidfd_open(raw, PidfdFlags::empty()).unwrap()) }
    }

    /// Readable once it has ended.
    pub(super) fn pidfd(&self) -> &Arc<OwnedFd> {
        &self.pidfd
    }
}

/// The longest command line that is read; QEMU's have some ten KiB.
const LONGEST_COMMAND: u64 = 1 << 20;

fn names_uuid(command: &[u8], uuid: Uuid) -> bool {
    let arguments: Vec<&[u8]> = command.split(|byte| *byte == 0).collect();
    let uuid = uuid.to_string();
    arguments.windows(2).any(|pair| pair[0] == b"-uuid" && pair[1] == uuid.as_bytes())
}

fn is_readable(fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    Ok(poll(&mut polled, Some(&at_once))? > 0)
}

#[cfg(test)]
mod tests;
