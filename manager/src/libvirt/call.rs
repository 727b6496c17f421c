//! A call that may never return, with a deadline.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use virt::error::Error;

use super::LibvirtError;

/// Runs `ask` in a thread of its own and waits for it at most `within`.
///
/// libvirt has no way to give up a call: after the deadline the thread is left behind, and what it answers is logged.
pub(super) fn within<T, F>(name: &'static str, within: Duration, ask: F) -> Result<T, LibvirtError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, Error> + Send + 'static,
{
    let (answer, answered) = mpsc::sync_channel(1);
    let run = move || {
        if answer.send(ask()).is_err() {
            tracing::warn!("libvirt answered {name} after its deadline");
        }
    };
    // Linux keeps 15 bytes of a thread's name.
    let thread = thread::Builder::new().name(format!("virt-{name}"));
    thread.spawn(run).map_err(|source| LibvirtError::NoThread { call: name, source })?;
    match answered.recv_timeout(within) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(source)) => Err(LibvirtError::Refused { call: name, source }),
        Err(RecvTimeoutError::Timeout) => Err(LibvirtError::NoAnswer { call: name, within }),
        Err(RecvTimeoutError::Disconnected) => Err(LibvirtError::Panicked { call: name }),
    }
}
