//! Consoles of machines: one session each.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;

use super::{Engine, Hint, admit, runs, tell};
use crate::failure::{ErrorKind, Failure};
use crate::id::MachineId;
use crate::libvirt::{Console, Libvirt};
use crate::machine;
use crate::request::Reply;

/// Opens the console of a machine, in a thread that lives as long as the session: until the guest's end or the client's is closed.
///
/// The client gets a socket and never the terminal that libvirt has: its session can be ended, and is noticed when it ends.
pub(in crate::engine) fn open_console(engine: &mut Engine, machine: MachineId, reply: Reply<OwnedFd>) {
    let libvirt = match may_open(engine, machine) {
        Ok(libvirt) => libvirt,
        Err(failure) => return reply(Err(failure)),
    };
    let inbox = engine.inbox.clone();
    let session = move || {
        serve(&libvirt, machine, reply);
        tell(&inbox, Hint::ConsoleClosed(machine));
    };
    match thread::Builder::new().name("console".into()).spawn(session) {
        Ok(_) => drop(engine.machines.consoles.insert(machine)),
        Err(error) => tracing::error!("no thread for the console of machine {}: {error}", machine.0),
    }
}

fn may_open(engine: &Engine, machine: MachineId) -> Result<Libvirt, Failure> {
    let name = &admit::record(engine, machine)?.spec.name;
    if !runs(engine, machine) {
        return Err(Failure::new(ErrorKind::Conflict, format!("machine {name} does not run")).remedy("start it, and ask again"));
    }
    if engine.machines.consoles.contains(&machine) {
        let failure = Failure::new(ErrorKind::Busy, format!("the console of machine {name} is open in another session"));
        return Err(failure.remedy("wait until that session is closed, and ask again"));
    }
    let without = || Failure::new(ErrorKind::HypervisorFailed, "gpuwardd runs without a hypervisor");
    engine.machines.libvirt.clone().ok_or_else(without)
}

fn serve(libvirt: &Libvirt, machine: MachineId, reply: Reply<OwnedFd>) {
    let (mut console, ours, theirs) = match opened(libvirt, machine) {
        Ok(opened) => opened,
        Err(failure) => return reply(Err(failure)),
    };
    reply(Ok(theirs.into()));
    if let Err(error) = machine::carry(&mut console, &ours) {
        tracing::info!("the console of machine {} ended: {error}", machine.0);
    }
}

fn opened(libvirt: &Libvirt, machine: MachineId) -> Result<(Console, UnixStream, UnixStream), Failure> {
    let (ours, theirs) = UnixStream::pair().map_err(|error| Failure::of(ErrorKind::Internal, &error))?;
    Ok((libvirt.console(machine.0)?, ours, theirs))
}
