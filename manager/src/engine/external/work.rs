//! What jobs on these claims do.

use std::collections::BTreeSet;

use vfio::PciAddress;

use super::super::claims::{self, Claimant, Claimed};
use super::super::jobs::{Concern, Job, Work};
use super::super::worker::{Outcome, Worker};
use super::super::{Engine, machines, now};
use super::look::{Look, Subject};
use super::subject;
use crate::failure::{ErrorKind, Failure};
use crate::id::{ClaimId, JobId, MachineId, TenantId};
use crate::ledger::{ClaimRecord, ReleaseOn, Standing, Terms};
use crate::plan::Refusal;
use crate::spec::ClaimSpec;

/// Whether devices may be claimed, and what that is about.
pub(in crate::engine) fn admit_claim(engine: &mut Engine, tenant: TenantId, spec: &ClaimSpec) -> Result<Concern, Failure> {
    is_others_domain(engine, (tenant, spec))?;
    machines::choose(engine, tenant, &spec.devices, "devices")?;
    Ok(Concern { kind: "claim", tenant: Some(tenant), ..Concern::default() })
}

/// Whether a claim may be released by whoever knows it by `epoch`, and what that is about.
pub(in crate::engine) fn admit_release(engine: &mut Engine, claim: ClaimId, epoch: u64) -> Result<Concern, Failure> {
    let devices = releasable(engine, claim, epoch)?.devices.clone();
    engine.observe();
    not_in_use(engine, &devices)?;
    let tenant = engine.ledger.claims.get(&claim).map(|claim| claim.tenant);
    Ok(Concern { kind: "claim-release", devices, tenant, ..Concern::default() })
}

/// Gives what is to run for the release of a claim: it records what it does itself.
pub(in crate::engine) fn begin_release(engine: &Engine, id: ClaimId, epoch: u64) -> Result<Work, Failure> {
    let claim = releasable(engine, id, epoch)?;
    let ending = Ending { id, claim: claim.clone(), subject: subject(engine, claim), without_libvirt: true };
    Ok(Box::new(move |worker: &Worker| ending.run(worker)))
}

fn is_others_domain(engine: &Engine, (tenant, spec): (TenantId, &ClaimSpec)) -> Result<(), Failure> {
    match engine.ledger.machines.get(&MachineId(spec.domain)) {
        None => Ok(()),
        Some(machine) => {
            // Another tenant's machine has no name here.
            let name = if machine.tenant == tenant { machine.spec.name.as_str() } else { "of another tenant" };
            let message = format!("the domain {} is gpuward's machine {name}, which claims its devices itself", spec.domain);
            Err(Failure::new(ErrorKind::Conflict, message).remedy("name the domain that another manager runs"))
        }
    }
}

/// Records claims as pending and gives what is to run.
pub(in crate::engine) fn begin_claim(
    engine: &mut Engine,
    job: JobId,
    (tenant, spec): (TenantId, &ClaimSpec),
    client: String,
) -> Result<Work, Failure> {
    is_others_domain(engine, (tenant, spec))?;
    let bundles = machines::choose(engine, tenant, &spec.devices, "devices")?;
    let terms = Terms {
        release: spec.release,
        client: if spec.release == ReleaseOn::ClientGone { client } else { String::new() },
        expires: if spec.ttl == 0 { 0 } else { now() + u64::from(spec.ttl) },
        was_running: false,
    };
    let claimant = Claimant { tenant, machine: None, domain: spec.domain, terms: Some(terms) };
    let claimed = engine.claim(job, &claimant, &bundles)?;
    Ok(Box::new(move |worker: &Worker| take(worker, &claimed)))
}

fn take(worker: &Worker, claimed: &Claimed) -> Outcome {
    if let Err(outcome) = claims::take(worker, claimed) {
        return *outcome;
    }
    match in_order(worker, claimed) {
        Ok(()) => machines::made(&claimed.claims),
        // No guest had them: they are as clean as they were.
        Err(failure) => {
            let given_back = claimed.claims.iter().try_for_each(|(id, claim)| claims::give_back(worker, *id, claim));
            Outcome::failed(given_back.map_or_else(|error| failure.clone().because(error.message), |()| failure.clone()))
        }
    }
}

fn in_order(worker: &Worker, claimed: &Claimed) -> Result<(), Failure> {
    worker.step("looking at the devices once more", 0.9);
    let ledger = worker.record(|_| {})?;
    let devices: Vec<_> = claimed.claims.values().flat_map(|claim| claim.devices.iter().copied()).collect();
    claims::ready(worker, &ledger, &devices)?;
    if worker.is_canceled() {
        return Err(Failure::new(ErrorKind::Canceled, "canceled; what had been taken was given back"));
    }
    Ok(())
}

/// The claim, if whoever knows it by `epoch` may end it.
fn releasable(engine: &Engine, id: ClaimId, epoch: u64) -> Result<&ClaimRecord, Failure> {
    let Some(claim) = engine.ledger.claims.get(&id) else {
        return Err(
            Failure::new(ErrorKind::Conflict, format!("there is no claim {id} any more")).remedy("`gpuward claims` shows the claims")
        );
    };
    if claim.epoch != epoch {
        let message = format!("claim {id} has epoch {}, not {epoch}: it is another one than you know", claim.epoch);
        return Err(Failure::new(ErrorKind::Conflict, message).remedy("look who has it before you release it"));
    }
    if let Some(machine) = claim.machine {
        let name = engine.ledger.machines.get(&machine).map_or_else(|| machine.0.to_string(), |machine| machine.spec.name.clone());
        return Err(Failure::new(ErrorKind::Conflict, format!("claim {id} is that of machine {name}")).remedy("stop the machine"));
    }
    let quarantine = claim.devices.iter().find_map(|device| Some((*device, engine.ledger.quarantines.get(device)?)));
    match quarantine {
        // What was begun for it could neither be finished nor undone: clearing the quarantine ends it.
        Some((device, quarantine)) if claim.standing == Standing::Pending => {
            Err(Refusal::Quarantined { device, reason: quarantine.reason.clone() }.into())
        }
        Some(_) | None => Ok(claim),
    }
}

fn not_in_use(engine: &Engine, devices: &[PciAddress]) -> Result<(), Failure> {
    let surroundings = engine.surroundings(&devices.iter().copied().collect::<BTreeSet<_>>(), None);
    if let Some((device, holders)) = surroundings.holders.into_iter().next() {
        return Err(Refusal::Held { device, holders, pausable: Vec::new() }.into());
    }
    match devices.iter().find_map(|device| Some((*device, surroundings.domains.get(device)?.clone()))) {
        Some((device, domain)) => Err(Refusal::UsedByDomain { device, domain }.into()),
        None => Ok(()),
    }
}

/// Starts the daemon's own job for a claim whose time has come.
///
/// # Errors
/// The job cannot be recorded.
pub(super) fn begin_end(engine: &mut Engine, id: ClaimId) -> Result<(), Failure> {
    let job = JobId(engine.ledger.next_job);
    engine.commit(|ledger| {
        ledger.next_job += 1;
        if let Some(claim) = ledger.claims.get_mut(&id) {
            claim.standing = Standing::Releasing;
        }
    })?;
    let Some(claim) = engine.ledger.claims.get(&id) else { return Ok(()) };
    let ending = Ending { id, claim: claim.clone(), subject: subject(engine, claim), without_libvirt: false };
    let mut own = Job::own("claim-end", None);
    own.view.devices = claim.devices.clone();
    own.view.tenant = Some(claim.tenant);
    engine.jobs.0.insert(job, own);
    engine.spawn(job, Box::new(move |worker: &Worker| ending.run(worker)));
    Ok(())
}

/// A claim that is being ended.
struct Ending {
    id: ClaimId,
    claim: ClaimRecord,
    subject: Subject,
    /// Somebody asked for it: where libvirt cannot be asked, the kernel's word is enough.
    without_libvirt: bool,
}

impl Ending {
    fn run(self, worker: &Worker) -> Outcome {
        match self.is_unused().and_then(|()| claims::release(worker, self.id, &self.claim)) {
            Ok(events) => Outcome { events, ..Outcome::done() },
            Err(failure) => Outcome::failed(failure),
        }
    }

    // Asked once more: what led here was seen before the claim was said to end.
    fn is_unused(&self) -> Result<(), Failure> {
        let held = |why: String| Failure::new(ErrorKind::Held, format!("the devices of claim {} are in use", self.id)).because(why);
        match self.subject.look() {
            Look::Gone => Ok(()),
            Look::Unknown(_) if self.without_libvirt => self.subject.held().map_or(Ok(()), |why| Err(held(why))),
            Look::Unknown(failure) => Err(failure),
            Look::Held { why } => Err(held(why)),
            Look::Runs { name } => Err(held(format!("the domain {name} runs"))),
        }
    }
}
