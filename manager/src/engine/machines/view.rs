//! What clients see of machines.

use std::collections::BTreeMap;

use vfio::PciAddress;

use super::{Engine, Guest, Seen, claims_of, is_down, runs};
use crate::id::{ClaimId, MachineId};
use crate::ledger::MachineRecord;
use crate::machine::Deadline;
use crate::view::{GivenView, MachineState, MachineView};

/// A machine's state for a person.
pub(super) fn state_word(state: MachineState) -> &'static str {
    match state {
        MachineState::Off => "off",
        MachineState::Preparing => "preparing",
        MachineState::Starting => "starting",
        MachineState::Running => "running",
        MachineState::Paused => "paused",
        MachineState::Stopping => "stopping",
        MachineState::Failed => "failed",
        MachineState::Unknown => "unknown",
    }
}

/// What clients see of machines.
pub(in crate::engine) fn views(engine: &Engine) -> BTreeMap<MachineId, MachineView> {
    engine.ledger.machines.iter().map(|(id, record)| (*id, view(engine, *id, record))).collect()
}

fn view(engine: &Engine, machine: MachineId, record: &MachineRecord) -> MachineView {
    let seen = engine.machines.seen.get(&machine);
    let (state, reason) = state(engine, machine, record);
    let runs = runs(engine, machine);
    let claims: Vec<_> = claims_of(engine, machine).collect();
    MachineView {
        name: record.spec.name.clone(),
        tenant: record.tenant,
        state,
        reason,
        claims: claims.iter().map(|(id, _)| *id).collect(),
        isolation_level: claims.iter().map(|(_, claim)| claim.isolation).min().map_or("", |isolation| isolation.word()),
        leader: seen.filter(|_| runs).and_then(|seen| seen.process.as_ref()).map_or(0, |process| process.pid),
        guest_state: seen.filter(|seen| runs && seen.fresh).map_or("unknown", |seen| guest_state(record.state, &seen.guest)),
        reboots: seen.filter(|_| runs).map_or(0, |seen| seen.guest.reboots),
        devices: claims
            .iter()
            .flat_map(|(id, claim)| claim.devices.iter().map(|device| given(*id, *device, seen.filter(|_| runs))))
            .collect(),
        deadline: deadline(engine, machine, record),
        error: engine.machines.errors.get(&machine).cloned(),
        domain_xml: seen.filter(|_| runs).map(|seen| seen.xml.clone()).unwrap_or_default(),
        generation: 0,
    }
}

fn guest_state(state: MachineState, guest: &Guest) -> &'static str {
    match state {
        MachineState::Running if guest.agent => "agent-connected",
        MachineState::Running if guest.was_heard => "agent-lost",
        MachineState::Running => "started",
        MachineState::Paused if guest.asleep => "asleep",
        MachineState::Off
        | MachineState::Preparing
        | MachineState::Starting
        | MachineState::Paused
        | MachineState::Stopping
        | MachineState::Failed
        | MachineState::Unknown => "unknown",
    }
}

fn given(claim: ClaimId, device: PciAddress, seen: Option<&Seen>) -> GivenView {
    let guest = seen.and_then(|seen| seen.given.iter().find(|given| given.host == device)).map(|given| given.guest);
    GivenView { device, claim, guest }
}

// What the job in hand has time for; while there is none, nothing is waited for.
fn deadline(engine: &Engine, machine: MachineId, record: &MachineRecord) -> Option<Deadline> {
    let devices = claims_of(engine, machine).map(|(_, claim)| claim.devices.len()).sum();
    match engine.jobs.on_machine(machine)?.1.kind {
        "machine-start" => Some(Deadline::to_start(&record.spec, devices)),
        "machine-stop" => Some(Deadline::to_stop(&record.spec)),
        "machine-kill" => Some(Deadline::to_vanish(&record.spec, devices)),
        _ => None,
    }
}

fn state(engine: &Engine, machine: MachineId, record: &MachineRecord) -> (MachineState, String) {
    match engine.jobs.on_machine(machine).map(|(_, job)| job.kind) {
        // Whoever sees it off may start it: not while a job starts it, nor before the job that ended it is over.
        Some("machine-start") if is_down(record.state) => return (MachineState::Preparing, record.reason.clone()),
        Some("machine-stop" | "machine-kill" | "machine-end") if is_down(record.state) => {
            return (MachineState::Stopping, record.reason.clone());
        }
        Some(_) => return (record.state, record.reason.clone()),
        None if is_down(record.state) => return (record.state, record.reason.clone()),
        None => {}
    }
    match engine.machines.seen.get(&machine) {
        Some(seen) if seen.fresh && !seen.note.is_empty() => (MachineState::Stopping, seen.note.clone()),
        Some(seen) if seen.fresh && record.reason.is_empty() => (record.state, seen.odd.clone()),
        Some(seen) if seen.fresh => (record.state, record.reason.clone()),
        Some(seen) if engine.machines.facts.is_some() && !seen.note.is_empty() => (MachineState::Unknown, seen.note.clone()),
        Some(_) | None if engine.machines.facts.is_some() => (MachineState::Unknown, "it has not been looked at yet".into()),
        Some(_) | None => (MachineState::Unknown, format!("libvirt cannot be asked: {}", engine.machines.lost)),
    }
}
