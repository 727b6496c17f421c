//! Tenants.

use std::sync::Arc;

use zbus::Variant;
use zbus::interface;
use zbus::message::Header;

use super::authority::Action;
use super::dict::{Dict, Options, Received, tree_of};
use super::error::BusError;
use super::guard::{Belongs, Owned};
use super::manager::{Answer, machines_of};
use super::paths::Path;
use super::service::{Conditions, Service};
use crate::failure::{ErrorKind, Failure};
use crate::id::TenantId;
use crate::request::{Request, TenantChange};
use crate::spec::{Limit, TenantSpec, UNLIMITED};
use crate::view::{TenantView, View};

/// `org.gpuward1.Tenant`
pub(super) struct Tenant {
    pub(super) service: Arc<Service>,
    pub(super) id: TenantId,
}

impl Tenant {
    fn of<T: Default>(&self, fact: impl FnOnce(&TenantView) -> T) -> T {
        self.service.view().tenants.get(&self.id).map(fact).unwrap_or_default()
    }
}

impl Owned for Tenant {
    fn belongs(&self, _view: &View) -> Belongs {
        Belongs::ToTenant(Some(self.id), None)
    }
}

#[interface(name = "org.gpuward1.Tenant")]
impl Tenant {
    /// Gives it another specification: what is left out gets its default, so give all that is to stay. Machines that run go on; what they
    /// may be is asked again at their next start. What exceeds a lowered quota stays, and nothing is added to it.
    ///
    /// The keys are those of `Manager.CreateTenant`; `name` has to be its own. Options: `request-id` (s), `if-generation` (t).
    /// Refusals: InvalidSpec, HostNotReady, Conflict, TooMany. Polkit action: `org.gpuward.manage-tenants`.
    #[zbus(out_args("job"))]
    async fn set_policy(&self, spec: Received, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let caller = self.service.check(&header, Action::ManageTenants, &self.id.to_string()).await?;
        let conditions = Conditions::only(options)?;
        let (id, spec) = TenantSpec::parse(tree_of(&spec)?)?;
        if id.is_some_and(|id| id != self.id) {
            let failure = Failure::new(ErrorKind::InvalidSpec, "uuid is that of another tenant");
            return Err(failure.remedy("leave it out").into());
        }
        self.service.submit(caller, Request::Tenant(TenantChange::Set { tenant: self.id, spec: Box::new(spec) }), conditions).await
    }

    /// Forgets it. Refused with Conflict, and what there is, while it has machines or claims.
    ///
    /// Options: `request-id` (s), `if-generation` (t). Polkit action: `org.gpuward.manage-tenants`.
    #[zbus(out_args("job"))]
    async fn remove(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let caller = self.service.check(&header, Action::ManageTenants, &self.id.to_string()).await?;
        self.service.submit(caller, Request::Tenant(TenantChange::Remove(self.id)), Conditions::only(options)?).await
    }

    /// Its machines, as `Manager.ListMachines` tells them. No options. Polkit action: `org.gpuward.inspect`; `org.gpuward.use-own` for owners.
    #[zbus(out_args("machines"))]
    async fn list_machines(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Vec<Answer>, BusError> {
        let belongs = self.belongs(&self.service.view());
        self.service.check_own(&header, (Action::Inspect, belongs), &self.id.to_string()).await?;
        Options::new(options)?.done()?;
        Ok(machines_of(&self.service.view(), |tenant| tenant == self.id))
    }

    /// Unique on the host.
    #[zbus(property(emits_changed_signal = "const"))]
    fn name(&self) -> String {
        self.of(|tenant| tenant.spec.name.clone())
    }

    /// Who may act for it: `users` (au: user ids) and `groups` (au: group ids).
    #[zbus(property)]
    fn owners(&self) -> Answer {
        let owners = self.of(|tenant| tenant.spec.owners.clone());
        let mut dict = Dict::new();
        dict.put("users", owners.users.into_iter().collect::<Vec<_>>()).put("groups", owners.groups.into_iter().collect::<Vec<_>>());
        dict.into_map()
    }

    /// Tenants of one domain trust each other.
    #[zbus(property)]
    fn trust_domain(&self) -> String {
        self.of(|tenant| tenant.spec.trust_domain.clone())
    }

    /// What it may have at most: `gpus`, `vfs`, `machines`, `vcpus` (t) and `memory` (t: bytes); `unlimited` (s) in place of a number. The
    /// set may grow.
    #[zbus(property)]
    fn quota(&self) -> Answer {
        let quota = self.of(|tenant| Some(tenant.spec.quota));
        let mut dict = Dict::new();
        for (key, limit) in quota.iter().flat_map(|quota| quota.entries()) {
            let value = match limit {
                Limit::AtMost(most) => Variant::from(most),
                Limit::Unlimited => Variant::from(UNLIMITED),
            };
            dict.put(key, value);
        }
        dict.into_map()
    }

    /// What it has: the keys of `Quota` (t). Claims count from before anything is done for them, machines while they are defined.
    #[zbus(property)]
    fn usage(&self) -> Answer {
        let mut dict = Dict::new();
        for (key, number) in self.of(|tenant| tenant.usage).entries() {
            dict.put(key, number);
        }
        dict.into_map()
    }

    /// The least isolation level that it accepts: `whole-gpu` or `vf`. The set may grow.
    #[zbus(property)]
    fn minimum_isolation(&self) -> &'static str {
        self.of(|tenant| Some(tenant.spec.minimum_isolation)).map_or("", |least| least.word())
    }

    /// With whom it shares a physical device of which each has a part: `never`, `own-trust-domain` or `any`.
    #[zbus(property)]
    fn share_gpu(&self) -> &'static str {
        self.of(|tenant| Some(tenant.spec.share_gpu)).map_or("", |share| share.word())
    }

    /// libvirt networks that its machines may be on; `*`: all, which only the built-in tenant has.
    #[zbus(property)]
    fn networks(&self) -> Vec<String> {
        self.of(|tenant| tenant.spec.networks.words())
    }

    /// libvirt storage pools that its machines may have volumes of; `*` as in `Networks`.
    #[zbus(property)]
    fn pools(&self) -> Vec<String> {
        self.of(|tenant| tenant.spec.pools.words())
    }

    /// The `Manager.Generation` in which it last changed.
    #[zbus(property)]
    fn generation(&self) -> u64 {
        self.of(|tenant| tenant.generation)
    }
}
