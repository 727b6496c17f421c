//! The one way out: a view made from what was observed and recorded, with a generation.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vfio::{Function, PciAddress};

use super::{Engine, Publish, external, machines, tenants, vfs};
use crate::config::Use;
use crate::history;
use crate::id::{ClaimId, JobId};
use crate::ledger::{ClaimRecord, Quarantine, Standing};
use crate::plan;
use crate::view::{ClaimState, ClaimView, DeviceState, DeviceView, Event, EventKind, JobView, Restored, Subject, Update, View};

/// Hands views to whoever publishes them, and remembers the last.
pub(crate) struct Publisher {
    publish: Publish,
    last: Arc<View>,
    seq: u64,
    events: Vec<Event>,
    ended: Vec<JobId>,
    progress_at: Option<Instant>,
}

/// Progress is told at most four times a second; what is between goes out with the next view.
const BETWEEN_PROGRESS: Duration = Duration::from_millis(250);

impl Publisher {
    pub(super) fn new(publish: Publish) -> Self {
        Self { publish, last: Arc::default(), seq: 0, events: Vec::new(), ended: Vec::new(), progress_at: None }
    }

    /// The view published last.
    pub(crate) fn last(&self) -> &View {
        &self.last
    }

    /// Sends an event with the next view.
    pub(crate) fn event(&mut self, kind: EventKind, subject: Subject, detail: BTreeMap<String, String>) {
        self.seq += 1;
        self.events.push(Event { seq: self.seq, kind, subject, detail });
    }

    /// Whether progress may be told now.
    pub(super) fn takes_progress(&mut self) -> bool {
        let is_due = self.progress_at.is_none_or(|at| at.elapsed() >= BETWEEN_PROGRESS);
        if is_due {
            self.progress_at = Some(Instant::now());
        }
        is_due
    }

    pub(super) fn ended(&mut self, job: JobId) {
        self.ended.push(job);
    }

    fn publish(&mut self, mut view: View) {
        view.generation = self.last.generation + 1;
        for (address, device) in &mut view.devices {
            let before = self.last.devices.get(address).map(|old| (old.generation, old));
            device.generation = before.map_or(view.generation, |(generation, _)| generation);
            let same_facts = self.last.inventory.devices.get(address) == view.inventory.devices.get(address);
            if before.is_some_and(|(_, old)| *old != *device) || !same_facts {
                device.generation = view.generation;
            }
        }
        for (id, machine) in &mut view.machines {
            let before = self.last.machines.get(id);
            machine.generation = before.map_or(view.generation, |old| old.generation);
            if before.is_some_and(|old| *old != *machine) {
                machine.generation = view.generation;
            }
        }
        for (id, tenant) in &mut view.tenants {
            let before = self.last.tenants.get(id);
            tenant.generation = before.map_or(view.generation, |old| old.generation);
            if before.is_some_and(|old| *old != *tenant) {
                tenant.generation = view.generation;
            }
        }
        self.last = Arc::new(view);
        let (events, ended) = (std::mem::take(&mut self.events), std::mem::take(&mut self.ended));
        (self.publish)(Update { view: self.last.clone(), events, ended });
    }
}

impl Engine {
    /// Publishes what is.
    pub(crate) fn publish(&mut self) {
        self.pin();
        let view = View {
            generation: 0,
            host_state: self.host_state(),
            inventory: self.inventory.clone(),
            devices: self.device_views(),
            claims: self.claim_views(),
            tenants: tenants::views(self),
            machines: machines::views(self),
            restored: self.restoring.results.clone(),
            jobs: self
                .jobs
                .0
                .iter()
                .map(|(id, job)| (*id, JobView { tenant: tenants::of_job(self, &job.view), ..job.view.clone() }))
                .collect(),
        };
        for (kind, device, reason) in happened(&self.publisher.last, &view) {
            self.remember(kind, device, &reason);
            self.publisher.event(kind, Subject::Device(device), BTreeMap::from([("reason".into(), reason)]));
        }
        self.publisher.publish(view);
    }

    // Whatever else happens to a device is a change of the ledger, and remembered with it.
    fn remember(&self, kind: EventKind, device: PciAddress, reason: &str) {
        let Some(record) = self.ledger.devices.get(&device) else { return };
        let kind = if kind == EventKind::Drifted { history::Kind::Drifted } else { history::Kind::DeviceGone };
        let entry = history::Entry::new(kind, reason).with("address", device);
        history::append(&self.options.state_dir, &record.identity, entry);
    }

    fn device_views(&self) -> BTreeMap<PciAddress, DeviceView> {
        let mut views: BTreeMap<_, _> =
            self.inventory.devices.values().map(|function| (function.address, self.device_view(function))).collect();
        for (address, record) in &self.ledger.devices {
            let gone = self.where_it_is(record);
            let (state, reason) = match self.ledger.quarantines.get(address) {
                Some(quarantine) => (kept_out(quarantine), format!("{}; {gone}", quarantine.reason)),
                None => (DeviceState::Gone, gone),
            };
            views.entry(*address).or_insert_with(|| DeviceView {
                bundle: vec![*address],
                use_: Use::Observe,
                state,
                reason,
                claim: self.ledger.claim_on(*address).map(|(id, _)| id),
                generation: 0,
            });
        }
        views
    }

    fn device_view(&self, function: &Function) -> DeviceView {
        let use_ = self.config.use_in(&self.inventory, function);
        let (state, reason) = self.device_state(function, &use_);
        let locked = "a driver has had its lock for longer than a moment: what depends on it was read before";
        let reason = if function.locked && reason.is_empty() { locked.to_owned() } else { reason };
        DeviceView {
            bundle: self.bundle_of(function.address),
            use_,
            state,
            reason,
            claim: self.ledger.claim_on(function.address).map(|(id, _)| id),
            generation: 0,
        }
    }

    fn device_state(&self, function: &Function, use_: &Use) -> (DeviceState, String) {
        let device = function.address;
        if let Some(quarantine) = self.ledger.quarantines.get(&device) {
            return (kept_out(quarantine), quarantine.reason.clone());
        }
        let intent = self.ledger.vfs.get(&device).filter(|intent| intent.identity.matches(&function.identity));
        if let Some(lack) = intent.and_then(|intent| vfs::lack(function, intent)) {
            return (DeviceState::Drifted, lack);
        }
        let Some(record) = self.ledger.record_of(function) else {
            let other = self.ledger.devices.get(&device).map(|record| format!("not gpuward's: {}", self.where_it_is(record)));
            return (DeviceState::Host, other.unwrap_or_default());
        };
        match record.standing {
            Standing::Pending => return (DeviceState::Assigning, String::new()),
            Standing::Releasing => return (DeviceState::Releasing, String::new()),
            Standing::Active => {}
        }
        // Its override cannot be read while a driver has its lock, or a reader is slow to start: that is no sign of anybody.
        let is_unread = function.locked && function.driver.as_deref() == Some(function.vfio_driver.as_str());
        if !plan::is_in_pool(function) && !is_unread {
            let driver = function.driver.as_deref().unwrap_or("no driver");
            let why = match self.restoring.results.get(&device) {
                Some(Restored::InUse(why) | Restored::Failed(why)) => format!("it could not be taken again after the boot: {why}"),
                Some(_) | None => "somebody else moved it".to_owned(),
            };
            return (DeviceState::Drifted, format!("bound to {driver}, not to {}: {why}", function.vfio_driver));
        }
        match self.ledger.claim_on(device) {
            None if record.lent => (DeviceState::Lent, lent_to(use_)),
            None => (DeviceState::Free, String::new()),
            Some((id, claim)) if claim.standing == Standing::Releasing => match external::in_the_way(self, id) {
                Some(why) => (DeviceState::Releasing, format!("claim {id} ends when nobody holds it: {why}")),
                None => (DeviceState::Sanitising, String::new()),
            },
            Some((_, claim)) if claim.machine.is_some_and(|machine| machines::runs(self, machine)) => (DeviceState::Running, String::new()),
            Some((_, claim)) if claim.machine.is_none() && machines::is_in_a_domain(self, device) => (DeviceState::Running, String::new()),
            Some(_) => (DeviceState::Claimed, String::new()),
        }
    }

    fn claim_views(&self) -> BTreeMap<ClaimId, ClaimView> {
        let view = |id: ClaimId, claim: &ClaimRecord| {
            let (state, reason) = self.claim_state(id, claim);
            ClaimView {
                tenant: claim.tenant,
                machine: claim.machine,
                domain: claim.domain,
                state,
                reason,
                release_on: claim.terms.as_ref().map_or("machine", |terms| terms.release.word()),
                client: claim.terms.as_ref().map(|terms| terms.client.clone()).unwrap_or_default(),
                expires: claim.terms.as_ref().map_or(0, |terms| terms.expires),
                devices: claim.devices.clone(),
                isolation_level: claim.isolation.word(),
                since: claim.since,
                epoch: claim.epoch,
            }
        };
        self.ledger.claims.iter().map(|(id, claim)| (*id, view(*id, claim))).collect()
    }

    fn claim_state(&self, id: ClaimId, claim: &ClaimRecord) -> (ClaimState, String) {
        let is_here = |device: &PciAddress| {
            let record = self.inventory.devices.get(device).and_then(|function| self.ledger.record_of(function));
            record.is_some()
        };
        let reason = external::in_the_way(self, id).unwrap_or_default().to_owned();
        match claim.standing {
            Standing::Pending => (ClaimState::Pending, String::new()),
            Standing::Active | Standing::Releasing if !claim.devices.iter().all(is_here) => {
                let left: Vec<_> = claim.devices.iter().filter(|device| !is_here(device)).map(ToString::to_string).collect();
                (ClaimState::Gone, format!("{} left the host", left.join(", ")))
            }
            Standing::Active if reason.is_empty() => (ClaimState::Active, reason),
            Standing::Active | Standing::Releasing => (ClaimState::Releasing, reason),
        }
    }
}

fn lent_to(use_: &Use) -> String {
    match use_ {
        Use::Lend { to } => format!("to {to}"),
        Use::Observe | Use::Pool | Use::OnDemand => {
            format!("gpuward.toml says {} since it was taken: release it to the host first", use_.word())
        }
    }
}

fn kept_out(quarantine: &Quarantine) -> DeviceState {
    if quarantine.stuck { DeviceState::Stuck } else { DeviceState::Quarantined }
}

/// What befell devices between two views without a job of ours that tells it.
fn happened(last: &View, now: &View) -> Vec<(EventKind, PciAddress, String)> {
    let mut events = Vec::new();
    for (address, device) in &now.devices {
        let kind = match device.state {
            DeviceState::Drifted => EventKind::Drifted,
            DeviceState::Gone => EventKind::DeviceGone,
            DeviceState::Host
            | DeviceState::Assigning
            | DeviceState::Free
            | DeviceState::Claimed
            | DeviceState::Running
            | DeviceState::Sanitising
            | DeviceState::Releasing
            | DeviceState::Lent
            | DeviceState::Quarantined
            | DeviceState::Stuck => continue,
        };
        if last.devices.get(address).is_none_or(|before| before.state != device.state) {
            events.push((kind, *address, device.reason.clone()));
        }
    }
    let left = last.devices.iter().filter(|(address, before)| !now.devices.contains_key(address) && before.state != DeviceState::Gone);
    events.extend(left.map(|(address, _)| (EventKind::DeviceGone, *address, "it has left the host".into())));
    events
}
