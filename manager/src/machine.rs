//! Machines: their domains, from a specification to libvirt and back to nothing.
//!
//! A machine is *gone* when libvirt says that its UUID is inactive or unknown, and its QEMU is dead, and no process holds its VFIO
//! nodes: only then may its devices be given to anybody else. Everything in here may wait, so it runs in workers' threads.

mod console;
mod deadline;
mod domain;
mod look;
mod metadata;
mod process;
mod run;
mod storage;
mod watch;

pub use console::carry;
pub use deadline::Deadline;
pub use domain::{GUEST_DIR, Given, domain_xml, wide_bars};
pub use look::{Look, Running, Subject, held_by};
pub use metadata::Metadata;
pub use process::Process;
pub use run::{Launch, end_now, reboot, shut_down, start};
pub use storage::{BackedBy, Link, backing};
pub use watch::Watch;

use uuid::Uuid;

/// The name of a machine's domain: `gpuward-` and the first eight digits of its UUID. For people; gpuward goes by the UUID.
pub fn domain_name(uuid: Uuid) -> String {
    let digits = uuid.simple().to_string();
    format!("gpuward-{}", &digits[..8])
}
