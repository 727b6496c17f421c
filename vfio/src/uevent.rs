//! The kernel's own news of PCI devices: functions come, leave, are bound and unbound.
//!
//! A hint to look again, never a fact: messages are lost when nobody reads them in time.

use std::io;

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};

/// The kernel's multicast group; udev's own is 2.
const KERNEL: u32 = 1;

/// An open ear for the kernel's messages (`NETLINK_KOBJECT_UEVENT`).
#[derive(Debug)]
pub struct Uevents {
    socket: OwnedFd,
}

impl Uevents {
    /// Starts to listen.
    ///
    /// # Errors
    /// The kernel allows no such socket here.
    pub fn open() -> io::Result<Self> {
        let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, Some(KOBJECT_UEVENT))?;
        bind(&socket, &SocketAddrNetlink::new(0, KERNEL))?;
        Ok(Self { socket })
    }

    /// Waits until something happens to a PCI device. Lost messages count as such.
    ///
    /// # Errors
    /// The socket is broken.
    pub fn wait(&self) -> io::Result<()> {
        while !self.next(RecvFlags::empty())? {}
        Ok(())
    }

    /// Forgets what has come so far.
    ///
    /// # Errors
    /// The socket is broken.
    pub fn drain(&self) -> io::Result<()> {
        loop {
            match self.next(RecvFlags::DONTWAIT) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    fn next(&self, flags: RecvFlags) -> io::Result<bool> {
        // The kernel's own limit (`UEVENT_BUFFER_SIZE`) is 2 KiB and a header.
        let mut message = [0; 4096];
        match recv(&self.socket, &mut message, flags) {
            Ok((length, _)) => Ok(is_of_pci(message.get(..length).unwrap_or_default())),
            Err(Errno::NOBUFS) => Ok(true),
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

// `bind@/devices/pci0000:40/…` and then `KEY=value`, each ended by a zero byte (`lib/kobject_uevent.c`).
fn is_of_pci(message: &[u8]) -> bool {
    message.split(|byte| *byte == 0).any(|field| field == b"SUBSYSTEM=pci")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_the_pci_bus_is_told_from_others() {
        let bound = b"bind@/devices/pci0000:40/0000:40:01.0\0ACTION=bind\0SUBSYSTEM=pci\0PCI_ID=10DE:2330\0SEQNUM=4711\0";
        assert!(is_of_pci(bound));
        assert!(!is_of_pci(b"add@/devices/virtual/net/tap0\0ACTION=add\0SUBSYSTEM=net\0"));
        assert!(!is_of_pci(b"change@/x\0NAME=SUBSYSTEM=pci\0"));
        assert!(!is_of_pci(b""));
    }
}
