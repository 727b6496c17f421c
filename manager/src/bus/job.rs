//! Jobs.

use std::sync::Arc;

use zbus::interface;
use zbus::message::Header;

use super::authority::Action;
use super::dict::{Dict, Options, Received};
use super::error::BusError;
use super::guard::{Belongs, Owned};
use super::manager::Answer;
use super::paths::{self, Path};
use super::service::{Service, stopping};
use crate::failure::{ErrorKind, Failure};
use crate::id::JobId;
use crate::request::Ask;
use crate::view::{JobState, JobView, View};

/// `org.gpuward1.Job`
pub(super) struct Job {
    pub(super) service: Arc<Service>,
    pub(super) id: JobId,
}

impl Job {
    fn of<T: Default>(&self, fact: impl FnOnce(&JobView) -> T) -> T {
        self.service.view().jobs.get(&self.id).map(fact).unwrap_or_default()
    }

    fn absent(&self) -> Failure {
        Failure::new(ErrorKind::Conflict, format!("there is no job {} any more", self.id))
    }
}

impl Owned for Job {
    fn belongs(&self, view: &View) -> Belongs {
        of_job(view, self.id)
    }
}

/// Whose a job is: its tenant's, and that of whoever asked for it.
pub(super) fn of_job(view: &View, id: JobId) -> Belongs {
    view.jobs.get(&id).map_or(Belongs::ToTenant(None, None), |job| Belongs::ToTenant(job.tenant, Some(job.started_by_uid)))
}

#[interface(name = "org.gpuward1.Job")]
impl Job {
    /// Stops it before its next change and rolls back what it did; a change under way is never broken off.
    ///
    /// Polkit action: `org.gpuward.manage-machines` for jobs on machines and claims, `org.gpuward.clear-quarantine` for that, and
    /// `org.gpuward.assign` for all others.
    async fn cancel(&self, #[zbus(header)] header: Header<'_>) -> Result<(), BusError> {
        let (on_machine, kind) = self.of(|job| (job.machine.is_some(), job.kind));
        let action = match kind {
            _ if on_machine => Action::ManageMachines,
            "claim" | "claim-release" => Action::ManageMachines,
            "clear-quarantine" => Action::ClearQuarantine,
            _ => Action::Assign,
        };
        self.service.check_own(&header, (action, self.belongs(&self.service.view())), "job").await?;
        let id = self.id;
        self.service.ask(|reply| Ask::Cancel(id, reply)).await.map_err(BusError::from)
    }

    /// Answers when it is over: `state` (s), `result` (a{sv}, as `Result`), and where it failed `error` (s), `message` (s), `why` (as) and
    /// `remedy` (s). Options: `timeout` (u: seconds, then DeadlineExceeded; the job goes on). Many clients give up by themselves after 25 s.
    ///
    /// Polkit action: `org.gpuward.inspect`.
    #[zbus(out_args("result"))]
    async fn wait(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Answer, BusError> {
        self.service.check_own(&header, (Action::Inspect, self.belongs(&self.service.view())), "job").await?;
        let mut options = Options::new(options)?;
        let timeout = options.number("timeout")?;
        options.done()?;
        let mut view = self.service.view.clone();
        let over = view.wait_for(|view| view.jobs.get(&self.id).is_none_or(|job| job.state.is_over()));
        let late = || Failure::new(ErrorKind::DeadlineExceeded, format!("job {} is not over yet", self.id));
        let seen = match timeout {
            Some(seconds) => tokio::time::timeout(std::time::Duration::from_secs(seconds), over).await.map_err(|_| late())?,
            None => over.await,
        };
        let seen = seen.map_err(|_| stopping())?.clone();
        self.service.published().await?;
        Ok(outcome(seen.jobs.get(&self.id).ok_or_else(|| self.absent())?))
    }

    /// Its number: never used again.
    #[zbus(property(emits_changed_signal = "const"))]
    fn id(&self) -> u64 {
        self.id.0
    }

    /// What it does (`assign`, `machine-start`). The set may grow.
    #[zbus(property(emits_changed_signal = "const"))]
    fn kind(&self) -> &'static str {
        self.of(|job| job.kind)
    }

    /// queued, running, rolling-back, done, failed, canceled or rollback-failed.
    #[zbus(property)]
    fn state(&self) -> &'static str {
        self.of(|job| word(job.state))
    }

    /// From 0 to 1.
    #[zbus(property)]
    fn progress(&self) -> f64 {
        self.of(|job| job.progress)
    }

    /// What it is doing, for a person.
    #[zbus(property)]
    fn step(&self) -> String {
        self.of(|job| job.step.clone())
    }

    /// Devices and the machine it is about. A machine that is being made has no object yet, one that was removed none any more.
    #[zbus(property)]
    fn objects(&self) -> Vec<Path> {
        self.of(objects)
    }

    /// What it made: `tenant` (o), `machine` (o), `claims` (ao), `claim` (o: where it is one); where it failed `error` (s), `message` (s), `why` (as), `remedy` (s).
    #[zbus(property)]
    fn result(&self) -> Answer {
        self.of(|job| result(job).into_map())
    }

    /// The caller's name for the request; empty where none was given.
    #[zbus(property(emits_changed_signal = "const"))]
    fn request_id(&self) -> String {
        self.of(|job| job.request_id.clone())
    }

    /// Who asked; 0 also for the daemon itself.
    #[zbus(property(emits_changed_signal = "const"), name = "StartedByUID")]
    fn started_by_uid(&self) -> u32 {
        self.of(|job| job.started_by_uid)
    }

    /// When, in seconds since 1970.
    #[zbus(property(emits_changed_signal = "const"))]
    fn started_at(&self) -> u64 {
        self.of(|job| job.started_at)
    }

    /// Whether `Cancel` would still be obeyed.
    #[zbus(property)]
    fn cancelable(&self) -> bool {
        self.of(|job| job.cancelable)
    }
}

pub(super) fn objects(job: &JobView) -> Vec<Path> {
    let devices = job.devices.iter().map(|address| paths::device(*address));
    devices.chain(job.machine.map(paths::machine)).collect()
}

fn result(job: &JobView) -> Dict {
    let mut dict = Dict::new();
    if let Some(machine) = job.machine.filter(|_| job.state == JobState::Done) {
        dict.put("machine", paths::machine(machine));
    }
    if let Some(tenant) = job.tenant.filter(|_| job.kind == "tenant-create" && job.state == JobState::Done) {
        dict.put("tenant", paths::tenant(tenant));
    }
    if !job.claims.is_empty() && job.state == JobState::Done {
        dict.put("claims", job.claims.iter().map(|claim| paths::claim(*claim)).collect::<Vec<_>>());
        if let [claim] = job.claims[..] {
            dict.put("claim", paths::claim(claim));
        }
    }
    if let Some(failure) = &job.error {
        dict.put_failure(failure);
    }
    dict
}

/// How a job ended.
pub(super) fn outcome(job: &JobView) -> Answer {
    let mut dict = Dict::new();
    dict.put("state", word(job.state)).put("result", result(job).into_map());
    if let Some(failure) = &job.error {
        dict.put_failure(failure);
    }
    dict.into_map()
}

pub(super) fn word(state: JobState) -> &'static str {
    match state {
        JobState::Queued => "queued",
        JobState::Running => "running",
        JobState::RollingBack => "rolling-back",
        JobState::Done => "done",
        JobState::Failed => "failed",
        JobState::Canceled => "canceled",
        JobState::RollbackFailed => "rollback-failed",
    }
}
