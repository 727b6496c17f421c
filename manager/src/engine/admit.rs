//! Admission: what is refused before anything is planned in earnest, and what becomes a job.

use sha2::{Digest, Sha256};

use super::jobs::{Concern, Job};
use super::{Engine, devices, external, machines, now, quarantine, tenants};
use crate::failure::{ErrorKind, Failure};
use crate::id::JobId;
use crate::ledger::NamedRequest;
use crate::request::{Request, Submission, TenantChange};
use crate::view::HostState;

/// Most jobs of one uid that are not over.
const QUEUED_PER_UID: usize = 16;

/// How long a named request gives the same job, in seconds.
const REQUEST_KEPT: u64 = 24 * 60 * 60;

impl Engine {
    /// Admits a request and queues its job.
    ///
    /// # Errors
    /// The refusal; nothing was changed or recorded.
    pub(super) fn submit(&mut self, submission: Submission) -> Result<JobId, Failure> {
        if let Some(job) = self.known_request(&submission)? {
            return Ok(job);
        }
        self.takes_changes()?;
        self.has_room(submission.uid)?;
        let concern = match &submission.request {
            Request::Apply { goals, plan_digest } => devices::admit(self, goals, plan_digest.as_deref())?,
            Request::Reset(device) => quarantine::admit_reset(self, *device)?,
            Request::ClearQuarantine(device) => quarantine::admit_clearing(self, *device)?,
            Request::Recover(device) => quarantine::admit_recovery(self, *device)?,
            Request::Rescan => Concern { kind: "rescan", ..Concern::default() },
            Request::Claim { tenant, spec, .. } => external::admit_claim(self, *tenant, spec)?,
            Request::ReleaseClaim { claim, epoch } => external::admit_release(self, *claim, *epoch)?,
            Request::Tenant(change) => tenants::admit(self, change)?,
            Request::CreateMachine { .. }
            | Request::StartMachine(_)
            | Request::StopMachine(_)
            | Request::KillMachine(_)
            | Request::RebootMachine(_)
            | Request::RemoveMachine(_) => machines::admit(self, &submission)?,
        };
        self.not_busy(&concern)?;
        self.not_moved(&concern, submission.if_generation)?;
        let job = self.record(&submission)?;
        self.jobs.0.insert(job, Job::of(submission, concern));
        self.publish();
        Ok(job)
    }

    fn takes_changes(&self) -> Result<(), Failure> {
        if self.stopping {
            return Err(Failure::new(ErrorKind::HostNotReady, "gpuwardd stops").remedy("try again when it has started"));
        }
        if self.host_stops() {
            return Err(Failure::new(ErrorKind::HostNotReady, "the host shuts down").remedy("ask again after its next boot"));
        }
        match self.host_state() {
            HostState::Ready => Ok(()),
            HostState::Recovering => {
                Err(Failure::new(ErrorKind::HostNotReady, "gpuwardd is still recovering").remedy("try again in a few seconds"))
            }
            HostState::Degraded { reason } => Err(Failure::new(ErrorKind::HostNotReady, "gpuwardd takes no changes")
                .because(reason)
                .remedy("mend the file named above, then reload or restart gpuwardd")),
        }
    }

    fn has_room(&self, uid: u32) -> Result<(), Failure> {
        let queued = self.jobs.live().filter(|(_, view)| view.started_by_uid == uid).count();
        if queued < QUEUED_PER_UID {
            return Ok(());
        }
        let message = format!("uid {uid} has {queued} jobs that are not over, the most that one may have");
        Err(Failure::new(ErrorKind::TooMany, message).remedy("wait for one of them to end, or cancel one"))
    }

    fn not_busy(&self, concern: &Concern) -> Result<(), Failure> {
        let on_device = concern.devices.iter().find_map(|device| {
            let (job, view) = self.jobs.on_device(*device)?;
            Some((device.to_string(), job, view.kind))
        });
        let on_machine = concern.machine.filter(|_| !concern.beside).and_then(|machine| {
            let (job, view) = self.jobs.on_machine(machine)?;
            Some((format!("machine {}", machine.0), job, view.kind))
        });
        let Some((what, job, kind)) = on_device.or(on_machine) else { return Ok(()) };
        let message = format!("{what} is busy: job {job} ({kind}) is not over");
        Err(Failure::new(ErrorKind::Busy, message).remedy(format!("wait for job {job}, or cancel it")))
    }

    fn not_moved(&self, concern: &Concern, if_generation: Option<u64>) -> Result<(), Failure> {
        let Some(asked) = if_generation else { return Ok(()) };
        let view = self.publisher.last();
        let devices = concern.devices.iter().filter_map(|device| view.devices.get(device)).map(|device| device.generation);
        let machine = concern.machine.and_then(|id| view.machines.get(&id)).map(|machine| machine.generation);
        let of_tenant = concern.tenant.filter(|_| concern.kind.starts_with("tenant-"));
        let tenant = of_tenant.and_then(|id| view.tenants.get(&id)).map(|tenant| tenant.generation);
        match devices.chain(machine).chain(tenant).max() {
            Some(latest) if latest > asked => {
                let message = format!("what this is about changed in generation {latest}, after generation {asked}");
                Err(Failure::new(ErrorKind::Conflict, message).remedy("look at it again before you ask"))
            }
            Some(_) | None => Ok(()),
        }
    }

    fn known_request(&self, submission: &Submission) -> Result<Option<JobId>, Failure> {
        let named =
            |known: &&NamedRequest| known.id == submission.request_id && known.uid == submission.uid && known.at + REQUEST_KEPT > now();
        let known = self.ledger.requests.iter().filter(|_| !submission.request_id.is_empty()).find(named);
        match known {
            None => Ok(None),
            Some(known) if known.digest == digest(&submission.request) => Ok(Some(known.job)),
            Some(known) => {
                let message = format!("request {} was job {} and asked for something else", known.id, known.job);
                Err(Failure::new(ErrorKind::Conflict, message).remedy("give each request its own id"))
            }
        }
    }

    // The number is used up durably before the job is: a restart never gives it to another.
    fn record(&mut self, submission: &Submission) -> Result<JobId, Failure> {
        let job = JobId(self.ledger.next_job);
        let at = now();
        let named = (!submission.request_id.is_empty()).then(|| NamedRequest {
            id: submission.request_id.clone(),
            uid: submission.uid,
            digest: digest(&submission.request),
            job,
            at,
        });
        self.commit(|ledger| {
            ledger.next_job += 1;
            ledger.requests.retain(|known| known.at + REQUEST_KEPT > at);
            ledger.requests.extend(named);
        })?;
        Ok(job)
    }
}

// Debug prints every field of a request; a digest kept over an upgrade that changed them means Conflict, never a wrong job.
fn digest(request: &Request) -> String {
    let mut request = request.clone();
    // A caller that names no UUID gets a new one each time it asks: it is not part of what was asked.
    if let Request::CreateMachine { spec, .. } = &mut request {
        spec.uuid = uuid::Uuid::nil();
    }
    if let Request::Tenant(TenantChange::Create { tenant, .. }) = &mut request {
        tenant.0 = uuid::Uuid::nil();
    }
    // Nor is the connection by which a caller asks: it may have a new one.
    if let Request::Claim { client, .. } = &mut request {
        client.clear();
    }
    let text = format!("{request:?}");
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}
