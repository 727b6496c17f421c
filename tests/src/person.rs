//! Callers who are other users than the test: a thread with credentials of its own.
//!
//! The kernel keeps credentials by thread, and the bus asks it for those of the thread that connected (`SO_PEERCRED`, `SO_PEERGROUPS`).

use std::io;
use std::process::Command;
use std::thread;

use manager::client::Client;
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

/// A user with supplementary groups.
#[derive(Clone, Debug)]
pub struct Person {
    /// User id, also the id of the first group.
    pub uid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

impl Person {
    /// A user with no groups but their own.
    pub fn alone(uid: u32) -> Self {
        Self { uid, groups: Vec::new() }
    }

    /// Does something with a connection to the bus at `address` that is theirs.
    ///
    /// # Errors
    /// This process may not be them, or there is no bus.
    ///
    /// # Panics
    /// `act` does.
    pub fn with_client<T: Send>(&self, address: &str, act: impl FnOnce(&Client) -> T + Send) -> io::Result<T> {
        let run = || {
            self.become_them()?;
            Ok(act(&Client::connect(Some(address)).map_err(|error| io::Error::other(format!("{error:?}")))?))
        };
        thread::scope(|scope| scope.spawn(run).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// What runs `program` as them.
    pub fn command(&self, mut setpriv: Command, program: &str) -> Command {
        let uid = self.uid.to_string();
        setpriv.args(["--reuid", &uid, "--regid", &uid]);
        match self.groups.is_empty() {
            true => setpriv.arg("--clear-groups"),
            false => setpriv.arg(format!("--groups={}", self.groups.iter().map(u32::to_string).collect::<Vec<_>>().join(","))),
        };
        setpriv.arg(program);
        setpriv
    }

    fn become_them(&self) -> rustix::io::Result<()> {
        let groups: Vec<_> = self.groups.iter().map(|group| Gid::from_raw(*group)).collect();
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.uid));
        set_thread_groups(&groups)?;
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)
    }
}
