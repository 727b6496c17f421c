//! What jobs on machines do: each begins with an entry in the ledger, and ends with one.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vfio::{Inventory, PciAddress};

use super::super::Engine;
use super::super::claims::{self, Claimant, Claimed};
use super::super::jobs::{Job, Work};
use super::super::worker::{Outcome, Worker};
use super::{Hint, admit, claims_of, forget_process, subject};
use crate::failure::{ErrorKind, Failure};
use crate::id::{ClaimId, JobId, MachineId, TenantId};
use crate::ledger::{ClaimRecord, Ledger, MachineRecord};
use crate::libvirt::{HostFacts, Presence};
use crate::machine::{self, Deadline, Launch, Metadata, Running, Subject};
use crate::plan::Plan;
use crate::preflight;
use crate::request::Request;
use crate::spec::{Hold, MachineSpec, TenantSpec};
use crate::view::{EventKind, MachineState, Subject as EventSubject};

type Claims = BTreeMap<ClaimId, ClaimRecord>;

pub(super) fn begin(engine: &mut Engine, job: JobId, request: Request) -> Result<Work, Failure> {
    match request {
        Request::CreateMachine { tenant, spec } => begin_creation(engine, job, tenant, *spec),
        Request::StartMachine(machine) => begin_start(engine, job, machine),
        Request::StopMachine(machine) => begin_stop(engine, machine),
        Request::KillMachine(machine) => begin_kill(engine, job, machine),
        Request::RebootMachine(machine) => begin_reboot(engine, machine),
        Request::RemoveMachine(machine) => begin_removal(engine, machine),
        Request::Apply { .. }
        | Request::Rescan
        | Request::Reset(_)
        | Request::ClearQuarantine(_)
        | Request::Recover(_)
        | Request::Claim { .. }
        | Request::ReleaseClaim { .. }
        | Request::Tenant(_) => Err(Failure::new(ErrorKind::Internal, "this is not about a machine")),
    }
}

fn begin_creation(engine: &mut Engine, job: JobId, tenant: TenantId, spec: MachineSpec) -> Result<Work, Failure> {
    admit::admit_creation(engine, tenant, &spec)?;
    let machine = MachineId(spec.uuid);
    let holds = spec.hold == Hold::Defined;
    let record = MachineRecord { spec: spec.clone(), tenant, state: MachineState::Off, reason: String::new() };
    engine.commit(|ledger| drop(ledger.machines.insert(machine, record)))?;
    if !holds {
        return Ok(Box::new(|_: &Worker| Outcome::done()));
    }
    let claimed = match claim(engine, job, tenant, &spec) {
        Ok(claimed) => claimed,
        Err(failure) => {
            engine.commit(|ledger| drop(ledger.machines.remove(&machine)))?;
            return Err(failure);
        }
    };
    Ok(Box::new(move |worker: &Worker| match claims::take(worker, &claimed) {
        Ok(()) => made(&claimed.claims),
        Err(outcome) => {
            let forgotten = worker.commit(move |ledger| drop(ledger.machines.remove(&machine)));
            forgotten.map_or_else(Outcome::failed, |()| *outcome)
        }
    }))
}

fn claim(engine: &mut Engine, job: JobId, tenant: TenantId, spec: &MachineSpec) -> Result<Claimed, Failure> {
    let bundles = admit::choose(engine, tenant, &spec.devices, "device")?;
    let claimant = Claimant { tenant, machine: Some(MachineId(spec.uuid)), domain: spec.uuid, terms: None };
    engine.claim(job, &claimant, &bundles)
}

pub(in crate::engine) fn made(claims: &Claims) -> Outcome {
    let events = claims.keys().map(|id| (EventKind::ClaimMade, EventSubject::Claim(*id), BTreeMap::new()));
    Outcome { claims: claims.keys().copied().collect(), events: events.collect(), ..Outcome::done() }
}

fn begin_start(engine: &mut Engine, job: JobId, machine: MachineId) -> Result<Work, Failure> {
    admit::admit_start(engine, machine)?;
    let MachineRecord { spec, tenant, .. } = admit::record(engine, machine)?.clone();
    let held: Claims = claims_of(engine, machine).map(|(id, claim)| (id, claim.clone())).collect();
    let claimed = if held.is_empty() { claim(engine, job, tenant, &spec)? } else { Claimed { claims: held, plan: Plan::default() } };
    engine.commit(|ledger| set(ledger, machine, MachineState::Preparing, ""))?;
    engine.machines.errors.remove(&machine);
    let (Some(subject), Some(facts)) = (subject(engine, machine), engine.machines.facts) else {
        return Err(Failure::new(ErrorKind::HypervisorFailed, "the connection to libvirt was lost"));
    };
    let request = engine.jobs.0.get(&job).map(|job| job.view.request_id.clone()).unwrap_or_default();
    let policy = engine.ledger.tenant(tenant)?.clone();
    let start = Start { spec, tenant, claimed, subject, facts, request, policy, backing: Vec::new() };
    Ok(Box::new(move |worker: &Worker| start.run(worker)))
}

/// A machine being started.
struct Start {
    spec: MachineSpec,
    tenant: TenantId,
    claimed: Claimed,
    subject: Subject,
    facts: HostFacts,
    request: String,
    policy: TenantSpec,
    backing: Vec<machine::BackedBy>,
}

impl Start {
    fn machine(&self) -> MachineId {
        MachineId(self.spec.uuid)
    }

    fn devices(&self) -> Vec<PciAddress> {
        self.claimed.claims.values().flat_map(|claim| claim.devices.iter().copied()).collect()
    }

    fn run(mut self, worker: &Worker) -> Outcome {
        worker.step("looking at its volumes", 0.0);
        match machine::backing(&self.subject.libvirt, &self.spec, &self.policy) {
            Ok(backing) => self.backing = backing,
            Err(failure) => return self.refuse(worker, failure),
        }
        worker.step("looking whether it can run here", 0.0);
        if let Err(failure) = self.can_run(worker) {
            return self.refuse(worker, failure);
        }
        if let Err(outcome) = claims::take(worker, &self.claimed) {
            return self.come_to_nothing(worker, *outcome);
        }
        let launch = match self.prepare(worker) {
            Ok(launch) => launch,
            Err(failure) => return self.withdraw(worker, failure),
        };
        worker.step("starting the domain", 0.6);
        match machine::start(&launch).and_then(|running| self.confirm(worker, running)) {
            Ok(outcome) => outcome,
            Err(failure) => self.clean_up(worker, failure),
        }
    }

    fn can_run(&self, worker: &Worker) -> Result<(), Failure> {
        let Subject { libvirt, devices, .. } = &self.subject;
        let findings = preflight::look(worker.host(), libvirt, (&self.spec, devices, &self.facts));
        for finding in &findings {
            tracing::info!(machine = %self.machine().0, code = finding.code, severity = finding.severity.word(), "{finding}");
        }
        preflight::refusal(&findings).map_or(Ok(()), Err)
    }

    // Nothing was touched yet: what was claimed for this start alone is given up.
    fn refuse(&self, worker: &Worker, failure: Failure) -> Outcome {
        let outcome = match self.spec.hold {
            Hold::Defined => Outcome::failed(failure),
            Hold::Running => *claims::forgo(worker, &self.claimed, failure),
        };
        self.come_to_nothing(worker, outcome)
    }

    fn come_to_nothing(&self, worker: &Worker, outcome: Outcome) -> Outcome {
        let reason = outcome.error.as_ref().map(|error| error.message.clone()).unwrap_or_default();
        let state = outcome.error.as_ref().map_or(MachineState::Failed, after);
        let machine = self.machine();
        let recorded = worker.commit(move |ledger| set(ledger, machine, state, &reason));
        recorded.map_or_else(Outcome::failed, |()| outcome)
    }

    // Right before libvirt gets them: with `managed='no'` it trusts our word that the devices are as they should be.
    fn prepare(&mut self, worker: &Worker) -> Result<Launch, Failure> {
        let machine = self.machine();
        worker.step("looking at the devices once more", 0.5);
        let ledger = worker.record(move |ledger| set(ledger, machine, MachineState::Starting, ""))?;
        claims::ready(worker, &ledger, &self.devices())?;
        let inventory = Inventory::observe(worker.host(), 0);
        self.subject.devices = self.devices().iter().filter_map(|device| inventory.devices.get(device)).cloned().collect();
        let claims = self.claimed.claims.iter().map(|(id, claim)| (*id, claim.epoch)).collect();
        let metadata = Metadata { machine, tenant: self.tenant, claims, request: self.request.clone() };
        if worker.is_canceled() {
            return Err(Failure::new(ErrorKind::Canceled, "canceled before the domain was created"));
        }
        // A domain of somebody else's with this UUID is not ours to end when libvirt refuses a second one.
        if let Presence::Active(domain) = self.subject.libvirt.presence(self.spec.uuid)? {
            let message = format!("a domain with the machine's UUID runs already, and gpuward did not start it: {}", domain.name);
            return Err(Failure::new(ErrorKind::Conflict, message).remedy("end that domain first"));
        }
        let guest_dir = worker.host().path(machine::GUEST_DIR.trim_start_matches('/'));
        std::fs::create_dir_all(&guest_dir)
            .map_err(|error| Failure::new(ErrorKind::PreflightFailed, format!("cannot make {}: {error}", guest_dir.display())))?;
        let given = machine::Given { devices: &self.subject.devices, backing: &self.backing };
        let xml = machine::domain_xml(&self.spec, given, &metadata, &self.facts)?;
        let within = Deadline::to_start(&self.spec, self.subject.devices.len()).within();
        Ok(Launch { subject: self.subject.clone(), xml, within })
    }

    fn confirm(&self, worker: &Worker, running: Running) -> Result<Outcome, Failure> {
        let machine = self.machine();
        if worker.is_canceled() {
            return Err(Failure::new(ErrorKind::Canceled, "canceled; its domain was ended"));
        }
        worker.commit(move |ledger| set(ledger, machine, MachineState::Running, ""))?;
        super::tell(&worker.engine, Hint::Started(machine, Box::new(running)));
        Ok(made(&self.claimed.claims).event(EventKind::MachineStarted, EventSubject::Machine(machine), BTreeMap::new()))
    }

    // No domain was created: the devices are as clean as they were.
    fn withdraw(&self, worker: &Worker, failure: Failure) -> Outcome {
        let given_back = match self.spec.hold {
            Hold::Defined => Ok(()),
            Hold::Running => self.claimed.claims.iter().try_for_each(|(id, claim)| claims::give_back(worker, *id, claim)),
        };
        let (machine, state) = (self.machine(), after(&failure));
        let reason = failure.message.clone();
        let recorded = given_back.and_then(|()| worker.commit(move |ledger| set(ledger, machine, state, &reason)));
        Outcome::failed(recorded.map_or_else(|error| failure.clone().because(error.message), |()| failure.clone()))
    }

    // A domain may run: its devices are free only when it is gone.
    fn clean_up(&self, worker: &Worker, failure: Failure) -> Outcome {
        let machine = self.machine();
        worker.rolling_back("ending the domain");
        let reason = failure.message.clone();
        let ended = worker
            .commit(move |ledger| set(ledger, machine, MachineState::Stopping, &reason))
            .and_then(|()| machine::end_now(&self.subject, to_vanish(&self.spec, &self.subject)))
            .and_then(|()| finish(worker, (machine, self.spec.hold), after(&failure), &failure.message));
        match ended {
            Ok(events) => Outcome { events, ..Outcome::failed(failure) },
            Err(left) => Outcome::failed(failure.because(format!("its devices stay claimed: {}", left.message))),
        }
    }
}

fn to_vanish(spec: &MachineSpec, subject: &Subject) -> Duration {
    Deadline::to_vanish(spec, subject.devices.len()).within()
}

/// What a machine is after a start that came to nothing.
fn after(failure: &Failure) -> MachineState {
    if failure.kind == ErrorKind::Canceled { MachineState::Off } else { MachineState::Failed }
}

fn begin_stop(engine: &mut Engine, machine: MachineId) -> Result<Work, Failure> {
    let spec = admit::record(engine, machine)?.spec.clone();
    let subject = subject(engine, machine).ok_or_else(without_hypervisor)?;
    engine.commit(|ledger| set(ledger, machine, MachineState::Stopping, ""))?;
    Ok(Box::new(move |worker: &Worker| {
        worker.step("waiting for the guest to shut down", 0.1);
        let stopped = machine::shut_down(&subject, Deadline::to_stop(&spec).within());
        let stopped = match stopped {
            Err(failure) if failure.kind == ErrorKind::DeadlineExceeded && spec.kill_after_deadline => {
                worker.step(format!("killing it: {}", failure.message), 0.6);
                machine::end_now(&subject, to_vanish(&spec, &subject))
            }
            stopped => stopped,
        };
        conclude(worker, machine, spec.hold, stopped)
    }))
}

fn begin_kill(engine: &mut Engine, job: JobId, machine: MachineId) -> Result<Work, Failure> {
    let spec = admit::record(engine, machine)?.spec.clone();
    let subject = subject(engine, machine).ok_or_else(without_hypervisor)?;
    // Another job on it sees it go, and finishes what it began; one that starts it gives up.
    let others = engine.jobs.0.iter().filter(|(other, of)| **other != job && of.view.machine == Some(machine) && !of.view.state.is_over());
    let others: Vec<_> = others.map(|(_, other)| other.cancel.clone()).collect();
    others.iter().for_each(|cancel| cancel.store(true, Ordering::Relaxed));
    let is_alone = others.is_empty();
    if is_alone {
        engine.commit(|ledger| set(ledger, machine, MachineState::Stopping, ""))?;
    }
    Ok(Box::new(move |worker: &Worker| {
        worker.step("killing it", 0.1);
        match machine::end_now(&subject, to_vanish(&spec, &subject)) {
            Ok(()) if !is_alone => Outcome::done(),
            ended => conclude(worker, machine, spec.hold, ended),
        }
    }))
}

fn begin_reboot(engine: &mut Engine, machine: MachineId) -> Result<Work, Failure> {
    admit::admit_reboot(engine, machine)?;
    let subject = subject(engine, machine).ok_or_else(without_hypervisor)?;
    Ok(Box::new(move |worker: &Worker| {
        worker.step("asking the guest to reboot", 0.1);
        machine::reboot(&subject).map_or_else(Outcome::failed, |()| Outcome::done())
    }))
}

fn without_hypervisor() -> Failure {
    Failure::new(ErrorKind::HypervisorFailed, "gpuwardd runs without a hypervisor")
}

fn conclude(worker: &Worker, machine: MachineId, hold: Hold, ended: Result<(), Failure>) -> Outcome {
    match ended.and_then(|()| finish(worker, (machine, hold), MachineState::Off, "")) {
        Ok(events) => Outcome { events, ..Outcome::done() },
        Err(failure) => Outcome::failed(failure),
    }
}

/// What is left to do for a machine that ended with the boot it ran in.
pub(in crate::engine) struct Finish {
    machine: MachineId,
    hold: Hold,
    reason: &'static str,
}

impl Finish {
    /// Whether its claims end with it.
    pub(in crate::engine) fn ends_claims(&self) -> bool {
        self.hold == Hold::Running
    }

    /// Records that it is about to be done.
    pub(in crate::engine) fn begin(&self, ledger: &mut Ledger) {
        set(ledger, self.machine, MachineState::Stopping, self.reason);
    }

    /// Nobody holds its devices: ends what ends with it.
    pub(in crate::engine) fn run(self, worker: &Worker) -> Outcome {
        match finish(worker, (self.machine, self.hold), MachineState::Off, self.reason) {
            Ok(events) => Outcome { events, ..Outcome::done() },
            Err(failure) => Outcome::failed(failure),
        }
    }
}

/// What is left to do for a machine of which something is recorded as running, or that holds claims only while it runs.
pub(in crate::engine) fn finish_of(engine: &Engine, machine: MachineId, reason: &'static str) -> Option<Finish> {
    let record = engine.ledger.machines.get(&machine)?;
    let is_over = super::is_down(record.state) && record.spec.hold == Hold::Defined;
    (!is_over).then_some(Finish { machine, hold: record.spec.hold, reason })
}

/// A machine is gone: its claims end, unless it holds them while it is defined.
fn finish(worker: &Worker, (machine, hold): (MachineId, Hold), state: MachineState, reason: &str) -> Result<claims::Events, Failure> {
    let ledger = worker.record(|_| {})?;
    let mut events = claims::Events::new();
    let of_machine = ledger.claims.iter().filter(|(_, claim)| claim.machine == Some(machine) && hold == Hold::Running);
    for (id, claim) in of_machine {
        events.extend(claims::release(worker, *id, claim)?);
    }
    let reason = reason.to_owned();
    worker.commit(move |ledger| set(ledger, machine, state, &reason))?;
    events.push((EventKind::MachineStopped, EventSubject::Machine(machine), BTreeMap::new()));
    Ok(events)
}

fn begin_removal(engine: &mut Engine, machine: MachineId) -> Result<Work, Failure> {
    admit::admit_removal(engine, machine)?;
    let held: Claims = claims_of(engine, machine).map(|(id, claim)| (id, claim.clone())).collect();
    Ok(Box::new(move |worker: &Worker| {
        let mut events = claims::Events::new();
        for (id, claim) in &held {
            match claims::release(worker, *id, claim) {
                Ok(released) => events.extend(released),
                Err(failure) => return Outcome::failed(failure),
            }
        }
        match worker.commit(move |ledger| drop(ledger.machines.remove(&machine))) {
            Ok(()) => Outcome { events, ..Outcome::done() },
            Err(failure) => Outcome::failed(failure),
        }
    }))
}

/// Starts the daemon's own job for a machine that is gone although nobody asked for that.
///
/// # Errors
/// The job cannot be recorded.
pub(super) fn begin_end(engine: &mut Engine, machine: MachineId) -> Result<(), Failure> {
    let record = admit::record(engine, machine)?;
    let hold = record.spec.hold;
    let reason = match record.state {
        MachineState::Running | MachineState::Paused => "the guest ended by itself, or its process was killed",
        MachineState::Preparing | MachineState::Starting => "its start was cut off",
        MachineState::Off | MachineState::Stopping | MachineState::Failed | MachineState::Unknown => "",
    };
    let subject = subject(engine, machine);
    forget_process(engine, machine);
    let job = JobId(engine.ledger.next_job);
    engine.commit(|ledger| {
        ledger.next_job += 1;
        set(ledger, machine, MachineState::Stopping, reason);
    })?;
    engine.jobs.0.insert(job, Job::own("machine-end", Some(machine)));
    // Asked once more, of the claims it has now: what led here may have been seen before the last of them.
    let still_gone = move || subject.map_or(Ok(()), |subject| subject.wait_until_gone(Duration::ZERO));
    let work = move |worker: &Worker| match still_gone().and_then(|()| finish(worker, (machine, hold), MachineState::Off, reason)) {
        Ok(events) => Outcome { events, ..Outcome::done() },
        Err(failure) => Outcome::failed(failure),
    };
    engine.spawn(job, Box::new(work));
    Ok(())
}

fn set(ledger: &mut Ledger, machine: MachineId, state: MachineState, reason: &str) {
    if let Some(record) = ledger.machines.get_mut(&machine) {
        record.state = state;
        record.reason = reason.into();
    }
}
