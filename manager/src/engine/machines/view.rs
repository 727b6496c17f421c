//! What clients see of machines.

use std::collections::BTreeMap;

use super::{Engine, claims_of, is_down, runs};
use crate::id::MachineId;
use crate::ledger::MachineRecord;
use crate::view::{MachineState, MachineView};

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
        guest_state: "unknown",
        error: engine.machines.errors.get(&machine).cloned(),
        domain_xml: seen.filter(|_| runs).map(|seen| seen.xml.clone()).unwrap_or_default(),
        generation: 0,
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
        Some(seen) if seen.fresh => (record.state, record.reason.clone()),
        Some(seen) if engine.machines.facts.is_some() && !seen.note.is_empty() => (MachineState::Unknown, seen.note.clone()),
        Some(_) | None if engine.machines.facts.is_some() => (MachineState::Unknown, "it has not been looked at yet".into()),
        Some(_) | None => (MachineState::Unknown, format!("libvirt cannot be asked: {}", engine.machines.lost)),
    }
}
