//! The object paths of what is published.

use vfio::{GroupId, PciAddress};
use zbus::ObjectPath;

use crate::id::{ClaimId, JobId, MachineId, TenantId};
use crate::view::Subject;

/// An object path that the daemon makes itself.
pub(super) type Path = ObjectPath<'static>;

/// The entry: ObjectManager and Manager.
pub(super) const ENTRY: &str = "/org/gpuward1";

// Every part is a number, or hexadecimal digits: no path can be wrong.
fn below(kind: &str, id: impl std::fmt::Display) -> Path {
    ObjectPath::from_string_unchecked(format!("{ENTRY}/{kind}/{id}"))
}

/// What a property says where it has no object to name.
pub(super) fn none() -> Path {
    ObjectPath::from_static_str_unchecked("/")
}

pub(super) fn device(address: PciAddress) -> Path {
    below("device", address.node_device_name())
}

pub(super) fn group(id: GroupId) -> Path {
    below("group", id)
}

pub(super) fn claim(id: ClaimId) -> Path {
    below("claim", id)
}

pub(super) fn machine(id: MachineId) -> Path {
    below("machine", id)
}

pub(super) fn tenant(id: TenantId) -> Path {
    below("tenant", id)
}

pub(super) fn job(id: JobId) -> Path {
    below("job", id)
}

pub(super) fn subject(subject: Subject) -> Path {
    match subject {
        Subject::Device(address) => device(address),
        Subject::Claim(id) => claim(id),
        Subject::Machine(id) => machine(id),
    }
}
