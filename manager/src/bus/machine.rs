//! Machines.

use std::sync::Arc;

use zbus::interface;
use zbus::message::Header;

use super::authority::{Action, Caller};
use super::dict::{Dict, Options, Received, of_failure};
use super::error::BusError;
use super::guard::{Belongs, Owned};
use super::manager::Answer;
use super::paths::{self, Path};
use super::service::{Conditions, Service};
use crate::failure::Failure;
use crate::id::{MachineId, TenantId};
use crate::request::Request;
use crate::view::{MachineState, MachineView, View};

/// `org.gpuward1.Machine`
pub(super) struct Machine {
    pub(super) service: Arc<Service>,
    pub(super) id: MachineId,
}

impl Machine {
    fn of<T: Default>(&self, fact: impl FnOnce(&MachineView) -> T) -> T {
        self.service.view().machines.get(&self.id).map(fact).unwrap_or_default()
    }

    async fn check(&self, header: &Header<'_>, action: Action) -> Result<Caller, Failure> {
        self.service.check_own(header, (action, self.belongs(&self.service.view())), &self.id.to_string()).await
    }

    async fn act(&self, header: &Header<'_>, request: Request, options: Received) -> Result<Path, BusError> {
        let caller = self.check(header, Action::ManageMachines).await?;
        self.service.submit(caller, request, Conditions::only(options)?).await
    }
}

impl Owned for Machine {
    fn belongs(&self, view: &View) -> Belongs {
        Belongs::ToTenant(view.machines.get(&self.id).map(|machine| machine.tenant), None)
    }
}

#[interface(name = "org.gpuward1.Machine")]
impl Machine {
    /// Claims the devices it wishes for and starts it. Its job ends when libvirt reports it running with every device, or fails with
    /// NoFit, PreflightFailed, HypervisorFailed or DeadlineExceeded; then its devices are free again.
    ///
    /// Options: `request-id` (s), `if-generation` (t). Polkit action: `org.gpuward.manage-machines`.
    #[zbus(out_args("job"))]
    async fn start(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        self.act(&header, Request::StartMachine(self.id), options).await
    }

    /// Asks the guest to shut down, and kills it after its deadline where its specification says so. Its job ends when it is
    /// gone. Options: `request-id` (s), `if-generation` (t). Polkit action: `org.gpuward.manage-machines`.
    #[zbus(out_args("job"))]
    async fn stop(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        self.act(&header, Request::StopMachine(self.id), options).await
    }

    /// Ends it at once. Its job ends when it is gone. Options: `request-id` (s), `if-generation` (t).
    ///
    /// Polkit action: `org.gpuward.manage-machines`.
    #[zbus(out_args("job"))]
    async fn kill(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        self.act(&header, Request::KillMachine(self.id), options).await
    }

    /// Forgets it; refused while it is not off. Its disks are not touched. Options: `request-id` (s), `if-generation` (t).
    ///
    /// Polkit action: `org.gpuward.manage-machines`.
    #[zbus(out_args("job"))]
    async fn remove(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        self.act(&header, Request::RemoveMachine(self.id), options).await
    }

    /// The libvirt XML it runs with; empty while it is off. No options. Polkit action: `org.gpuward.inspect`.
    #[zbus(name = "GetDomainXML", out_args("xml"))]
    async fn get_domain_xml(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<String, BusError> {
        self.check(&header, Action::Inspect).await?;
        Options::new(options)?.done()?;
        Ok(self.of(|machine| machine.domain_xml.clone()))
    }

    /// Unique within its tenant.
    #[zbus(property(emits_changed_signal = "const"))]
    fn name(&self) -> String {
        self.of(|machine| machine.name.clone())
    }

    /// UUID, also of its libvirt domain.
    #[zbus(property(emits_changed_signal = "const"), name = "UUID")]
    fn uuid(&self) -> String {
        self.id.0.to_string()
    }

    /// Whose it is.
    #[zbus(property(emits_changed_signal = "const"))]
    fn tenant(&self) -> Path {
        paths::tenant(self.of(|machine| Some(machine.tenant)).unwrap_or(TenantId::BUILT_IN))
    }

    /// off, preparing, starting, running, paused, stopping, failed or unknown. The set may grow.
    #[zbus(property)]
    fn state(&self) -> &'static str {
        word(self.of(|machine| machine.state))
    }

    /// Why it is in that state; empty where the state says it all.
    #[zbus(property)]
    fn reason(&self) -> String {
        self.of(|machine| machine.reason.clone())
    }

    /// Its live claims.
    #[zbus(property)]
    fn claims(&self) -> Vec<Path> {
        self.of(|machine| machine.claims.clone()).into_iter().map(paths::claim).collect()
    }

    /// The least isolation level of its claims; empty without one.
    #[zbus(property)]
    fn isolation_level(&self) -> &'static str {
        self.of(|machine| machine.isolation_level)
    }

    /// Its devices: `device` (o), `alias` (s: in the domain's XML) and `port` (u: the guest's root port).
    #[zbus(property)]
    fn device_map(&self) -> Vec<Answer> {
        let view = self.service.view();
        let claims = view.machines.get(&self.id).map(|machine| machine.claims.clone()).unwrap_or_default();
        let devices = claims.iter().filter_map(|claim| view.claims.get(claim)).flat_map(|claim| claim.devices.clone());
        devices.zip(1u32..).map(|(address, port)| given(address, port)).collect()
    }

    /// Process id of QEMU; 0 while there is none.
    #[zbus(property)]
    fn leader(&self) -> u32 {
        self.of(|machine| machine.leader)
    }

    /// What the guest says of itself; `unknown` until it can speak.
    #[zbus(property)]
    fn guest_state(&self) -> &'static str {
        self.of(|machine| machine.guest_state)
    }

    /// The last failure: `error` (s), `message` (s), `why` (as), `remedy` (s); empty without one.
    #[zbus(property)]
    fn error(&self) -> Answer {
        self.of(|machine| of_failure(machine.error.as_ref()))
    }

    /// The `Manager.Generation` in which it last changed.
    #[zbus(property)]
    fn generation(&self) -> u64 {
        self.of(|machine| machine.generation)
    }
}

fn given(address: vfio::PciAddress, port: u32) -> Answer {
    let mut dict = Dict::new();
    dict.put("device", paths::device(address)).put("alias", xml_templates::Hostdev { address }.alias()).put("port", port);
    dict.into_map()
}

pub(super) fn word(state: MachineState) -> &'static str {
    match state {
        MachineState::Off => "off",
        MachineState::Preparing => "preparing",
        MachineState::Starting => "starting",
        MachineState::Running => "running",
        MachineState::Paused => "paused",
        MachineState::Stopping => "stopping",
        MachineState::Failed => "failed",
        MachineState::Unknown => "unknown",
    }
}
