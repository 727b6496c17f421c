//! What is with a machine now: the one question that every hint leads to.

use std::thread;
use std::time::{Duration, Instant};

use uuid::Uuid;
use vfio::{Function, Holders, Host};

use super::{Process, domain_name};
use crate::failure::{ErrorKind, Failure};
use crate::libvirt::{Domain, Libvirt, Presence};

/// A machine to look at.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The host.
    pub host: Host,
    /// The hypervisor.
    pub libvirt: Libvirt,
    /// The machine's UUID.
    pub uuid: Uuid,
    /// Its devices as observed last: what nobody may hold when it is gone.
    pub devices: Vec<Function>,
    /// Its QEMU, where it was seen.
    pub process: Option<Process>,
}

/// What was found.
#[derive(Clone, Debug)]
pub enum Look {
    /// libvirt has it, and runs it.
    Running(Running),
    /// It ends, but is not gone.
    Ending {
        /// What is left of it.
        why: String,
    },
    /// All three conditions hold.
    Gone,
    /// It cannot be told.
    Unknown(Failure),
}

/// A domain that runs.
#[derive(Clone, Debug)]
pub struct Running {
    /// As libvirt describes it.
    pub domain: Domain,
    /// Its QEMU; `None` for a moment as it comes and goes.
    pub process: Option<Process>,
}

impl Subject {
    /// Looks once.
    pub fn look(&self) -> Look {
        let presence = match self.libvirt.presence(self.uuid) {
            Ok(presence) => presence,
            Err(error) => return Look::Unknown(error.into()),
        };
        let process = match Process::find(&self.host, &domain_name(self.uuid), self.uuid) {
            Ok(process) => process,
            Err(error) => return Look::Unknown(Failure::of(ErrorKind::Internal, &error)),
        };
        match presence {
            Presence::Active(domain) => Look::Running(Running { domain, process }),
            Presence::Absent | Presence::Inactive => match self.left_of_it(process) {
                Some(why) => Look::Ending { why },
                None => Look::Gone,
            },
        }
    }

    /// Looks until it is gone.
    ///
    /// # Errors
    /// It is not gone `within` the time, or it cannot be told.
    pub fn wait_until_gone(&self, within: Duration) -> Result<(), Failure> {
        let until = Instant::now() + within;
        loop {
            let why = match self.look() {
                Look::Gone => return Ok(()),
                // libvirt may be restarting: until the time is over that is no answer.
                Look::Unknown(failure) if Instant::now() >= until => return Err(failure),
                Look::Unknown(failure) => failure.message,
                Look::Running(_) => "libvirt still runs it".to_owned(),
                Look::Ending { why } => why,
            };
            if Instant::now() >= until {
                let message = format!("machine {} is not gone after {} s", self.uuid, within.as_secs());
                return Err(Failure::new(ErrorKind::DeadlineExceeded, message)
                    .because(why)
                    .remedy("its devices stay claimed until it is gone; they come back by themselves then"));
            }
            thread::sleep(PAUSE);
        }
    }

    // The pid file may go before the process does, so the process seen earlier counts too.
    fn left_of_it(&self, found: Option<Process>) -> Option<String> {
        let alive = found.iter().chain(&self.process).find(|process| !process.is_dead());
        if let Some(process) = alive {
            return Some(format!("its QEMU, process {}, has not ended", process.pid));
        }
        held_by(&self.host, &self.devices)
    }
}

/// Who holds one of `devices`, for a person. Where that cannot be told of every process, nobody can tell that they are free.
pub fn held_by(host: &Host, devices: &[Function]) -> Option<String> {
    let holders = Holders::of(host, devices);
    if let Some(holder) = holders.found.first() {
        return Some(format!("{}[{}] holds /{}", holder.command, holder.pid, holder.node));
    }
    (!holders.unreadable.is_empty()).then(|| {
        let count = holders.unreadable.len();
        format!("what {count} processes hold may not be read, so nobody can tell that its devices are free")
    })
}

/// Between two looks at a machine that ends.
const PAUSE: Duration = Duration::from_millis(50);
