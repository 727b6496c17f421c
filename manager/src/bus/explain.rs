//! Why a machine is as it is, in one answer.

use super::dict::{Dict, of_failure};
use super::machine::word;
use super::manager::Answer;
use super::paths;
use crate::id::{JobId, MachineId};
use crate::view::{JobState, JobView, MachineState, MachineView, View};

/// What `Machine.Explain` answers; empty where there is no such machine.
pub(super) fn explain(view: &View, id: MachineId) -> Answer {
    let Some(machine) = view.machines.get(&id) else { return Answer::new() };
    let job = view.jobs.iter().find(|(_, job)| job.machine == Some(id) && !job.state.is_over());
    let mut dict = Dict::new();
    dict.put("state", word(machine.state)).put("reason", machine.reason.clone()).put("guest-state", machine.guest_state);
    dict.put("waits-for", waits_for(machine, job)).put("reboots", machine.reboots);
    dict.put("error", of_failure(machine.error.as_ref()));
    if let Some((job, _)) = job {
        dict.put("job", paths::job(*job));
    }
    if let Some(deadline) = &machine.deadline {
        dict.put("deadline", deadline.seconds).put("deadline-made-of", deadline.why.clone());
    }
    dict.into_map()
}

fn waits_for(machine: &MachineView, job: Option<(&JobId, &JobView)>) -> String {
    match job {
        Some((id, job)) if job.state == JobState::Queued => return format!("job {id} ({}) to begin", job.kind),
        Some((id, job)) if job.step.is_empty() => return format!("job {id} ({}) to end", job.kind),
        Some((id, job)) => return format!("job {id} ({}): {}", job.kind, job.step),
        None => {}
    }
    let next = match machine.state {
        MachineState::Off | MachineState::Failed => "somebody to start it",
        MachineState::Preparing | MachineState::Starting => "its start to be looked at",
        MachineState::Running => "",
        MachineState::Paused if machine.guest_state == "asleep" => "the guest to wake up",
        MachineState::Paused => "somebody to resume its domain in libvirt, or to end it",
        MachineState::Stopping => "everything of it to be gone; its devices stay claimed until then",
        MachineState::Unknown => "libvirt to say what became of it; its devices stay claimed until then",
    };
    next.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_without_a_job_says_what_has_to_happen_next() {
        let machine = |state, guest_state| MachineView {
            name: "a".into(),
            tenant: crate::id::TenantId::BUILT_IN,
            state,
            reason: String::new(),
            claims: Vec::new(),
            isolation_level: "",
            leader: 0,
            guest_state,
            reboots: 0,
            devices: Vec::new(),
            deadline: None,
            error: None,
            domain_xml: String::new(),
            generation: 0,
        };
        let cases = [
            (MachineState::Off, "unknown", "somebody to start it"),
            (MachineState::Running, "started", ""),
            (MachineState::Paused, "asleep", "the guest to wake up"),
            (MachineState::Paused, "unknown", "somebody to resume its domain in libvirt, or to end it"),
        ];
        for (state, guest, says) in cases {
            assert_eq!(waits_for(&machine(state, guest), None), says, "{state:?}");
        }
    }
}
