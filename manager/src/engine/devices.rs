//! Jobs on devices: bundles move between host and pool.

use std::collections::{BTreeMap, BTreeSet};

use vfio::{Holders, Host, Inventory, PciAddress};

use super::Engine;
use super::give_back::GivingBack;
use super::jobs::{Concern, Work};
use super::worker::{Outcome, Worker};
use crate::config::Use;
use crate::failure::{ErrorKind, Failure};
use crate::id::JobId;
use crate::ledger::Ledger;
use crate::plan::{self, Move, Plan, Refusal, Side, Situation, Surroundings};
use crate::request::{Goal, PlanReport};

/// Whether goals may become a job, and what that is about.
pub(super) fn admit(engine: &mut Engine, goals: &[Goal], digest: Option<&str>) -> Result<Concern, Failure> {
    engine.observe();
    let plan = engine.plan(goals, None).map_err(first_of)?;
    same_digest(&plan, digest)?;
    let sides: BTreeSet<_> = plan.moves.iter().map(|bundle| bundle.to).collect();
    let kind = match (sides.contains(&Side::Pool), sides.contains(&Side::Host), !plan.vfs.is_empty()) {
        (true, false, false) => "assign",
        (false, true, false) => "release",
        (false, false, true) => super::vfs::KIND,
        (_, _, _) => "apply",
    };
    Ok(Concern { kind, devices: plan.devices(), ..Concern::default() })
}

/// Plans anew, records what is about to happen, and gives what is to run.
pub(super) fn begin(engine: &mut Engine, job: JobId, goals: &[Goal], digest: Option<&str>) -> Result<Work, Failure> {
    engine.observe();
    let plan = engine.plan(goals, Some(job)).map_err(first_of)?;
    same_digest(&plan, digest)?;
    let inventory = engine.inventory.clone();
    let taken: Vec<_> = plan.moves.iter().filter(|bundle| bundle.to == Side::Pool).map(|bundle| engine.taken_for(bundle)).collect();
    engine.commit(|ledger| {
        ledger.begin_moves(&plan.moves, &inventory);
        ledger.begin_vfs(&plan.vfs, &inventory);
        taken.iter().for_each(|(devices, lent)| ledger.lend(devices, *lent));
    })?;
    let giving_back = GivingBack { plan, ledger: engine.ledger.clone(), are_clean: false };
    Ok(Box::new(move |worker: &Worker| match giving_back.run(worker) {
        Ok(()) => Outcome::done(),
        Err(outcome) => *outcome,
    }))
}

fn same_digest(plan: &Plan, digest: Option<&str>) -> Result<(), Failure> {
    if digest.is_none_or(|digest| digest == plan.digest()) {
        return Ok(());
    }
    let message = "the host has changed since the plan was made: another plan would be carried out now";
    Err(Failure::new(ErrorKind::Conflict, message).remedy("plan again, and look at what is new"))
}

/// The first refusal, with the others as evidence.
pub(super) fn first_of(refusals: Vec<Refusal>) -> Failure {
    let mut refusals = refusals.into_iter().map(Failure::from);
    let Some(first) = refusals.next() else {
        return Failure::new(ErrorKind::Internal, "refused without a reason");
    };
    refusals.fold(first, |first, other| first.because(format!("also: {}", other.message)))
}

impl Engine {
    /// The bundle of a device; the device alone where it has left.
    pub(super) fn bundle_of(&self, device: PciAddress) -> Vec<PciAddress> {
        self.inventory.bundle(device).map_or_else(|| vec![device], |bundle| bundle.devices)
    }

    /// The devices of a bundle that is being taken, and whether that is for another manager.
    fn taken_for(&self, bundle: &Move) -> (Vec<PciAddress>, bool) {
        let functions = bundle.devices.iter().filter_map(|device| self.inventory.devices.get(device));
        let lent = functions.map(|function| self.config.use_in(&self.inventory, function)).any(|use_| matches!(use_, Use::Lend { .. }));
        (bundle.devices.clone(), lent)
    }

    /// Plans goals on what was observed last; `job` is not in its own way.
    pub(super) fn plan(&self, goals: &[Goal], job: Option<JobId>) -> Result<Plan, Vec<Refusal>> {
        self.plan_with(&self.ledger, goals, job)
    }

    /// As [`Engine::plan`], as if `ledger` were what is recorded.
    pub(super) fn plan_with(&self, ledger: &Ledger, goals: &[Goal], job: Option<JobId>) -> Result<Plan, Vec<Refusal>> {
        let wished = || goals.iter().map(Goal::device);
        let bundles = wished().filter_map(|device| self.inventory.bundle(device)).flat_map(|bundle| bundle.devices);
        let virtual_functions = wished().filter_map(|device| self.inventory.devices.get(&device)?.sriov.as_ref());
        let devices = bundles.chain(virtual_functions.flat_map(|sriov| sriov.functions.iter().copied())).collect();
        let surroundings = self.surroundings(&devices, job);
        let situation = Situation { inventory: &self.inventory, config: &self.config, ledger, surroundings: &surroundings };
        plan::plan(&situation, goals)
    }

    pub(super) fn surroundings(&self, devices: &BTreeSet<PciAddress>, job: Option<JobId>) -> Surroundings {
        let others = self.jobs.live().filter(|(id, _)| Some(*id) != job);
        let busy = others.flat_map(|(id, view)| view.devices.iter().map(move |device| (*device, (id, view.kind))));
        Surroundings {
            busy: busy.filter(|(device, _)| devices.contains(device)).collect(),
            domains: super::machines::foreign_domains(self),
            ..observe(&self.options.host, devices, &self.inventory)
        }
    }

    /// What would be done for goals.
    pub(super) fn report(&mut self, goals: &[Goal]) -> Result<PlanReport, Failure> {
        self.observe();
        Ok(match self.plan(goals, None) {
            Ok(plan) => PlanReport { steps: plan.steps(), refusals: Vec::new(), digest: plan.digest() },
            Err(refusals) => {
                let refusals = refusals.into_iter().map(Failure::from).collect();
                PlanReport { steps: Vec::new(), refusals, digest: String::new() }
            }
        })
    }
}

/// What matters to a plan for these devices beside the inventory. Reads every process: who holds what is looked for on demand.
pub(super) fn observe(host: &Host, devices: &BTreeSet<PciAddress>, inventory: &Inventory) -> Surroundings {
    let drivers = host.entries("sys/bus/pci/drivers").ok().flatten().unwrap_or_default();
    let unsafe_noiommu = host.read("sys/module/vfio/parameters/enable_unsafe_noiommu_mode").ok().flatten();
    let mut holders: BTreeMap<_, Vec<_>> = BTreeMap::new();
    if !devices.is_empty() {
        for holder in Holders::of(host, devices.iter().filter_map(|device| inventory.devices.get(device))).found {
            holders.entry(holder.device).or_default().push(holder);
        }
    }
    Surroundings {
        drivers: drivers.into_iter().collect(),
        unsafe_noiommu: unsafe_noiommu.as_deref() == Some("Y"),
        sriov_manage: host.exists("usr/lib/nvidia/sriov-manage"),
        holders,
        ..Surroundings::default()
    }
}
