//! Machines: their domains, from a specification to libvirt and back to nothing.
//!
//! A machine is *gone* when libvirt says that its UUID is inactive or unknown, and its QEMU is dead, and no process holds its VFIO
//! nodes: only then may its devices be given to anybody else. Everything in here may wait, so it runs in workers' threads.

mod process;
mod watch;

pub use process::Process;
pub use watch::Watch;
