//! What would have to change for a goal, computed from what was observed and recorded: pure, and refused before anything is touched.
//!
//! Order inside a bundle: all are woken, companions bind first and the GPU last; back in reverse (P7). Bundles do not wait for each
//! other: the n-th changes of all of them make the n-th stage.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use vfio::{Binding, Bundle, Change, Function, Holder, Inventory, PciAddress, reset};

use crate::config::Config;
use crate::id::JobId;
use crate::ledger::{Ledger, Original};
use crate::request::{Goal, PlanStep};

mod check;
mod refusal;
#[cfg(test)]
pub(crate) mod tests;
mod vfs;

pub use refusal::Refusal;

/// What a plan is made from.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// What was observed.
    pub inventory: &'a Inventory,
    /// What is allowed.
    pub config: &'a Config,
    /// What is recorded.
    pub ledger: &'a Ledger,
    /// What else matters.
    pub surroundings: &'a Surroundings,
}

/// What else was observed at the same moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// Drivers that the PCI bus has.
    pub drivers: BTreeSet<String>,
    /// VFIO's `enable_unsafe_noiommu_mode` is on: what it calls isolated is not.
    pub unsafe_noiommu: bool,
    /// NVIDIA's `sriov-manage` is installed.
    pub sriov_manage: bool,
    /// Devices that libvirt domains of others name, by the domain's name.
    pub domains: BTreeMap<PciAddress, String>,
    /// Who holds devices.
    pub holders: BTreeMap<PciAddress, Vec<Holder>>,
    /// Devices with a job that is not over, and its kind.
    pub busy: BTreeMap<PciAddress, (JobId, &'static str)>,
}

/// Stages of changes. Stages run in order; the changes of one stage are about different bundles and run side by side.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The bundles it moves.
    pub moves: Vec<Move>,
    /// The physical functions that get or lose virtual ones.
    #[serde(default)]
    pub vfs: Vec<VfMove>,
    /// Units of the host that hold devices of these bundles, each with one of them: paused before the first change, started again
    /// after the last one, however the job ends.
    pub pauses: BTreeMap<String, PciAddress>,
    /// What is changed, in order.
    pub stages: Vec<Vec<Change>>,
}

/// A bundle that moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    /// Where to.
    pub to: Side,
    /// Its devices, in the order they bind.
    pub devices: Vec<PciAddress>,
}

/// A physical function that gets or loses virtual ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VfMove {
    /// The physical function.
    pub device: PciAddress,
    /// How many it is to have.
    pub count: u16,
    /// Those it has.
    pub functions: Vec<PciAddress>,
}

/// Who has a bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// The host and its drivers.
    Host,
    /// gpuward, for guests.
    Pool,
}

impl Plan {
    /// Whether nothing would change.
    pub fn is_empty(&self) -> bool {
        self.stages.is_empty()
    }

    /// Every change, in order.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        self.stages.iter().flatten()
    }

    /// Every device of the bundles that move, and every physical function with its virtual ones.
    pub fn devices(&self) -> Vec<PciAddress> {
        let moved = self.moves.iter().flat_map(|bundle| bundle.devices.iter().copied());
        moved.chain(self.vfs.iter().flat_map(|vfs| vfs.functions.iter().copied().chain([vfs.device]))).collect()
    }

    /// SHA-256 over everything it would do, in hexadecimal digits.
    pub fn digest(&self) -> String {
        // A plan is plain data with string keys: it always serialises.
        let text = serde_json::to_vec(self).unwrap_or_default();
        Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Its changes for a person. A knob that is only held where it is, is not shown, nor is a stage of such knobs counted.
    pub fn steps(&self) -> Vec<PlanStep> {
        let shown = |changes: &'_ &Vec<Change>| changes.iter().any(|change| !change.is_nothing());
        let last = u32::try_from(self.stages.iter().filter(shown).count()).unwrap_or(u32::MAX).saturating_add(1);
        let numbered = (1..).zip(self.stages.iter().filter(shown));
        let changes = numbered.flat_map(|(stage, changes)| changes.iter().map(move |change| (stage, change)));
        let changes = changes.filter(|(_, change)| !change.is_nothing()).map(|(stage, change)| PlanStep {
            stage,
            device: change.device(),
            knob: change.knob().into(),
            from: change.from(),
            to: change.to(),
        });
        self.pause_steps(0, ("active", "paused")).chain(changes).chain(self.pause_steps(last, ("paused", "active"))).collect()
    }

    fn pause_steps(&self, stage: u32, (from, to): (&'static str, &'static str)) -> impl Iterator<Item = PlanStep> {
        let step = move |(unit, device): (&String, &PciAddress)| PlanStep {
            stage,
            device: *device,
            knob: unit.clone(),
            from: from.into(),
            to: to.into(),
        };
        self.pauses.iter().map(step)
    }
}

/// Whether a function is bound to its VFIO driver because its override says so.
pub fn is_in_pool(function: &Function) -> bool {
    function.binding() == Binding::overridden(&function.vfio_driver)
}

/// What a function has now, to be given back.
pub fn original(function: &Function) -> Original {
    Original {
        binding: function.binding(),
        power_control: function.power.control.clone(),
        d3cold_allowed: function.power.d3cold_allowed,
        reset_method: Some(function.reset_methods.join(" ")),
    }
}

/// Plans goals together.
///
/// # Errors
/// Every reason against it; then nothing is to be touched.
pub fn plan(situation: &Situation<'_>, goals: &[Goal]) -> Result<Plan, Vec<Refusal>> {
    let mut refusals = Vec::new();
    let mut moves: Vec<Move> = Vec::new();
    let mut lanes = Vec::new();
    let mut vfs: Vec<VfMove> = Vec::new();
    let mut pauses = BTreeMap::new();
    for goal in goals {
        let (device, to, force) = match goal {
            Goal::Assign { device, force } => (*device, Side::Pool, *force),
            Goal::Release { device } => (*device, Side::Host, false),
            Goal::Vfs { device, count } => {
                let lane = vfs::lane(situation, *device, *count);
                refusals.extend(vfs::against(situation, *device, *count, &lane));
                pauses.extend(vfs::pauses(situation, *device, &lane));
                lanes.push(lane);
                vfs.push(VfMove { device: *device, count: *count, functions: functions_of(situation, *device) });
                continue;
            }
        };
        let Some(bundle) = situation.inventory.bundle(device).or_else(|| left(situation, device, to)) else {
            refusals.push(Refusal::UnknownDevice { device });
            continue;
        };
        if let Some(other) = moves.iter().find(|other| other.devices == bundle.devices) {
            if other.to != to {
                refusals.push(Refusal::BothWays { device });
            }
            continue;
        }
        let lane = match to {
            Side::Pool => assign(situation, &bundle),
            Side::Host => release(situation, &bundle),
        };
        refusals.extend(match to {
            Side::Pool => check::assign(situation, &bundle, force, &lane),
            Side::Host => check::release(situation, &bundle, &lane),
        });
        pauses.extend(check::pauses(situation, &bundle.devices, &lane));
        lanes.push(lane);
        moves.push(Move { to, devices: bundle.devices });
    }
    refusals.extend(both_ways(&moves, &vfs));
    if refusals.is_empty() { Ok(Plan { moves, vfs, pauses, stages: stages(&lanes) }) } else { Err(refusals) }
}

fn functions_of(situation: &Situation<'_>, device: PciAddress) -> Vec<PciAddress> {
    let sriov = situation.inventory.devices.get(&device).and_then(|function| function.sriov.as_ref());
    sriov.map(|sriov| sriov.functions.clone()).unwrap_or_default()
}

// One request moves a physical function, or a virtual one of it, or changes how many there are.
fn both_ways(moves: &[Move], vfs: &[VfMove]) -> Vec<Refusal> {
    let moved = |device: &PciAddress| moves.iter().any(|bundle| bundle.devices.contains(device));
    let twice = |vfs_of: &VfMove| vfs.iter().filter(|other| other.device == vfs_of.device).count() > 1;
    let clash = vfs.iter().filter(|vfs_of| twice(vfs_of) || moved(&vfs_of.device) || vfs_of.functions.iter().any(moved));
    clash.map(|vfs_of| Refusal::BothWays { device: vfs_of.device }).collect()
}

// One that has left the host is forgotten when it is released: nothing is changed for that.
fn left(situation: &Situation<'_>, device: PciAddress, to: Side) -> Option<Bundle> {
    let is_recorded = to == Side::Host && situation.ledger.devices.contains_key(&device);
    is_recorded.then(|| Bundle { devices: vec![device], groups: Vec::new(), foreign: Vec::new() })
}

fn stages(lanes: &[Vec<Change>]) -> Vec<Vec<Change>> {
    let longest = lanes.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest).map(|index| lanes.iter().filter_map(|lane| lane.get(index).cloned()).collect()).collect()
}

fn functions<'a>(situation: &Situation<'a>, bundle: &'a Bundle) -> impl DoubleEndedIterator<Item = &'a Function> {
    let devices = &situation.inventory.devices;
    bundle.devices.iter().filter_map(|device| devices.get(device))
}

fn assign(situation: &Situation<'_>, bundle: &Bundle) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut bindings = Vec::new();
    for function in functions(situation, bundle) {
        let binding = binding(function, Binding::overridden(&function.vfio_driver));
        changes.extend(reset_method(function, reset::for_guests(function)));
        changes.extend(d3cold(function, Some(false)));
        changes.extend(power_control(function, Some("on"), binding.is_some()));
        bindings.extend(binding);
    }
    changes.extend(bindings);
    changes
}

// A device without a record is not ours: nothing is done to it, whatever driver it has (P75).
fn release(situation: &Situation<'_>, bundle: &Bundle) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut power = Vec::new();
    for function in functions(situation, bundle).rev() {
        let Some(record) = situation.ledger.record_of(function) else { continue };
        let original = &record.original;
        let binding = binding(function, original.binding.clone());
        power.extend(other_knobs(function, original, binding.is_some()));
        changes.extend(binding);
    }
    changes.extend(power);
    changes
}

/// Gives a function back what it had beside its driver, which it has.
pub fn back(function: &Function, original: &Original) -> Vec<Change> {
    other_knobs(function, original, false).collect()
}

fn other_knobs(function: &Function, original: &Original, binds: bool) -> impl Iterator<Item = Change> {
    let power = power_control(function, original.power_control.as_deref(), binds);
    power.into_iter().chain(d3cold(function, original.d3cold_allowed)).chain(reset_method(function, original.reset_method.clone()))
}

fn binding(function: &Function, to: Binding) -> Option<Change> {
    let change = Change::Binding { device: function.address, from: function.binding(), to };
    (!change.is_nothing()).then_some(change)
}

// `also`: vfio-pci allows sleep as it binds and forbids it as it leaves (`vfio_pci_core_register_device`), so what it is now says
// nothing about what it will be.
fn power_control(function: &Function, to: Option<&str>, also: bool) -> Option<Change> {
    let (from, to) = (function.power.control.clone()?, to?.to_owned());
    let change = Change::PowerControl { device: function.address, from, to };
    (also || !change.is_nothing()).then_some(change)
}

fn reset_method(function: &Function, to: Option<String>) -> Option<Change> {
    let change = Change::ResetMethod { device: function.address, from: function.reset_methods.join(" "), to: to? };
    (!change.is_nothing()).then_some(change)
}

fn d3cold(function: &Function, to: Option<bool>) -> Option<Change> {
    let change = Change::D3cold { device: function.address, from: function.power.d3cold_allowed?, to: to? };
    (!change.is_nothing()).then_some(change)
}
