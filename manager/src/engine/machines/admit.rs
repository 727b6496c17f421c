//! What is asked of machines, and what speaks against it.

use vfio::Function;

use super::super::claims::Free;
use super::super::devices::first_of;
use super::super::jobs::Concern;
use super::super::tenants;
use super::place::{Unmet, is_called, is_wished, place};
use super::view::state_word;
use super::{Engine, claims_of, is_down};
use crate::config::Use;
use crate::failure::{ErrorKind, Failure};
use crate::id::{MachineId, TenantId};
use crate::ledger::{MachineRecord, Usage};
use crate::plan::Refusal;
use crate::request::{Goal, Request};
use crate::spec::{Hold, MachineSpec, Wish, WishKind};
use crate::view::MachineState;

/// The most lines of evidence for a wish that is not met.
const MOST_REASONS: usize = 16;

pub(super) fn admit(engine: &mut Engine, request: &Request) -> Result<Concern, Failure> {
    let concern = |kind, machine| Concern { kind, machine: Some(machine), ..Concern::default() };
    let admitted = match request {
        Request::CreateMachine { tenant, spec } => {
            admit_creation(engine, *tenant, spec)?;
            Ok(Concern { tenant: Some(*tenant), ..concern("machine-create", MachineId(spec.uuid)) })
        }
        Request::StartMachine(machine) => {
            admit_start(engine, *machine)?;
            Ok(concern("machine-start", *machine))
        }
        Request::StopMachine(machine) => {
            is_up(engine, *machine)?;
            Ok(concern("machine-stop", *machine))
        }
        Request::KillMachine(machine) => {
            is_up(engine, *machine)?;
            Ok(Concern { beside: true, ..concern("machine-kill", *machine) })
        }
        Request::RebootMachine(machine) => {
            admit_reboot(engine, *machine)?;
            Ok(concern("machine-reboot", *machine))
        }
        Request::RemoveMachine(machine) => {
            admit_removal(engine, *machine)?;
            Ok(concern("machine-remove", *machine))
        }
        Request::Apply { .. }
        | Request::Rescan
        | Request::Reset(_)
        | Request::ClearQuarantine(_)
        | Request::Recover(_)
        | Request::Claim { .. }
        | Request::ReleaseClaim { .. }
        | Request::Tenant(_) => Err(Failure::new(ErrorKind::Internal, "this is not about a machine")),
    }?;
    let owner = admitted.machine.and_then(|machine| engine.ledger.machines.get(&machine)).map(|record| record.tenant);
    Ok(Concern { tenant: admitted.tenant.or(owner), ..admitted })
}

/// A machine's record.
pub(super) fn record(engine: &Engine, machine: MachineId) -> Result<&MachineRecord, Failure> {
    let absent = || Failure::new(ErrorKind::NoSuchMachine, format!("there is no machine {}", machine.0));
    engine.ledger.machines.get(&machine).ok_or_else(absent)
}

pub(super) fn admit_creation(engine: &mut Engine, tenant: TenantId, spec: &MachineSpec) -> Result<(), Failure> {
    may_be(engine, tenant, spec)?;
    engine.ledger.has_quota(tenant, &Usage::of_machine(spec))?;
    if engine.ledger.machines.contains_key(&MachineId(spec.uuid)) {
        return Err(Failure::new(ErrorKind::NameTaken, format!("there is a machine {} already", spec.uuid)).remedy("give it another uuid"));
    }
    if engine.ledger.machines.values().any(|other| other.tenant == tenant && other.spec.name == spec.name) {
        let message = format!("there is a machine called {} already", spec.name);
        return Err(Failure::new(ErrorKind::NameTaken, message).remedy("give it another name, or remove the other one"));
    }
    // Without libvirt nothing is known of the host: the start looks again.
    if let Some(facts) = &engine.machines.facts {
        spec.check_fits(facts)?;
    }
    match spec.hold {
        Hold::Running => Ok(()),
        Hold::Defined => choose(engine, tenant, &spec.devices, "device").map(drop),
    }
}

/// Whether a tenant's machine may be so: its policy may have changed since it was made.
pub(super) fn may_be(engine: &Engine, tenant: TenantId, spec: &MachineSpec) -> Result<(), Failure> {
    let policy = engine.ledger.tenant(tenant)?;
    policy.may_name(spec)?;
    match spec.minimum_isolation {
        Some(least) if least < policy.minimum_isolation => {
            let (least, theirs) = (least.word(), policy.minimum_isolation.word());
            let message = format!("minimum-isolation is {least}, which is less than tenant {} accepts, {theirs}", policy.name);
            Err(Failure::new(ErrorKind::LevelRefused, message).remedy("leave it out: the tenant's holds then"))
        }
        Some(_) | None => Ok(()),
    }
}

pub(super) fn admit_start(engine: &mut Engine, machine: MachineId) -> Result<(), Failure> {
    let found = record(engine, machine)?;
    if !is_down(found.state) {
        let message = format!("machine {} is {}", found.spec.name, state_word(found.state));
        return Err(Failure::new(ErrorKind::Conflict, message).remedy("stop it before you start it again"));
    }
    let MachineRecord { spec, tenant, .. } = found.clone();
    may_be(engine, tenant, &spec)?;
    spec.check_fits(&connected(engine)?)?;
    if claims_of(engine, machine).next().is_none() {
        choose(engine, tenant, &spec.devices, "device")?;
    }
    Ok(())
}

fn is_up(engine: &Engine, machine: MachineId) -> Result<(), Failure> {
    let found = record(engine, machine)?;
    if is_down(found.state) {
        let message = format!("machine {} is {}", found.spec.name, state_word(found.state));
        return Err(Failure::new(ErrorKind::Conflict, message));
    }
    connected(engine).map(drop)
}

/// A guest that is paused would not hear of it.
pub(super) fn admit_reboot(engine: &Engine, machine: MachineId) -> Result<(), Failure> {
    let found = record(engine, machine)?;
    match found.state {
        MachineState::Running => connected(engine).map(drop),
        MachineState::Off
        | MachineState::Preparing
        | MachineState::Starting
        | MachineState::Paused
        | MachineState::Stopping
        | MachineState::Failed
        | MachineState::Unknown => {
            let message = format!("machine {} is {}, not running", found.spec.name, state_word(found.state));
            Err(Failure::new(ErrorKind::Conflict, message).remedy("a machine that is off is started, not rebooted"))
        }
    }
}

pub(super) fn admit_removal(engine: &Engine, machine: MachineId) -> Result<(), Failure> {
    let found = record(engine, machine)?;
    if is_down(found.state) {
        return Ok(());
    }
    let message = format!("machine {} is {}", found.spec.name, state_word(found.state));
    Err(Failure::new(ErrorKind::Conflict, message).remedy("stop or kill it first"))
}

/// What libvirt said of the host.
pub(super) fn connected(engine: &Engine) -> Result<crate::libvirt::HostFacts, Failure> {
    match &engine.machines.libvirt {
        Some(libvirt) => Ok(libvirt.check()?),
        None => Err(Failure::new(ErrorKind::HypervisorFailed, "gpuwardd runs without a hypervisor")),
    }
}

/// Free bundles for a tenant's wishes, which the caller wrote below `key`.
///
/// # Errors
/// `NoFit`, with who has what; for a device that was named its own refusal. What the tenant may not have whoever has it.
pub(in crate::engine) fn choose(engine: &mut Engine, tenant: TenantId, wishes: &[Wish], key: &str) -> Result<Vec<Free>, Failure> {
    tenants::may_have(engine, tenant, wishes, key)?;
    engine.observe();
    let free = engine.free_bundles();
    place(wishes, &free, &engine.inventory).map_err(|unmet| no_fit(engine, (tenant, wishes), (key, unmet)))
}

fn no_fit(engine: &Engine, (tenant, wishes): (TenantId, &[Wish]), (key, unmet): (&str, Unmet)) -> Failure {
    let wish = &wishes[unmet.wish];
    if let Some(name) = &wish.identity {
        return not_this(engine, tenant, wish, name);
    }
    let message = format!("{key}[{}] wishes for {}; {} free", unmet.wish, in_words(wish), are(unmet.free));
    let mut failure = Failure::new(ErrorKind::NoFit, message);
    let fitting = engine.inventory.devices.values().filter(|function| is_wished(wish, function));
    let reasons: Vec<Failure> = fitting.take(MOST_REASONS).filter_map(|function| why_not(engine, tenant, function)).collect();
    if unmet.free >= wish.count as usize {
        failure = failure.because("they are on different NUMA nodes").remedy("set same-numa = false, or wait for more on one node");
    } else if let Some(first) = reasons.first() {
        failure = failure.remedy(first.remedy.clone());
    } else {
        failure = failure.remedy("`gpuward list` shows what the host has");
    }
    reasons.into_iter().fold(failure, |failure, reason| failure.because(reason.message))
}

fn not_this(engine: &Engine, tenant: TenantId, wish: &Wish, name: &str) -> Failure {
    let Some(function) = engine.inventory.devices.values().find(|function| is_called(function, name)) else {
        return Failure::new(ErrorKind::NoSuchDevice, format!("there is no device {name}")).remedy("`gpuward list` shows the devices");
    };
    if !is_wished(wish, function) {
        let message = format!("{} is no {}", function.address, in_words(&Wish { count: 1, ..wish.clone() }));
        return Failure::new(ErrorKind::NoFit, message).because(format!("it is {}", function.ids));
    }
    why_not(engine, tenant, function).unwrap_or_else(|| Failure::new(ErrorKind::NoFit, format!("{} is not free", function.address)))
}

// Why a device is not free, as a tenant may know it; `None` where it is.
fn why_not(engine: &Engine, tenant: TenantId, function: &Function) -> Option<Failure> {
    let device = function.address;
    if let Some((claim, record)) = engine.ledger.claim_on(device) {
        if record.tenant != tenant {
            let failure = Failure::new(ErrorKind::AlreadyClaimed, format!("{device} belongs to another tenant"));
            return Some(failure.remedy("wish for another device, or ask an operator when it is free"));
        }
        let name = record.machine.and_then(|machine| engine.ledger.machines.get(&machine)).map(|record| record.spec.name.as_str());
        let verb = if record.machine.is_some() { "stop" } else { "release" };
        let holder = name.map_or_else(|| format!("claim {claim}"), |name| format!("machine {name}"));
        return Some(
            Failure::new(ErrorKind::AlreadyClaimed, format!("{device} belongs to {holder}"))
                .remedy(format!("wait for {holder}, or {verb} it")),
        );
    }
    let use_ = engine.config.use_in(&engine.inventory, function);
    if matches!(use_, Use::Lend { .. }) {
        return Some(Refusal::NotAllowed { device, use_ }.into());
    }
    match engine.plan(&[Goal::Assign { device, force: false }], None) {
        Err(refusals) => Some(first_of(refusals)),
        Ok(plan) if plan.is_empty() => None,
        Ok(_) => Some(
            Failure::new(ErrorKind::NoFit, format!("{device} is with the host, not in the pool"))
                .remedy(format!("take it into the pool: gpuward assign {device}")),
        ),
    }
}

fn in_words(wish: &Wish) -> String {
    let what = match (wish.kind, wish.count) {
        (WishKind::Gpu, 1) => "GPU",
        (WishKind::Gpu, _) => "GPUs",
        (WishKind::Vf, 1) => "virtual function",
        (WishKind::Vf, _) => "virtual functions",
    };
    let model = wish.model.map(|model| format!(" {model}")).unwrap_or_default();
    let node = if wish.same_numa && wish.count > 1 { " on one NUMA node" } else { "" };
    format!("{} {what}{model}{node}", wish.count)
}

fn are(count: usize) -> String {
    if count == 1 { "1 is".into() } else { format!("{count} are") }
}
