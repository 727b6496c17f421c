//! Claims.

use std::sync::Arc;

use zbus::interface;
use zbus::message::Header;

use super::authority::{Action, Caller};
use super::device::hostdev_xml;
use super::dict::{Options, Received};
use super::error::BusError;
use super::guard::{Belongs, Owned};
use super::paths::{self, Path};
use super::service::{Conditions, Service};
use crate::failure::{ErrorKind, Failure};
use crate::id::{ClaimId, TenantId};
use crate::request::Request;
use crate::view::{ClaimView, View};

/// `org.gpuward1.Claim`
pub(super) struct Claim {
    pub(super) service: Arc<Service>,
    pub(super) id: ClaimId,
}

impl Claim {
    fn of<T: Default>(&self, fact: impl FnOnce(&ClaimView) -> T) -> T {
        self.service.view().claims.get(&self.id).map(fact).unwrap_or_default()
    }

    async fn check(&self, header: &Header<'_>, action: Action) -> Result<Caller, Failure> {
        self.service.check_own(header, (action, self.belongs(&self.service.view())), &self.id.to_string()).await
    }
}

impl Owned for Claim {
    fn belongs(&self, view: &View) -> Belongs {
        Belongs::ToTenant(view.claims.get(&self.id).map(|claim| claim.tenant), None)
    }
}

#[interface(name = "org.gpuward1.Claim")]
impl Claim {
    /// The `<hostdev>` elements of its devices, for a libvirt domain. No options. Polkit action: `org.gpuward.inspect`.
    #[zbus(name = "GetHostdevXML", out_args("xml"))]
    async fn get_hostdev_xml(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<String, BusError> {
        self.check(&header, Action::Inspect).await?;
        Options::new(options)?.done()?;
        let devices = self.of(|claim| claim.devices.clone());
        let elements = devices.into_iter().map(hostdev_xml).collect::<Result<Vec<_>, Failure>>()?;
        Ok(elements.join("\n"))
    }

    /// Ends it: its devices are sanitised and free then, or in quarantine with the reason. A device that has left the host goes into
    /// quarantine, so that it is looked at before anybody gets it when it is back.
    ///
    /// Options: `epoch` (t, required: as its property; with another one Conflict, and nothing is done), `request-id` (s),
    /// `if-generation` (t). Refusals: Conflict (also for a machine's: stop the machine), Held with who holds it, Busy, Quarantined.
    ///
    /// Polkit action: `org.gpuward.manage-machines`.
    #[zbus(out_args("job"))]
    async fn release(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let caller = self.check(&header, Action::ManageMachines).await?;
        let mut options = Options::new(options)?;
        let (epoch, conditions) = (options.number("epoch")?, Conditions::take(&mut options)?);
        options.done()?;
        let missing = || Failure::new(ErrorKind::InvalidSpec, "option epoch is missing").remedy("give the claim's Epoch as you know it");
        let request = Request::ReleaseClaim { claim: self.id, epoch: epoch.ok_or_else(missing)? };
        self.service.submit(caller, request, conditions).await
    }

    /// Whose it is.
    #[zbus(property(emits_changed_signal = "const"))]
    fn tenant(&self) -> Path {
        paths::tenant(self.of(|claim| Some(claim.tenant)).unwrap_or(TenantId::BUILT_IN))
    }

    /// The machine it is for; `/` where it is for none.
    #[zbus(property(emits_changed_signal = "const"))]
    fn machine(&self) -> Path {
        self.of(|claim| claim.machine).map_or_else(paths::none, paths::machine)
    }

    /// UUID of the libvirt domain that may use its devices.
    #[zbus(property(emits_changed_signal = "const"), name = "DomainUUID")]
    fn domain_uuid(&self) -> String {
        self.of(|claim| claim.domain).to_string()
    }

    /// pending (its devices are being taken), active, releasing (it ends as soon as nobody holds them), or gone (one of its devices has
    /// left the host; it can be released). The set may grow.
    #[zbus(property)]
    fn state(&self) -> &'static str {
        self.of(|claim| claim.state).word()
    }

    /// Why it is in that state: what is in the way of its end, or what has left; empty where the state says it all.
    #[zbus(property)]
    fn reason(&self) -> String {
        self.of(|claim| claim.reason.clone())
    }

    /// What ends it: `machine` (with its machine), `manual`, `domain-stopped` or `client-gone`. The set may grow.
    #[zbus(property(emits_changed_signal = "const"))]
    fn release_on(&self) -> &'static str {
        self.of(|claim| claim.release_on)
    }

    /// When it ends in any case, in seconds since 1970; 0: never.
    #[zbus(property(emits_changed_signal = "const"))]
    fn expires(&self) -> u64 {
        self.of(|claim| claim.expires)
    }

    /// Its devices, in the order they bind.
    #[zbus(property(emits_changed_signal = "const"))]
    fn devices(&self) -> Vec<Path> {
        self.of(|claim| claim.devices.clone()).into_iter().map(paths::device).collect()
    }

    /// What keeps its user apart from others: `whole-gpu` or `vf`. The set may grow.
    #[zbus(property(emits_changed_signal = "const"))]
    fn isolation_level(&self) -> &'static str {
        self.of(|claim| claim.isolation_level)
    }

    /// When it was made, in seconds since 1970.
    #[zbus(property(emits_changed_signal = "const"))]
    fn since(&self) -> u64 {
        self.of(|claim| claim.since)
    }

    /// Grows with each claim ever made on this host.
    #[zbus(property(emits_changed_signal = "const"))]
    fn epoch(&self) -> u64 {
        self.of(|claim| claim.epoch)
    }
}
