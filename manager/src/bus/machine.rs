//! Machines.

use std::sync::Arc;

use zbus::message::Header;
use zbus::{OwnedFd, interface};

use super::authority::{Action, Caller};
use super::dict::{Dict, Options, Received, of_failure};
use super::error::BusError;
use super::explain::explain;
use super::guard::{Belongs, Owned};
use super::manager::Answer;
use super::paths::{self, Path};
use super::service::{Conditions, Service};
use crate::failure::Failure;
use crate::id::{MachineId, TenantId};
use crate::request::{Ask, Request};
use crate::view::{GivenView, MachineState, MachineView, View};

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

    /// Asks the guest to reboot, by its agent or by the power button, and keeps its devices. Its job ends when libvirt has passed
    /// that on: the guest may take its time, or not obey. `Explain` counts its resets. Conflict where it is not running.
    ///
    /// Options: `request-id` (s), `if-generation` (t). Polkit action: `org.gpuward.manage-machines`.
    #[zbus(out_args("job"))]
    async fn reboot(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        self.act(&header, Request::RebootMachine(self.id), options).await
    }

    /// A stream socket to and from the guest's serial console, raw, from now on. One session a machine: Busy while another is open,
    /// here or in libvirt. It ends when the caller closes it, when the machine ends, and when the daemon does. What the caller does
    /// not read in time is lost. Conflict where the machine does not run. No options.
    ///
    /// Polkit action: `org.gpuward.manage-machines`.
    #[zbus(out_args("console"))]
    async fn open_console(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<OwnedFd, BusError> {
        self.check(&header, Action::ManageMachines).await?;
        Options::new(options)?.done()?;
        let id = self.id;
        Ok(self.service.ask(|reply| Ask::Console(id, reply)).await?.into())
    }

    /// Why it is as it is: `state` (s), `reason` (s), `guest-state` (s), `waits-for` (s: what has to happen next, for a person),
    /// `error` (a{sv}: as the property), `reboots` (u: of the guest, since the daemon first saw this run). While a job is in hand
    /// also `job` (o), and where that has a deadline `deadline` (u: seconds from when the job began to wait) and `deadline-made-of` (s).
    ///
    /// No options. Polkit action: `org.gpuward.inspect`.
    #[zbus(out_args("explanation"))]
    async fn explain(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Answer, BusError> {
        self.check(&header, Action::Inspect).await?;
        Options::new(options)?.done()?;
        Ok(explain(&self.service.view(), self.id))
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

    /// Its devices: `device` (o), `claim` (o), `host-address` (s), `alias` (s: in the domain's XML); while its domain has them also
    /// `guest-address` (s: where the guest finds it) and `port` (u: the guest's root port).
    #[zbus(property)]
    fn device_map(&self) -> Vec<Answer> {
        self.of(|machine| machine.devices.iter().map(given).collect())
    }

    /// Process id of QEMU; 0 while there is none.
    #[zbus(property)]
    fn leader(&self) -> u32 {
        self.of(|machine| machine.leader)
    }

    /// What can be seen of the guest: `started` (it runs, and its agent has not been heard since it booted), `agent-connected`,
    /// `agent-lost` (it was, and is not any more), `asleep` (the guest suspended itself), or `unknown`. The set may grow.
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

fn given(given: &GivenView) -> Answer {
    let address = given.device;
    let mut dict = Dict::new();
    dict.put("device", paths::device(address)).put("claim", paths::claim(given.claim)).put("host-address", address.to_string());
    dict.put("alias", xml_templates::Hostdev { address }.alias());
    if let Some(guest) = given.guest {
        dict.put("guest-address", guest.to_string()).put("port", u32::from(guest.bus()));
    }
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
