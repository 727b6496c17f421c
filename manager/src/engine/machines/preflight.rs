//! What a pre-flight needs of the engine: the devices that a machine would get now, and what speaks against it.

use vfio::{Function, PciAddress};

use super::view::state_word;
use super::{Engine, admit, claims_of, is_down};
use crate::failure::{ErrorKind, Failure};
use crate::id::{MachineId, TenantId};
use crate::ledger::Usage;
use crate::preflight::Case;
use crate::request::Planned;
use crate::spec::MachineSpec;

/// Thinks a start through. Nothing is claimed.
///
/// # Errors
/// There is no such machine or it is not off, its tenant may not have one like it, or there is no libvirt to ask.
pub(in crate::engine) fn case(engine: &mut Engine, planned: Planned) -> Result<Case, Failure> {
    let (tenant, spec, held) = match planned {
        Planned::Machine(machine) => of_machine(engine, machine)?,
        Planned::Spec { tenant, spec } => (tenant, *spec, None),
    };
    admit::may_be(engine, tenant, &spec)?;
    let host = admit::connected(engine)?;
    let libvirt = super::libvirt(engine).ok_or_else(|| Failure::new(ErrorKind::HypervisorFailed, "gpuwardd runs without a hypervisor"))?;
    let quota = if held.is_none() { engine.ledger.has_quota(tenant, &Usage::of_machine(&spec)) } else { Ok(()) };
    let (devices, refusal) = match devices(engine, (tenant, &spec), held.unwrap_or_default()) {
        Ok(devices) => (devices, quota.and_then(|()| spec.check_fits(&host)).err()),
        Err(refusal) => (Vec::new(), Some(refusal)),
    };
    let tenant = engine.ledger.tenant(tenant)?.clone();
    Ok(Case { spec, tenant, devices, refusal, host, libvirt })
}

type OfMachine = (TenantId, MachineSpec, Option<Vec<PciAddress>>);

fn of_machine(engine: &Engine, machine: MachineId) -> Result<OfMachine, Failure> {
    let record = admit::record(engine, machine)?;
    if !is_down(record.state) {
        let message = format!("machine {} is {}", record.spec.name, state_word(record.state));
        return Err(Failure::new(ErrorKind::Conflict, message).remedy("stop it first: what it has itself would count against it"));
    }
    let held = claims_of(engine, machine).flat_map(|(_, claim)| claim.devices.clone()).collect();
    Ok((record.tenant, record.spec.clone(), Some(held)))
}

fn devices(engine: &mut Engine, (tenant, spec): (TenantId, &MachineSpec), held: Vec<PciAddress>) -> Result<Vec<Function>, Failure> {
    let devices = if held.is_empty() {
        let chosen = admit::choose(engine, tenant, &spec.devices, "device")?;
        chosen.into_iter().flat_map(|bundle| bundle.devices).collect()
    } else {
        held
    };
    Ok(devices.iter().filter_map(|device| engine.inventory.devices.get(device)).cloned().collect())
}
