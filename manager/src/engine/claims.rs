//! Claims: which bundles are free, taking them for a domain, and giving them back clean.
//!
//! A claim is in the ledger before anything is done for it. It ends with a reset and a look at configuration space: what does not
//! answer is in quarantine, with the reason, and never free.

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;
use vfio::{Function, Host, Inventory, Kind, PciAddress, reset};

use super::carry::{Task, carry_out, one_line, undo_nothing};
use super::devices::{first_of, observe};
use super::give_back::GivingBack;
use super::sanitise::{self, Cleaning, Dirty, How};
use super::worker::{Outcome, Worker};
use super::{Engine, now};
use crate::config::{Config, Use};
use crate::failure::{ErrorKind, Failure};
use crate::id::{ClaimId, JobId, MachineId, TenantId};
use crate::ledger::{ClaimRecord, Isolation, Ledger, Standing, Terms};
use crate::plan::{self, Plan, Situation};
use crate::request::Goal;
use crate::view::{EventKind, Subject};

/// A bundle that could be claimed now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Free {
    /// Its devices, in the order they bind.
    pub devices: Vec<PciAddress>,
    /// The device that it is about: a GPU or virtual function.
    pub main: PciAddress,
    /// It is still the host's, and goes back with its claim.
    pub on_demand: bool,
}

/// Who claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimant {
    /// Whose the claims are.
    pub tenant: TenantId,
    /// The machine, where it is one of gpuward's.
    pub machine: Option<MachineId>,
    /// The domain that may use the devices.
    pub domain: Uuid,
    /// When the claims end, where they are no machine's.
    pub terms: Option<Terms>,
}

/// Claims that are recorded as pending, and what makes them ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// The claims, one a bundle, in the order asked for.
    pub claims: BTreeMap<ClaimId, ClaimRecord>,
    /// Takes those from the host that are on demand.
    pub plan: Plan,
}

impl Engine {
    /// Bundles that could be claimed now, by address. Those on demand are planned, so that one that is held is not among them.
    pub(crate) fn free_bundles(&self) -> Vec<Free> {
        let is_main = |kind| matches!(kind, Kind::Gpu | Kind::VirtualFunction);
        let mains = self.inventory.devices.values().filter(|function| is_main(function.kind));
        let bundles = mains.filter_map(|function| self.inventory.bundle(function.address));
        let bundles: BTreeSet<_> = bundles.map(|bundle| bundle.devices).collect();
        let all: BTreeSet<_> = bundles.iter().flatten().copied().collect();
        let surroundings = self.surroundings(&all, None);
        let busy = |devices: &[PciAddress]| devices.iter().any(|device| surroundings.busy.contains_key(device));
        let free = bundles.into_iter().filter(|devices| !busy(devices)).filter_map(|devices| {
            let main = *devices.last()?;
            let situation =
                Situation { inventory: &self.inventory, config: &self.config, ledger: &self.ledger, surroundings: &surroundings };
            let in_pool = devices.iter().all(|device| self.is_free_in_pool(*device));
            let on_demand = || self.is_on_demand(&devices) && plan::plan(&situation, &[assign(main)]).is_ok();
            (in_pool || on_demand()).then_some(Free { main, on_demand: !in_pool, devices })
        });
        let mut free: Vec<_> = free.collect();
        free.sort_by_key(|bundle| bundle.main);
        free
    }

    fn is_free_in_pool(&self, device: PciAddress) -> bool {
        let Some(function) = self.inventory.devices.get(&device) else { return false };
        let is_active = self.ledger.record_of(function).is_some_and(|record| record.standing == Standing::Active && !record.lent);
        let is_open = self.ledger.claim_on(device).is_none() && !self.ledger.quarantines.contains_key(&device);
        let is_allowed = matches!(self.config.use_in(&self.inventory, function), Use::Pool | Use::OnDemand);
        is_allowed && is_active && is_open && plan::is_in_pool(function)
    }

    fn is_on_demand(&self, devices: &[PciAddress]) -> bool {
        devices.iter().filter_map(|device| self.inventory.devices.get(device)).all(|function| {
            let use_ = self.config.use_in(&self.inventory, function);
            use_ == Use::OnDemand && !self.ledger.devices.contains_key(&function.address)
        })
    }

    /// Records claims on `bundles` as pending: from now on nobody else gets them. `job` has them in hand.
    ///
    /// # Errors
    /// One of them is not free any more; then none is claimed.
    pub(crate) fn claim(&mut self, job: JobId, claimant: &Claimant, bundles: &[Free]) -> Result<Claimed, Failure> {
        let devices = || bundles.iter().flat_map(|bundle| bundle.devices.iter().copied());
        if let Some(device) = devices().find(|device| self.ledger.claim_on(*device).is_some()) {
            return Err(Failure::new(ErrorKind::AlreadyClaimed, format!("{device} was claimed meanwhile")));
        }
        let goals: Vec<_> = bundles.iter().filter(|bundle| bundle.on_demand).map(|bundle| assign(bundle.main)).collect();
        let plan = self.plan(&goals, Some(job)).map_err(first_of)?;
        let inventory = self.inventory.clone();
        let mut claims = BTreeMap::new();
        self.commit(|ledger| {
            ledger.begin_moves(&plan.moves, &inventory);
            for bundle in bundles {
                let record = pending(claimant, bundle, &inventory, ledger.take_epoch());
                let record = ClaimRecord { boot: ledger.boot.clone(), ..record };
                let id = ClaimId::random();
                ledger.claims.insert(id, record.clone());
                claims.insert(id, record);
            }
        })?;
        if let Some(job) = self.jobs.0.get_mut(&job) {
            job.view.devices.extend(devices());
            job.view.claims.extend(claims.keys());
        }
        Ok(Claimed { claims, plan })
    }
}

fn assign(device: PciAddress) -> Goal {
    Goal::Assign { device, force: false }
}

fn pending(claimant: &Claimant, bundle: &Free, inventory: &Inventory, epoch: u64) -> ClaimRecord {
    let kind = inventory.devices.get(&bundle.main).map(|function| function.kind);
    ClaimRecord {
        standing: Standing::Pending,
        tenant: claimant.tenant,
        machine: claimant.machine,
        domain: claimant.domain,
        devices: bundle.devices.clone(),
        isolation: if kind == Some(Kind::VirtualFunction) { Isolation::Vf } else { Isolation::WholeGpu },
        since: now(),
        epoch,
        on_demand: bundle.on_demand,
        boot: String::new(),
        terms: claimant.terms.clone(),
    }
}

/// Makes pending claims ready: takes what is on demand from the host. The claims are active afterwards.
///
/// # Errors
/// How the job ends: the claims are gone again, or their bundles in quarantine.
pub fn take(worker: &Worker, claimed: &Claimed) -> Result<(), Box<Outcome>> {
    let ids: Vec<_> = claimed.claims.keys().copied().collect();
    let task = Task {
        plan: claimed.plan.clone(),
        done: Box::new(move |ledger| {
            for id in ids {
                if let Some(claim) = ledger.claims.get_mut(&id) {
                    claim.standing = Standing::Active;
                }
            }
        }),
        undone: drop_all(claimed),
    };
    carry_out(worker, task)
}

/// Ends claims that were only recorded: nothing was taken from the host for them.
pub fn forgo(worker: &Worker, claimed: &Claimed, why: Failure) -> Box<Outcome> {
    undo_nothing(worker, &claimed.plan, drop_all(claimed), why)
}

fn drop_all(claimed: &Claimed) -> super::Entry {
    let dropped: Vec<_> = claimed.claims.keys().copied().collect();
    Box::new(move |ledger| ledger.claims.retain(|id, _| !dropped.contains(id)))
}

/// Looks at claimed devices once more, right before a guest gets them: with `managed='no'` libvirt trusts our word. One that sleeps is
/// woken (P30), and one that was reset just now gets the time to come back (P35).
///
/// # Errors
/// A device has left, was moved by somebody else, is held, does not wake or does not answer.
pub fn ready(worker: &Worker, ledger: &Ledger, devices: &[PciAddress]) -> Result<(), Failure> {
    let host = worker.host();
    let inventory = Inventory::observe(host, 0);
    devices.iter().try_for_each(|device| is_in_order(host, ledger, &inventory, *device))?;
    let held = observe(host, &devices.iter().copied().collect(), &inventory).holders;
    match held.into_iter().next() {
        Some((device, holders)) => Err(plan::Refusal::Held { device, holders, pausable: Vec::new() }.into()),
        None => devices.iter().filter_map(|device| inventory.devices.get(device)).try_for_each(|function| is_sound(worker, function)),
    }
}

fn is_sound(worker: &Worker, function: &Function) -> Result<(), Failure> {
    reset::check(worker.host(), worker.deadlines(), function).outcome.map_err(|error| {
        let failure = Failure::of(ErrorKind::PreflightFailed, &error);
        Failure { message: format!("{} {}", function.address, failure.message), ..failure }
    })
}

fn is_in_order(host: &Host, ledger: &Ledger, inventory: &Inventory, device: PciAddress) -> Result<(), Failure> {
    let Some(function) = inventory.devices.get(&device) else {
        return Err(Failure::new(ErrorKind::NoSuchDevice, format!("{device} has left the host")));
    };
    if ledger.record_of(function).is_none() || !plan::is_in_pool(function) || !function.is_on_vfio() {
        let driver = function.driver.as_deref().unwrap_or("no driver");
        let message = format!("{device} is bound to {driver}: somebody else moved it");
        return Err(Failure::new(ErrorKind::Conflict, message).remedy("assign it again"));
    }
    if let Some(reason) = function.group.and_then(|group| inventory.not_viable(group)) {
        let message = format!("{device} cannot be isolated any more: {reason}, in the same IOMMU group");
        return Err(Failure::new(ErrorKind::NotViable, message).remedy("unbind that driver"));
    }
    has_node(host, function)
}

// devtmpfs makes it as the driver binds: without it libvirt fails with a path that says nothing (P69). A kernel may have one of two.
fn has_node(host: &Host, function: &Function) -> Result<(), Failure> {
    let of_device = function.vfio_device.as_deref().and_then(|device| device.rsplit('/').next());
    let of_device = of_device.map(|name| format!("dev/vfio/devices/{name}"));
    let nodes: Vec<_> = function.vfio_group_node().into_iter().chain(of_device).collect();
    if nodes.iter().any(|node| host.exists(node)) {
        return Ok(());
    }
    let message = format!("{} has no VFIO node: /{} is missing", function.address, nodes.join(" and /"));
    Err(Failure::new(ErrorKind::PreflightFailed, message)
        .remedy("look why /dev has not what the kernel offers: udev rules, or a /dev of its own"))
}

/// What became of a claim that was given back.
pub type Events = Vec<(EventKind, Subject, BTreeMap<String, String>)>;

/// Gives a claim back. Its machine has to be *gone*: nothing here looks for that. May be repeated.
///
/// # Errors
/// The ledger cannot be written: the claim is still there, and releasing.
pub fn release(worker: &Worker, id: ClaimId, claim: &ClaimRecord) -> Result<Events, Failure> {
    if worker.host_stops() {
        let failure = Failure::new(ErrorKind::HostNotReady, format!("the host shuts down: claim {id} stays"));
        return Err(failure.because("its devices are sanitised after the next boot, before anybody gets them"));
    }
    let ledger = worker.record(move |ledger| {
        if let Some(claim) = ledger.claims.get_mut(&id) {
            claim.standing = Standing::Releasing;
        }
    })?;
    let released = |detail| (EventKind::ClaimReleased, Subject::Claim(id), detail);
    // Nobody gets them before a person has looked, and a store that has not returned may still be in one.
    if claim.devices.iter().any(|device| ledger.quarantines.contains_key(device)) {
        worker.commit(move |ledger| drop(ledger.claims.remove(&id)))?;
        return Ok(vec![released(BTreeMap::new())]);
    }
    worker.step(format!("sanitising {}", list(&claim.devices)), 0.5);
    // Of what went on at the end of an earlier boot nobody knows.
    let closed = if ledger.is_of_an_earlier_boot(claim) { "unclean" } else { "clean" };
    let occasion = vec![("claim", id.to_string()), ("epoch", claim.epoch.to_string()), ("closed", closed.to_owned())];
    let there = can_be_cleaned(worker, &ledger, claim);
    let cleaning = Cleaning { how: How::Reset, occasion, ledger: *ledger };
    let cleaned = there.and_then(|()| sanitise::clean(worker, &claim.devices, &cleaning));
    let detail = |text: &str| BTreeMap::from([("claim".into(), id.to_string()), ("detail".into(), text.to_owned())]);
    let mut events = Events::new();
    match cleaned {
        Ok(done) => {
            events.extend(claim.devices.iter().map(|device| (EventKind::Sanitised, Subject::Device(*device), detail(&done))));
            give_back(worker, id, claim)?;
        }
        Err(Dirty { reason, stuck }) => {
            let (devices, told) = (claim.devices.clone(), reason.clone());
            worker.commit(move |ledger| {
                ledger.quarantine(&devices, &told, (now(), stuck));
                ledger.claims.remove(&id);
            })?;
            let kind = if stuck { EventKind::Stuck } else { EventKind::Quarantined };
            events.extend(claim.devices.iter().map(|device| (kind, Subject::Device(*device), detail(&reason))));
        }
    }
    events.push(released(BTreeMap::from([("closed".into(), closed.into())])));
    Ok(events)
}

// Another device may sit at the address of one that has left; and one of the pool that somebody else gave to a driver of the host, or
// that could not be bound again after a reboot, cannot be reset below that driver. What is on demand goes to that driver anyway.
fn can_be_cleaned(worker: &Worker, ledger: &Ledger, claim: &ClaimRecord) -> Result<(), Dirty> {
    let inventory = Inventory::observe(worker.host(), 0);
    for device in &claim.devices {
        let function = inventory.devices.get(device).filter(|function| ledger.record_of(function).is_some());
        let reason = match function {
            None => format!("{device} has left the host"),
            Some(function) if !claim.on_demand && !function.is_on_vfio() => {
                let driver = function.driver.as_deref().unwrap_or("no driver");
                format!("{device} is bound to {driver}, so it could not be reset after its claim")
            }
            Some(_) => continue,
        };
        return Err(Dirty { reason, stuck: false });
    }
    Ok(())
}

fn list(devices: &[PciAddress]) -> String {
    devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

// The claim ends and what is on demand begins to go back in one entry: there is no moment at which it is free.
pub(super) fn give_back(worker: &Worker, id: ClaimId, claim: &ClaimRecord) -> Result<(), Failure> {
    if !claim.on_demand {
        return worker.commit(move |ledger| drop(ledger.claims.remove(&id)));
    }
    let devices = claim.devices.clone();
    let ledger = worker.record(move |ledger| {
        ledger.claims.remove(&id);
        for device in &devices {
            if let Some(record) = ledger.devices.get_mut(device) {
                record.standing = Standing::Releasing;
            }
        }
    })?;
    let Some(main) = claim.devices.last() else { return Ok(()) };
    if let Err(failure) = release_bundle(worker, &ledger, (*main, true)) {
        tracing::error!("{main} stays in the pool: {}", one_line(&failure));
    }
    Ok(())
}

/// Gives a bundle back to the host whose records are `releasing`, from whatever it has now; reset first unless it was just now.
///
/// # Errors
/// Why it is not back: it stays in the pool, or is in quarantine.
pub(super) fn release_bundle(worker: &Worker, ledger: &Ledger, (device, are_clean): (PciAddress, bool)) -> Result<(), Failure> {
    let inventory = Inventory::observe(worker.host(), 0);
    let Some(bundle) = inventory.bundle(device) else {
        return worker.commit(move |ledger| drop(ledger.devices.remove(&device)));
    };
    let surroundings = observe(worker.host(), &bundle.devices.iter().copied().collect(), &inventory);
    let config = Config::default();
    let situation = Situation { inventory: &inventory, config: &config, ledger, surroundings: &surroundings };
    let plan = plan::plan(&situation, &[Goal::Release { device }]).map_err(first_of)?;
    GivingBack { plan, ledger: ledger.clone(), are_clean }
        .run(worker)
        .map_err(|outcome| outcome.error.unwrap_or_else(|| Failure::new(ErrorKind::Internal, "giving it back failed")))
}
