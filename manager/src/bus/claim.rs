//! Claims.

use std::sync::Arc;

use zbus::interface;
use zbus::message::Header;

use super::authority::Action;
use super::device::hostdev_xml;
use super::dict::{Options, Received};
use super::error::BusError;
use super::paths::{self, Path};
use super::service::Service;
use crate::failure::Failure;
use crate::id::{ClaimId, TenantId};
use crate::view::ClaimView;

/// `org.gpuward1.Claim`
pub(super) struct Claim {
    pub(super) service: Arc<Service>,
    pub(super) id: ClaimId,
}

impl Claim {
    fn of<T: Default>(&self, fact: impl FnOnce(&ClaimView) -> T) -> T {
        self.service.view().claims.get(&self.id).map(fact).unwrap_or_default()
    }
}

#[interface(name = "org.gpuward1.Claim")]
impl Claim {
    /// The `<hostdev>` elements of its devices, for a libvirt domain. No options. Polkit action: `org.gpuward.inspect`.
    #[zbus(name = "GetHostdevXML", out_args("xml"))]
    async fn get_hostdev_xml(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<String, BusError> {
        self.service.check(&header, Action::Inspect, &self.id.to_string()).await?;
        Options::new(options)?.done()?;
        let devices = self.of(|claim| claim.devices.clone());
        let elements = devices.into_iter().map(hostdev_xml).collect::<Result<Vec<_>, Failure>>()?;
        Ok(elements.join("\n"))
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

    /// UUID of the libvirt domain it is for; empty where it is for none.
    #[zbus(property(emits_changed_signal = "const"), name = "DomainUUID")]
    fn domain_uuid(&self) -> String {
        self.of(|claim| claim.machine).map(|machine| machine.0.to_string()).unwrap_or_default()
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
