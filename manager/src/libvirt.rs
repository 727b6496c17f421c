//! Talking to libvirt: one connection, every call with a deadline, and hints of what changed.
//!
//! libvirt may be absent, may stop answering and may come back. A call that does not return costs one thread and nothing else;
//! its caller learns which call it was. Hints ([`Notice`]) say that something may have changed, never what: who gets one asks.
//! Nothing here is called on the engine's thread.

mod call;
mod capabilities;
mod console;
mod domain;
mod error;
mod events;
mod facts;
mod link;
mod volume;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;
use virt::connect::Connect;

pub use capabilities::{Capabilities, Told};
pub use console::Console;
pub use domain::{Domain, Listed, Presence};
pub use error::LibvirtError;
pub use events::start_event_loop;
pub use facts::{DomainType, Given, HostFacts, agent_is_connected, given, hostdevs};
pub use volume::{Backing, Chain, Volume};

/// Where libvirt is.
#[derive(Clone)]
pub enum Source {
    /// Opened by us, again after each loss. `Kill` opens one of its own, so that it works while others wait.
    Uri(String),
    /// Opened already. The test driver keeps its state in the connection, so there every call uses this one. It has no consoles:
    /// `<name>.console` in this folder is a socket that stands in for a domain's.
    Open(Connect, PathBuf),
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uri(uri) => f.debug_tuple("Uri").field(uri).finish(),
            Self::Open(..) => f.write_str("Open"),
        }
    }
}

/// A hint: something may have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// There is a connection, and events come from now on: list, then compare.
    Connected(HostFacts),
    /// There is none (any more); it is tried again by itself.
    Lost {
        /// Why, for a person.
        reason: String,
    },
    /// The domain with this UUID changed somehow; it need not be ours.
    Changed(Uuid),
    /// The guest of the domain with this UUID was reset.
    Rebooted(Uuid),
}

/// Takes hints, from threads of libvirt's: it must not block.
pub type Notify = Arc<dyn Fn(Notice) + Send + Sync>;

/// A handle to libvirt. Cheap to clone; the connection ends with the last one.
#[derive(Clone)]
pub struct Libvirt {
    link: Arc<link::Link>,
}

impl fmt::Debug for Libvirt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Libvirt").field("source", self.link.source()).finish()
    }
}

impl Libvirt {
    /// Starts connecting to `source` in a thread of its own and tells `notify` how that goes.
    pub fn start(source: Source, notify: Notify) -> Self {
        Self { link: link::Link::start(source, notify) }
    }

    /// What libvirt said of the host when it was connected to. Asks nobody; without a connection one is tried for at once.
    ///
    /// # Errors
    /// There is no connection.
    pub fn check(&self) -> Result<HostFacts, LibvirtError> {
        self.link.up().map(|(_, facts)| facts)
    }

    /// Does `ask` with the connection, in a thread of its own.
    ///
    /// # Errors
    /// There is no connection, libvirt refuses, or it does not answer `within` the time.
    fn call<T, F>(&self, name: &'static str, within: Duration, ask: F) -> Result<T, LibvirtError>
    where
        T: Send + 'static,
        F: FnOnce(&Connect) -> Result<T, virt::error::Error> + Send + 'static,
    {
        let (connect, _) = self.link.up()?;
        let answer = call::within(name, within, move || ask(&connect));
        if matches!(answer, Err(LibvirtError::NoAnswer { .. })) {
            self.link.note_unanswered();
        }
        answer
    }

    /// As [`Self::call`], on a connection of its own where libvirt is a service.
    fn call_apart<T, F>(&self, name: &'static str, within: Duration, ask: F) -> Result<T, LibvirtError>
    where
        T: Send + 'static,
        F: FnOnce(&Connect) -> Result<T, virt::error::Error> + Send + 'static,
    {
        let source = self.link.source().clone();
        call::within(name, within, move || match source {
            Source::Uri(uri) => ask(&Connect::open(Some(&uri))?),
            Source::Open(connect, _) => ask(&connect),
        })
    }
}

#[cfg(test)]
mod tests;
