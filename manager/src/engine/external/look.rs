//! What is with the domain of a claim now.

use uuid::Uuid;
use vfio::{Function, Host};

use crate::failure::Failure;
use crate::libvirt::{Libvirt, Presence};
use crate::machine::held_by;

/// A claim to be looked at.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The host.
    pub host: Host,
    /// The hypervisor, where there is one.
    pub libvirt: Option<Libvirt>,
    /// The domain that may use the devices.
    pub domain: Uuid,
    /// The devices that are on the host.
    pub devices: Vec<Function>,
}

/// What was found.
#[derive(Debug)]
pub enum Look {
    /// libvirt runs its domain.
    Runs {
        /// The domain's name.
        name: String,
    },
    /// Somebody holds a device.
    Held {
        /// Who, for a person.
        why: String,
    },
    /// libvirt does not run it, and nobody holds its devices.
    Gone,
    /// libvirt cannot be asked.
    Unknown(Failure),
}

impl Subject {
    /// Looks once. Waits for libvirt.
    pub fn look(&self) -> Look {
        match self.libvirt.as_ref().map(|libvirt| libvirt.presence(self.domain)) {
            Some(Err(error)) => Look::Unknown(error.into()),
            Some(Ok(Presence::Active(domain))) => Look::Runs { name: domain.name },
            Some(Ok(Presence::Absent | Presence::Inactive)) | None => match self.held() {
                Some(why) => Look::Held { why },
                None => Look::Gone,
            },
        }
    }

    /// Who holds a device, for a person.
    pub fn held(&self) -> Option<String> {
        held_by(&self.host, &self.devices)
    }
}
