//! The calls about domains.

use std::time::Duration;

use uuid::Uuid;
use virt::connect::Connect;
use virt::domain::{Domain as Handle, DomainState};
use virt::error::Error;
use virt_sys::{VIR_DOMAIN_NONE, VIR_DOMAIN_REBOOT_DEFAULT, VIR_DOMAIN_SHUTDOWN_DEFAULT};

use super::error::is_no_domain;
use super::{Libvirt, LibvirtError};

/// Looking at something: libvirt answers in milliseconds unless it hangs.
const LOOK: Duration = Duration::from_secs(20);
/// Asking a guest to shut down or to reboot: the request, not what the guest makes of it.
const SHUTDOWN: Duration = Duration::from_secs(30);
/// Ending QEMU: libvirt sends SIGTERM, then SIGKILL, and waits up to 15 s, 30 s more with devices in it.
const DESTROY: Duration = Duration::from_secs(60);

/// What libvirt knows of a UUID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// No such domain.
    Absent,
    /// Defined, not running.
    Inactive,
    /// It runs, or is being torn down.
    Active(Domain),
}

/// An active domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// Its UUID.
    pub uuid: Uuid,
    /// Its name.
    pub name: String,
    /// Its guest is stopped (paused, suspended or crashed) rather than running.
    pub paused: bool,
    /// It is stopped because its guest put itself to sleep.
    pub asleep: bool,
    /// Its live XML.
    pub xml: String,
}

/// An active domain in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its UUID.
    pub uuid: Uuid,
    /// Its name.
    pub name: String,
    /// Its live XML.
    pub xml: String,
}

impl Libvirt {
    /// Creates a transient domain from `xml` and starts it.
    ///
    /// # Errors
    /// As every call; after `NoAnswer` the domain may come up all the same.
    pub fn create(&self, xml: String, within: Duration) -> Result<(), LibvirtError> {
        self.call("create", within, move |connect| connect.create_domain_xml(&xml, VIR_DOMAIN_NONE).map(drop))
    }

    /// What libvirt knows of the domain `uuid`.
    ///
    /// # Errors
    /// As every call; a domain that libvirt does not know is no error.
    pub fn presence(&self, uuid: Uuid) -> Result<Presence, LibvirtError> {
        self.call("look up", LOOK, move |connect| match look(connect, uuid) {
            // It may vanish between two of the calls.
            Err(error) if is_no_domain(&error) => Ok(Presence::Absent),
            looked => looked,
        })
    }

    /// Every active domain, ours and others'. Their state is not asked for: that may wait for a monitor that hangs.
    ///
    /// # Errors
    /// As every call.
    pub fn active(&self) -> Result<Vec<Listed>, LibvirtError> {
        self.call("list domains", LOOK, |connect| {
            let mut active = Vec::new();
            for handle in connect.list_all_domains(virt_sys::VIR_CONNECT_LIST_DOMAINS_ACTIVE)? {
                match list(&handle) {
                    Ok(domain) => active.push(domain),
                    Err(error) if is_no_domain(&error) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(active)
        })
    }

    /// Asks the guest of the domain `uuid` to shut down.
    ///
    /// # Errors
    /// As every call.
    pub fn shutdown(&self, uuid: Uuid) -> Result<(), LibvirtError> {
        self.call("shut down", SHUTDOWN, move |connect| connect.lookup_domain_by_uuid(uuid)?.shutdown_flags(VIR_DOMAIN_SHUTDOWN_DEFAULT))
    }

    /// Asks the guest of the domain `uuid` to reboot: by its agent where that listens, else by the power button.
    ///
    /// # Errors
    /// As every call.
    pub fn reboot(&self, uuid: Uuid) -> Result<(), LibvirtError> {
        self.call("reboot", SHUTDOWN, move |connect| connect.lookup_domain_by_uuid(uuid)?.reboot(VIR_DOMAIN_REBOOT_DEFAULT))
    }

    /// Ends the domain `uuid` at once, on a connection of its own. A domain that is not there is ended.
    ///
    /// # Errors
    /// As every call.
    pub fn destroy(&self, uuid: Uuid) -> Result<(), LibvirtError> {
        let destroy = move |connect: &Connect| connect.lookup_domain_by_uuid(uuid)?.destroy();
        match self.call_apart("destroy", DESTROY, destroy) {
            Err(error) if error.is_no_domain() => Ok(()),
            answer => answer,
        }
    }
}

fn look(connect: &Connect, uuid: Uuid) -> Result<Presence, Error> {
    let handle = connect.lookup_domain_by_uuid(uuid)?;
    if !handle.is_active()? {
        return Ok(Presence::Inactive);
    }
    describe(&handle).map(Presence::Active)
}

fn list(handle: &Handle) -> Result<Listed, Error> {
    Ok(Listed { uuid: handle.uuid()?, name: handle.name()?, xml: handle.xml_desc(0)? })
}

fn describe(handle: &Handle) -> Result<Domain, Error> {
    // Not `state()`: virt 0.5 drops the error of that call.
    let state = handle.info()?.state;
    let stopped = [DomainState::Paused, DomainState::PMSuspended, DomainState::Crashed];
    Ok(Domain {
        uuid: handle.uuid()?,
        name: handle.name()?,
        paused: stopped.into_iter().any(|stopped| state == stopped.into()),
        asleep: state == DomainState::PMSuspended.into(),
        xml: handle.xml_desc(0)?,
    })
}
