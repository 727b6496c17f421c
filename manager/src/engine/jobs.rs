//! Jobs: queued, running, and the last ones that ended.

use std::collections::BTreeMap;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use vfio::PciAddress;

use super::worker::{Outcome, Worker};
use super::{Engine, Message, devices, external, machines, now, quarantine, reboot, tenants};
use crate::failure::{ErrorKind, Failure};
use crate::id::{JobId, MachineId, TenantId};
use crate::request::{Request, Submission};
use crate::view::{JobState, JobView};

/// Every job of this start.
#[derive(Default)]
pub(crate) struct Jobs(pub(super) BTreeMap<JobId, Job>);

/// A job and what it still needs.
pub(crate) struct Job {
    pub(super) view: JobView,
    begin: Option<Begin>,
    pub(super) cancel: Arc<AtomicBool>,
}

/// How a queued job begins.
enum Begin {
    /// Somebody asked for it.
    Request(Request),
    /// The daemon itself did.
    Own(Preparation),
}

/// What the engine records before the daemon's own job runs, and what is to run.
pub(crate) type Preparation = Box<dyn FnOnce(&mut Engine, JobId) -> Result<Work, Failure> + Send>;

impl Job {
    /// A job of the daemon's own: nobody asked for it, nobody may cancel it.
    pub(super) fn own(kind: &'static str, machine: Option<MachineId>) -> Self {
        let view = JobView {
            kind,
            state: JobState::Queued,
            progress: 0.0,
            step: String::new(),
            devices: Vec::new(),
            machine,
            tenant: None,
            claims: Vec::new(),
            error: None,
            request_id: String::new(),
            started_by_uid: 0,
            started_at: now(),
            cancelable: false,
        };
        Self { view, begin: None, cancel: Arc::default() }
    }

    /// A job of the daemon's own that waits for its turn.
    pub(super) fn queued(self, preparation: Preparation) -> Self {
        Self { begin: Some(Begin::Own(preparation)), ..self }
    }

    /// The job of a request.
    pub(super) fn of(submission: Submission, concern: Concern) -> Self {
        let own = Self::own(concern.kind, concern.machine).view;
        let view = JobView {
            devices: concern.devices,
            tenant: concern.tenant,
            request_id: submission.request_id,
            started_by_uid: submission.uid,
            cancelable: true,
            ..own
        };
        Self { view, begin: Some(Begin::Request(submission.request)), cancel: Arc::default() }
    }
}

/// What runs in a job's thread.
pub(crate) type Work = Box<dyn FnOnce(&Worker) -> Outcome + Send>;

/// What a request is about: two jobs on one of these never run together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Concern {
    /// The job's kind (`assign`, `machine-start`).
    pub kind: &'static str,
    /// Devices, whole bundles.
    pub devices: Vec<PciAddress>,
    /// A machine.
    pub machine: Option<MachineId>,
    /// Whose it is, where it is a tenant's.
    pub tenant: Option<TenantId>,
    /// May run beside another job on the same machine (a kill must not wait for a start).
    pub beside: bool,
}

impl Jobs {
    pub(super) fn live(&self) -> impl Iterator<Item = (JobId, &JobView)> {
        self.0.iter().map(|(id, job)| (*id, &job.view)).filter(|(_, view)| !view.state.is_over())
    }

    /// The live job on a device.
    pub(crate) fn on_device(&self, device: PciAddress) -> Option<(JobId, &JobView)> {
        self.live().find(|(_, view)| view.devices.contains(&device))
    }

    /// The live job on a machine.
    pub(crate) fn on_machine(&self, machine: MachineId) -> Option<(JobId, &JobView)> {
        self.live().find(|(_, view)| view.machine == Some(machine))
    }

    /// How many jobs that are not machines' run.
    pub(super) fn of_devices(&self) -> usize {
        self.live().filter(|(_, view)| view.state != JobState::Queued && view.machine.is_none()).count()
    }

    fn forget_beyond(&mut self, kept: usize) {
        let over: Vec<_> = self.0.iter().filter(|(_, job)| job.view.state.is_over()).map(|(id, _)| *id).collect();
        for id in over.iter().take(over.len().saturating_sub(kept)) {
            self.0.remove(id);
        }
    }
}

impl Engine {
    /// Starts queued jobs as long as there is room. Machines' jobs mostly wait for libvirt and take no room.
    pub(super) fn dispatch(&mut self) {
        if self.stopping || self.host_stops() {
            return;
        }
        let queued: Vec<_> = self.jobs.live().filter(|(_, view)| view.state == JobState::Queued).map(|(id, _)| id).collect();
        for id in queued {
            let of_machine = self.jobs.0.get(&id).is_some_and(|job| job.view.machine.is_some());
            if of_machine || self.jobs.of_devices() < self.config.limits.parallel_bundles {
                self.begin(id);
            }
        }
    }

    fn begin(&mut self, id: JobId) {
        let Some(begin) = self.jobs.0.get_mut(&id).and_then(|job| job.begin.take()) else { return };
        let work = match begin {
            Begin::Request(request) => self.begin_request(id, request),
            Begin::Own(preparation) => preparation(self, id),
        };
        match work {
            Ok(work) => self.spawn(id, work),
            Err(failure) => self.end(id, Outcome::failed(failure)),
        }
    }

    fn begin_request(&mut self, id: JobId, request: Request) -> Result<Work, Failure> {
        match request {
            Request::Apply { goals, plan_digest } => devices::begin(self, id, &goals, plan_digest.as_deref()),
            Request::Reset(device) => quarantine::begin_reset(self, id, device),
            Request::ClearQuarantine(device) => quarantine::begin_clearing(self, id, device),
            Request::Recover(device) => quarantine::begin_recovery(self, id, device),
            Request::Rescan => Ok(Box::new(|_: &Worker| Outcome::done()) as Work),
            Request::Claim { tenant, spec, client } => external::begin_claim(self, id, (tenant, &spec), client),
            Request::ReleaseClaim { claim, epoch } => external::begin_release(self, claim, epoch),
            Request::Tenant(change) => tenants::begin(self, change),
            request @ (Request::CreateMachine { .. }
            | Request::StartMachine(_)
            | Request::StopMachine(_)
            | Request::KillMachine(_)
            | Request::RebootMachine(_)
            | Request::RemoveMachine(_)) => machines::begin(self, id, request),
        }
    }

    pub(super) fn spawn(&mut self, id: JobId, work: Work) {
        let Some(job) = self.jobs.0.get_mut(&id) else { return };
        job.view.state = JobState::Running;
        let worker = Worker {
            job: id,
            options: Arc::new(self.options.clone()),
            engine: self.inbox.clone(),
            cancel: job.cancel.clone(),
            host_stops: self.host_stops.clone(),
            parallel: self.config.limits.parallel_bundles,
            remove_rescan: self.config.policy.remove_rescan,
        };
        self.publish();
        let run = move || {
            // A panic must not leave a job that never ends: what it did is in its journal, and the next start looks at it.
            let outcome = panic::catch_unwind(AssertUnwindSafe(|| work(&worker))).unwrap_or_else(|_| {
                let error = Failure::new(ErrorKind::Internal, "the job's thread panicked; the log says where");
                Outcome { state: JobState::RollbackFailed, ..Outcome::failed(error) }
            });
            if worker.engine.send(Message::Ended(worker.job, outcome)).is_err() {
                tracing::warn!(job = %worker.job, "a job ended after the engine; the next start looks at what it left");
            }
        };
        if let Err(error) = thread::Builder::new().name(format!("job-{id}")).spawn(run) {
            self.end(id, Outcome::failed(Failure::of(ErrorKind::Internal, &error)));
        }
    }

    pub(super) fn note_step(&mut self, id: JobId, step: String, progress: f64, rolling_back: bool) {
        let Some(job) = self.jobs.0.get_mut(&id) else { return };
        job.view.step = step;
        if rolling_back {
            job.view.state = JobState::RollingBack;
            job.view.cancelable = false;
        } else {
            job.view.progress = progress.clamp(0.0, 1.0);
        }
        if rolling_back || self.publisher.takes_progress() {
            self.publish();
        }
    }

    /// A job is over: what is now is observed, told, and only then the job's end.
    pub(super) fn end(&mut self, id: JobId, outcome: Outcome) {
        let Some(job) = self.jobs.0.get_mut(&id) else { return };
        job.view.state = outcome.state;
        job.view.cancelable = false;
        job.view.error = outcome.error.clone();
        let new = outcome.claims.iter().filter(|claim| !job.view.claims.contains(claim)).copied().collect::<Vec<_>>();
        job.view.claims.extend(new);
        if outcome.state == JobState::Done {
            job.view.progress = 1.0;
        }
        self.jobs.forget_beyond(self.config.limits.jobs_kept);
        for (kind, subject, detail) in outcome.events.clone() {
            self.publisher.event(kind, subject, detail);
        }
        if Some(id) == self.recovery {
            self.recovered = outcome.state == JobState::Done;
            let told = outcome.error.as_ref().map(ToString::to_string);
            self.ledger_fault = told.map(|error| format!("what the last start left could not be mended: {error}"));
        }
        self.observe();
        self.restore_vfs();
        reboot::settle(self);
        machines::ended(self, id, &outcome);
        external::ended(self, id, &outcome);
        self.restore_after_boot();
        self.tell_restored();
        self.publisher.ended(id);
        self.publish();
        self.dispatch();
    }

    pub(super) fn cancel_device_jobs(&self) {
        let jobs = self.jobs.0.values().filter(|job| job.view.cancelable && job.view.machine.is_none());
        jobs.for_each(|job| job.cancel.store(true, Ordering::Relaxed));
    }

    /// Stops a job before its next change; a queued one at once.
    pub(super) fn cancel(&mut self, id: JobId) -> Result<(), Failure> {
        let Some(job) = self.jobs.0.get_mut(&id) else {
            return Err(Failure::new(ErrorKind::Conflict, format!("there is no job {id}")));
        };
        if !job.view.cancelable {
            return Err(Failure::new(ErrorKind::Conflict, format!("job {id} cannot be canceled any more")));
        }
        job.cancel.store(true, Ordering::Relaxed);
        if job.view.state == JobState::Queued {
            self.end(id, Outcome::failed(Failure::new(ErrorKind::Canceled, "canceled before it started")));
        }
        Ok(())
    }
}
