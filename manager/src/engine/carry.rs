//! Carrying out a plan whose beginning is in the ledger: journal, changes, and what the ledger then says.

use std::collections::BTreeMap;

use vfio::PciAddress;

use super::now;
use super::pause::{pause, resume};
use super::worker::{Outcome, Worker};
use crate::apply::{Applied, ApplyError, Run, boot_id};
use crate::failure::{ErrorKind, Failure};
use crate::journal::{Header, Journal};
use crate::ledger::Ledger;
use crate::ledger::moves::bindings;
use crate::plan::{Move, Plan};
use crate::view::{EventKind, JobState, Subject};

/// A plan and what its end means for the ledger beyond the bundles it moves.
pub struct Task {
    /// What is to be changed.
    pub plan: Plan,
    /// Together with the moves, once all is changed.
    pub done: super::Entry,
    /// Together with the moves, once all is undone.
    pub undone: super::Entry,
}

impl Task {
    /// A plan that means nothing beyond the bundles it moves.
    pub fn of(plan: Plan) -> Self {
        Self { plan, done: Box::new(|_| {}), undone: Box::new(|_| {}) }
    }
}

/// Carries out a task. On failure everything was undone, or its bundles are in quarantine: the outcome says which.
///
/// # Errors
/// How the job ends.
pub fn carry_out(worker: &Worker, task: Task) -> Result<(), Box<Outcome>> {
    let Task { plan, done, undone } = task;
    let (moves, vfs) = (plan.moves.clone(), plan.vfs.clone());
    let finish = move |ledger: &mut Ledger| {
        ledger.finish_moves(&moves);
        ledger.finish_vfs(&vfs);
        done(ledger);
    };
    if plan.is_empty() {
        return worker.commit(finish).map_err(failed);
    }
    let (moves, vfs) = (plan.moves.clone(), plan.vfs.clone());
    let header = Header { job: worker.job, boot: boot_id(worker.host()), digest: plan.digest(), moves, vfs };
    let mut journal = match Journal::create(&worker.options.run_dir, header) {
        Ok(journal) => journal,
        Err(error) => return Err(undo_nothing(worker, &plan, undone, Failure::of(ErrorKind::Internal, &error))),
    };
    let mut paused = Vec::new();
    let applied = match pause(worker, &plan, &mut journal, &mut paused) {
        Ok(()) => apply(worker, &plan, &mut journal),
        Err(error) => Applied { result: Err(error), begun: Vec::new(), stuck: Vec::new() },
    };
    let failure = match &applied.result {
        Ok(()) => match worker.commit(finish) {
            Ok(()) => {
                resume(worker.host(), worker.deadlines(), &paused);
                return journal.remove().map_err(|error| failed(Failure::of(ErrorKind::Internal, &error)));
            }
            Err(failure) => failure,
        },
        Err(error) => error.failure(),
    };
    let driver_refused = applied.result.as_ref().err().and_then(ApplyError::driver_refused);
    let undone = roll_back(worker, Begun { plan: &plan, applied: &applied, paused: &paused, journal }, undone, failure);
    Err(Box::new(Outcome { driver_refused, ..undone }))
}

/// What was begun, and is to be undone.
struct Begun<'a> {
    plan: &'a Plan,
    applied: &'a Applied,
    paused: &'a [String],
    journal: Journal,
}

fn failed(failure: Failure) -> Box<Outcome> {
    Box::new(Outcome::failed(failure))
}

fn run_of<'a>(worker: &'a Worker, is_canceled: &'a (dyn Fn() -> bool + Sync), on_step: super::OnStep<'a>) -> Run<'a> {
    Run { host: worker.host(), deadlines: worker.deadlines(), parallel: worker.parallel, is_canceled, on_step }
}

fn apply(worker: &Worker, plan: &Plan, journal: &mut Journal) -> Applied {
    let total = plan.changes().count().max(1) as f64;
    let is_canceled = || worker.is_canceled();
    let on_step = |number: usize, change: &vfio::Change| {
        let step = format!("{}: {} {} → {}", change.device(), change.knob(), change.from(), change.to());
        worker.step(step, number as f64 / total);
    };
    run_of(worker, &is_canceled, &on_step).apply(plan, journal)
}

/// Undoes the beginning of a plan of which nothing was changed, for the reason `failure`.
pub fn undo_nothing(worker: &Worker, plan: &Plan, undone: super::Entry, failure: Failure) -> Box<Outcome> {
    let committed = commit_undone(worker, plan, undone);
    failed(committed.err().unwrap_or(failure))
}

fn commit_undone(worker: &Worker, plan: &Plan, undone: super::Entry) -> Result<(), Failure> {
    let (moves, vfs) = (plan.moves.clone(), plan.vfs.clone());
    let now = bindings(worker.host(), moves.iter().flat_map(|bundle| bundle.devices.iter().copied()));
    worker.commit(move |ledger| {
        ledger.undo_moves(&moves, &now);
        vfs.iter().for_each(|vfs| ledger.undo_vfs(vfs.device));
        undone(ledger);
    })
}

// Bundles with a store that has not returned are left alone: whatever is stored now would wait behind it, or be undone by it.
fn roll_back(worker: &Worker, begun: Begun<'_>, undone: super::Entry, failure: Failure) -> Outcome {
    let Begun { plan, applied, paused, journal } = begun;
    worker.rolling_back(failure.message.clone());
    let is_stuck = |bundle: &&Move| bundle.devices.iter().any(|device| applied.stuck.contains(device));
    let moved = plan.moves.iter().filter(is_stuck).flat_map(|bundle| bundle.devices.clone());
    let parents = plan.vfs.iter().map(|vfs| vfs.device).filter(|device| applied.stuck.contains(device));
    let stuck: Vec<_> = moved.chain(parents).collect();
    let failure = quarantine_at_once(worker, &stuck, failure);
    let loose: Vec<_> = applied.begun.iter().filter(|change| !stuck.contains(&change.device())).cloned().collect();
    let undo = run_of(worker, &|| false, &|_, _| {}).roll_back(&loose, plan);
    let failure = resume(worker.host(), worker.deadlines(), paused).into_iter().fold(failure, Failure::because);
    match undo {
        Ok(()) if stuck.is_empty() => match commit_undone(worker, plan, undone) {
            Ok(()) => Outcome::failed(journal.remove().map_or_else(|error| Failure::of(ErrorKind::Internal, &error), |()| failure)),
            // The ledger still says pending, and the journal is there: the next start undoes it again.
            Err(unrecorded) => Outcome::failed(failure.because(unrecorded.message)),
        },
        undo => quarantine(worker, (plan, journal), undo.err(), (failure, stuck)),
    }
}

// Undoing the other bundles may take a while.
fn quarantine_at_once(worker: &Worker, stuck: &[PciAddress], failure: Failure) -> Failure {
    if stuck.is_empty() {
        return failure;
    }
    let (devices, reason) = (stuck.to_vec(), failure.message.clone());
    match worker.commit(move |ledger| ledger.quarantine(&devices, &reason, (now(), true))) {
        Ok(()) => failure,
        Err(unrecorded) => failure.because(unrecorded.message),
    }
}

fn quarantine(
    worker: &Worker,
    (plan, journal): (&Plan, Journal),
    undo: Option<ApplyError>,
    (failure, stuck): (Failure, Vec<PciAddress>),
) -> Outcome {
    let is_stuck = undo.as_ref().is_none_or(ApplyError::is_stuck);
    let reason = match &undo {
        None => failure.message.clone(),
        Some(error) => format!("{}; undoing it failed: {}", failure.message, one_line(&error.failure())),
    };
    let devices = if undo.is_none() { stuck } else { plan.devices() };
    let rest: Vec<_> = plan.moves.iter().filter(|bundle| !bundle.devices.iter().any(|device| devices.contains(device))).cloned().collect();
    let now_bound = bindings(worker.host(), rest.iter().flat_map(|bundle| bundle.devices.iter().copied()));
    let (kept, told, vfs) = (devices.clone(), reason.clone(), plan.vfs.clone());
    let recorded = worker.commit(move |ledger| {
        ledger.undo_moves(&rest, &now_bound);
        ledger.quarantine(&kept, &told, (now(), is_stuck));
        vfs.iter().for_each(|vfs| ledger.undo_vfs(vfs.device));
    });
    let kept = recorded.and_then(|()| journal.keep_as_failed().map_err(|error| Failure::of(ErrorKind::Internal, &error)));
    let mut failure = failure.because(reason.clone());
    if let Err(error) = kept {
        failure = failure.because(error.message);
    }
    let mut outcome = Outcome { state: JobState::RollbackFailed, ..Outcome::failed(failure) };
    let kind = if is_stuck { EventKind::Stuck } else { EventKind::Quarantined };
    for device in devices {
        let detail = BTreeMap::from([("reason".into(), reason.clone())]);
        outcome = outcome.event(kind, Subject::Device(device), detail);
    }
    outcome
}

/// A failure with its evidence, on one line.
pub fn one_line(failure: &Failure) -> String {
    std::iter::once(&failure.message).chain(&failure.why).cloned().collect::<Vec<_>>().join(": ")
}
