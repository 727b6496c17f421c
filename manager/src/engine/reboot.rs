//! Claims of an earlier boot: whatever had their devices then ended with it, without a word.
//!
//! After a boot the host's drivers have everything. Devices of a claim are bound again first, so that they can be reset: those of a machine
//! that ran are then given back, `unclean`; a claim that outlives its domain stays. It needs the kernel only, so that it can be
//! done before libvirt starts.

use std::collections::BTreeMap;

use vfio::{Function, PciAddress};

use super::Engine;
use super::carry::{Task, carry_out, one_line};
use super::devices::first_of;
use super::jobs::{Job, Work};
use super::machines::{self, Finish};
use super::worker::{Outcome, Worker};
use crate::failure::{ErrorKind, Failure};
use crate::id::{ClaimId, JobId, MachineId};
use crate::ledger::{ClaimRecord, Ledger, Standing};
use crate::machine::held_by;
use crate::plan::Plan;
use crate::request::Goal;

type Claims = BTreeMap<ClaimId, ClaimRecord>;

/// Whether a claim of an earlier boot has not had its turn yet: nothing else is to be made of it.
pub(super) fn awaits(engine: &Engine, id: ClaimId, claim: &ClaimRecord) -> bool {
    claim.standing != Standing::Pending && engine.ledger.is_of_an_earlier_boot(claim) && !engine.settled.contains(&id)
}

/// Queues a job for each machine and each domain of others that had claims before this boot; once for each, when its devices are
/// there. Virtual functions may have to be made first.
pub(super) fn settle(engine: &mut Engine) {
    if !engine.recovered {
        return;
    }
    let mut machines: BTreeMap<MachineId, Claims> = BTreeMap::new();
    let mut others = Claims::new();
    for (id, claim) in engine.ledger.claims.iter().filter(|(id, claim)| awaits(engine, **id, claim)) {
        match claim.machine {
            Some(machine) => drop(machines.entry(machine).or_default().insert(*id, claim.clone())),
            None => drop(others.insert(*id, claim.clone())),
        }
    }
    let of_machines = machines.into_iter().map(|(machine, claims)| (Some(machine), claims));
    let of_others = others.into_iter().map(|(id, claim)| (None, Claims::from([(id, claim)])));
    let is_there = |device: &PciAddress| engine.inventory.devices.contains_key(device);
    let can_begin = |claims: &Claims| !engine.makes_vfs() || devices_of(claims).iter().all(is_there);
    let ready: Vec<_> = of_machines.chain(of_others).filter(|(_, claims)| can_begin(claims)).collect();
    for (machine, claims) in ready {
        engine.settled.extend(claims.keys());
        let devices = devices_of(&claims);
        if let Err(failure) = begin(engine, machine, claims) {
            tracing::error!("claims of an earlier boot on {devices:?} are left as they are: {}", one_line(&failure));
        }
    }
}

fn devices_of(claims: &Claims) -> Vec<PciAddress> {
    claims.values().flat_map(|claim| claim.devices.iter().copied()).collect()
}

fn begin(engine: &mut Engine, machine: Option<MachineId>, claims: Claims) -> Result<(), Failure> {
    let job = JobId(engine.ledger.next_job);
    let finish = machine.and_then(|machine| machines::finish_of(engine, machine, "the host was restarted while it ran"));
    engine.commit(|ledger| {
        ledger.next_job += 1;
        if let Some(finish) = &finish {
            finish.begin(ledger);
        }
    })?;
    let kind = if finish.is_some() { "machine-end" } else { "claim-restore" };
    let mut own = Job::own(kind, machine);
    own.view.devices = devices_of(&claims);
    let own = own.queued(Box::new(move |engine, job| prepare(engine, job, claims, finish)));
    engine.jobs.0.insert(job, own);
    Ok(())
}

fn prepare(engine: &mut Engine, job: JobId, claims: Claims, finish: Option<Finish>) -> Result<Work, Failure> {
    let ends = finish.as_ref().is_some_and(Finish::ends_claims);
    // What was taken for one run only goes back to the host, where it is already.
    let bound_again: Claims =
        claims.iter().filter(|(_, claim)| !(ends && claim.on_demand)).map(|(id, claim)| (*id, claim.clone())).collect();
    let plan = match plan(engine, job, &bound_again) {
        Ok(plan) => plan,
        // The host's driver has initialised it anew, and keeps it: it is looked at, and not in the pool.
        Err(failure) if ends => {
            tracing::warn!("{}", one_line(&failure));
            Plan::default()
        }
        Err(failure) => return Err(failure),
    };
    let inventory = engine.inventory.clone();
    engine.commit(|ledger| ledger.begin_moves(&plan.moves, &inventory))?;
    let functions: Vec<_> = devices_of(&claims).iter().filter_map(|device| inventory.devices.get(device)).cloned().collect();
    // What ends stays of its boot: that is what makes it unclean.
    let restored = bound_again.keys().filter(|_| !ends).copied().collect();
    Ok(Box::new(move |worker: &Worker| run(worker, (plan, restored), &functions, finish)))
}

// Planned as if nobody had a claim on them: it is for their claims that they are bound.
fn plan(engine: &mut Engine, job: JobId, claims: &Claims) -> Result<Plan, Failure> {
    engine.observe();
    let mut ledger = engine.ledger.clone();
    ledger.claims.retain(|id, _| !claims.contains_key(id));
    let goals = claims.values().filter_map(|claim| Some(Goal::Assign { device: *claim.devices.last()?, force: false }));
    engine.plan_with(&ledger, &goals.collect::<Vec<_>>(), Some(job)).map_err(first_of)
}

fn run(worker: &Worker, (plan, claims): (Plan, Vec<ClaimId>), functions: &[Function], finish: Option<Finish>) -> Outcome {
    let done = Box::new(move |ledger: &mut Ledger| ledger.restore_claims(&claims));
    if let Err(outcome) = carry_out(worker, Task { plan, done, undone: Box::new(|_| {}) }) {
        match &outcome.error {
            Some(failure) if finish.as_ref().is_some_and(Finish::ends_claims) => tracing::warn!("{}", one_line(failure)),
            Some(_) | None => return *outcome,
        }
    }
    let Some(finish) = finish else { return Outcome::done() };
    if let Some(why) = held_by(worker.host(), functions) {
        return Outcome::failed(Failure::new(ErrorKind::Held, "devices of an earlier boot are in use").because(why));
    }
    finish.run(worker)
}
