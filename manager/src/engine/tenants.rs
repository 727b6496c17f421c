//! Tenants in the engine: made, changed and removed by entries in the ledger alone; the host is not touched.

use std::collections::BTreeMap;

use super::Engine;
use super::jobs::{Concern, Work};
use super::worker::{Outcome, Worker};
use crate::failure::{ErrorKind, Failure};
use crate::id::TenantId;
use crate::ledger::Usage;
use crate::request::TenantChange;
use crate::spec::{TenantSpec, Wish};
use crate::view::{JobView, TenantView};

/// The most lines of evidence for what a tenant still has.
const MOST_TOLD: usize = 16;

/// Whether a tenant may be changed so, and what that is about.
pub(super) fn admit(engine: &Engine, change: &TenantChange) -> Result<Concern, Failure> {
    let (kind, tenant) = match change {
        TenantChange::Create { tenant, spec } => {
            is_new(engine, *tenant, spec)?;
            ("tenant-create", *tenant)
        }
        TenantChange::Set { tenant, spec } => {
            keeps_its_name(engine, *tenant, spec)?;
            ("tenant-set", *tenant)
        }
        TenantChange::Remove(tenant) => {
            has_nothing(engine, *tenant)?;
            ("tenant-remove", *tenant)
        }
    };
    Ok(Concern { kind, tenant: Some(tenant), ..Concern::default() })
}

/// Records what was asked for: there is nothing to do but that.
pub(super) fn begin(engine: &mut Engine, change: TenantChange) -> Result<Work, Failure> {
    admit(engine, &change)?;
    engine.commit(|ledger| match change {
        TenantChange::Create { tenant, spec } | TenantChange::Set { tenant, spec } => drop(ledger.tenants.insert(tenant, *spec)),
        TenantChange::Remove(tenant) => drop(ledger.tenants.remove(&tenant)),
    })?;
    Ok(Box::new(|_: &Worker| Outcome::done()))
}

fn is_new(engine: &Engine, tenant: TenantId, spec: &TenantSpec) -> Result<(), Failure> {
    if let Some(other) = engine.ledger.tenants.get(&tenant) {
        let failure = Failure::new(ErrorKind::NameTaken, format!("there is a tenant {} already: {}", tenant.0, other.name));
        return Err(failure.remedy("give it another uuid"));
    }
    if engine.ledger.tenants.values().any(|other| other.name == spec.name) {
        let failure = Failure::new(ErrorKind::NameTaken, format!("there is a tenant called {} already", spec.name));
        return Err(failure.remedy("give it another name, or change that one: gpuward tenant apply"));
    }
    Ok(())
}

fn keeps_its_name(engine: &Engine, tenant: TenantId, spec: &TenantSpec) -> Result<(), Failure> {
    let name = &engine.ledger.tenant(tenant)?.name;
    if *name == spec.name {
        return Ok(());
    }
    let message = format!("tenant {name} cannot be renamed to {}: others know it by its name", spec.name);
    Err(Failure::new(ErrorKind::InvalidSpec, message).remedy("make another tenant"))
}

fn has_nothing(engine: &Engine, tenant: TenantId) -> Result<(), Failure> {
    let name = &engine.ledger.tenant(tenant)?.name;
    if tenant == TenantId::BUILT_IN {
        return Err(Failure::new(ErrorKind::NotSupported, format!("tenant {name} is built in: it cannot be removed")));
    }
    let machines = engine.ledger.machines.values().filter(|machine| machine.tenant == tenant);
    let machines = machines.map(|machine| format!("machine {}", machine.spec.name));
    let claims = engine.ledger.claims.iter().filter(|(_, claim)| claim.tenant == tenant && claim.machine.is_none());
    let left: Vec<_> = machines.chain(claims.map(|(id, _)| format!("claim {id}"))).collect();
    if left.is_empty() {
        return Ok(());
    }
    let message = format!("tenant {name} still has {} machines and claims", left.len());
    let failure = left.into_iter().take(MOST_TOLD).fold(Failure::new(ErrorKind::Conflict, message), Failure::because);
    Err(failure.remedy("remove its machines and release its claims first"))
}

/// Whether a tenant accepts what isolates such devices, and has quota for them.
///
/// # Errors
/// `NoSuchTenant`, `LevelRefused`, `QuotaExceeded`.
pub(super) fn may_have(engine: &Engine, tenant: TenantId, wishes: &[Wish], key: &str) -> Result<(), Failure> {
    let spec = engine.ledger.tenant(tenant)?;
    if let Some(index) = wishes.iter().position(|wish| wish.kind.isolation() < spec.minimum_isolation) {
        let (level, least) = (wishes[index].kind.isolation().word(), spec.minimum_isolation.word());
        let message = format!("{key}[{index}] is isolated as {level}, which is less than tenant {} accepts, {least}", spec.name);
        return Err(Failure::new(ErrorKind::LevelRefused, message)
            .remedy("wish for a whole GPU, or ask an administrator to lower the tenant's minimum-isolation"));
    }
    engine.ledger.has_quota(tenant, &Usage::of_wishes(wishes))
}

/// What clients see of tenants.
pub(super) fn views(engine: &Engine) -> BTreeMap<TenantId, TenantView> {
    let view = |tenant: TenantId, spec: &TenantSpec| TenantView { spec: spec.clone(), usage: engine.ledger.usage(tenant), generation: 0 };
    engine.ledger.tenants.iter().map(|(id, spec)| (*id, view(*id, spec))).collect()
}

/// Whose a job is: its own word, or that of the machine or of the claims it is about.
pub(super) fn of_job(engine: &Engine, job: &JobView) -> Option<TenantId> {
    let of_machine = || engine.ledger.machines.get(&job.machine?).map(|machine| machine.tenant);
    let of_claim = || job.claims.iter().find_map(|claim| engine.ledger.claims.get(claim)).map(|claim| claim.tenant);
    job.tenant.or_else(of_machine).or_else(of_claim)
}
