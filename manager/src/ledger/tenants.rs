//! Tenants in the ledger: what each has, and whether it may have more.

use std::collections::BTreeMap;

use super::{Isolation, Ledger};
use crate::failure::{ErrorKind, Failure};
use crate::id::TenantId;
use crate::spec::{MachineSpec, TenantSpec, Wish};

/// What a tenant has, or asks for: one number for each key of its quota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Claims on whole GPUs.
    pub gpus: u64,
    /// Claims on virtual functions.
    pub vfs: u64,
    /// Machines that are defined.
    pub machines: u64,
    /// Virtual CPUs of these.
    pub vcpus: u64,
    /// Bytes of RAM of these.
    pub memory: u64,
}

impl Usage {
    /// Every key with its number, in the quota's order.
    pub fn entries(&self) -> [(&'static str, u64); 5] {
        [("gpus", self.gpus), ("vfs", self.vfs), ("machines", self.machines), ("vcpus", self.vcpus), ("memory", self.memory)]
    }

    /// What a machine takes by being defined.
    pub fn of_machine(spec: &MachineSpec) -> Self {
        Self { machines: 1, vcpus: spec.vcpus.into(), memory: spec.memory, ..Self::default() }
    }

    /// What wishes take when they are met.
    pub fn of_wishes(wishes: &[Wish]) -> Self {
        let mut usage = Self::default();
        wishes.iter().for_each(|wish| usage.add_claims(wish.kind.isolation(), wish.count.into()));
        usage
    }

    fn add_claims(&mut self, isolation: Isolation, count: u64) {
        match isolation {
            Isolation::WholeGpu => self.gpus += count,
            Isolation::Vf => self.vfs += count,
        }
    }

    fn add(&mut self, other: &Self) {
        self.gpus += other.gpus;
        self.vfs += other.vfs;
        self.machines += other.machines;
        self.vcpus += other.vcpus;
        self.memory = self.memory.saturating_add(other.memory);
    }
}

/// The tenants of a ledger that nobody made any in.
pub(super) fn built_in() -> BTreeMap<TenantId, TenantSpec> {
    BTreeMap::from([(TenantId::BUILT_IN, TenantSpec::built_in())])
}

impl Ledger {
    /// A tenant.
    ///
    /// # Errors
    /// `NoSuchTenant`.
    pub fn tenant(&self, tenant: TenantId) -> Result<&TenantSpec, Failure> {
        let absent = || Failure::new(ErrorKind::NoSuchTenant, format!("there is no tenant {tenant} any more"));
        self.tenants.get(&tenant).ok_or_else(|| absent().remedy("`gpuward tenant list` shows the tenants there are"))
    }

    /// What a tenant has now: claims count from the moment they are recorded, before anything is done for them.
    pub fn usage(&self, tenant: TenantId) -> Usage {
        let mut usage = Usage::default();
        for claim in self.claims.values().filter(|claim| claim.tenant == tenant) {
            usage.add_claims(claim.isolation, 1);
        }
        for machine in self.machines.values().filter(|machine| machine.tenant == tenant) {
            usage.add(&Usage::of_machine(&machine.spec));
        }
        usage
    }

    /// Whether a tenant may have `more` than it has.
    ///
    /// # Errors
    /// `QuotaExceeded` with every key that would be.
    pub fn has_quota(&self, tenant: TenantId, more: &Usage) -> Result<(), Failure> {
        let spec = self.tenant(tenant)?;
        let has = self.usage(tenant);
        let mut wanted = has;
        wanted.add(more);
        let keys = spec.quota.entries().into_iter().zip(has.entries()).zip(wanted.entries()).zip(more.entries());
        // What is over already, since the quota was lowered, is no reason to refuse what takes none of it.
        let over = keys.filter(|(((limit, _), wanted), more)| more.1 > 0 && limit.1.is_exceeded_by(wanted.1));
        let lines: Vec<_> = over.map(|((((key, limit), has), _), more)| told(key, limit, (has.1, more.1))).collect();
        if lines.is_empty() {
            return Ok(());
        }
        let message = format!("tenant {} may not have so much", spec.name);
        let failure = lines.into_iter().fold(Failure::new(ErrorKind::QuotaExceeded, message), Failure::because);
        Err(failure.remedy("stop or remove what is not needed, or ask an administrator to raise the tenant's quota"))
    }
}

fn told(key: &str, limit: crate::spec::Limit, (has, more): (u64, u64)) -> String {
    let unit = if key == "memory" { " bytes" } else { "" };
    format!("quota.{key} is {limit}{unit}; {has} are in use, and this asks for {more} more")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::MachineId;
    use crate::ledger::MachineRecord;
    use crate::spec::{Limit, Node, Quota};
    use crate::view::MachineState;

    fn ledger(quota: Quota) -> (Ledger, TenantId) {
        let mut ledger = Ledger::default();
        let tenant = TenantId::random();
        ledger.tenants.insert(tenant, TenantSpec { name: "acme".into(), quota, ..TenantSpec::built_in() });
        (ledger, tenant)
    }

    fn quota(machines: u64, memory: u64) -> Quota {
        let none = Limit::AtMost(0);
        Quota { gpus: none, vfs: none, machines: Limit::AtMost(machines), vcpus: Limit::Unlimited, memory: Limit::AtMost(memory) }
    }

    fn machine() -> MachineSpec {
        let text = "format = 1\nname = 'a'\nvcpus = 2\nmemory = '1GiB'\n[[disk]]\nvolume = 'a/b'";
        MachineSpec::parse(Node::from_toml(text).unwrap()).unwrap()
    }

    fn add(ledger: &mut Ledger, tenant: TenantId) {
        let spec = machine();
        let record = MachineRecord { spec, tenant, state: MachineState::Off, reason: String::new() };
        ledger.machines.insert(MachineId::random(), record);
    }

    #[test]
    fn what_is_asked_for_has_to_fit_beside_what_is_there() {
        let (mut ledger, tenant) = ledger(quota(2, 1 << 30));
        assert_eq!(ledger.has_quota(tenant, &Usage::of_machine(&machine())), Ok(()));
        add(&mut ledger, tenant);
        add(&mut ledger, TenantId::BUILT_IN);
        assert_eq!(ledger.usage(tenant), Usage { machines: 1, vcpus: 2, memory: 1 << 30, ..Usage::default() });
        let failure = ledger.has_quota(tenant, &Usage::of_machine(&machine())).unwrap_err();
        assert_eq!(failure.kind, ErrorKind::QuotaExceeded);
        assert_eq!(failure.why, ["quota.memory is 1073741824 bytes; 1073741824 are in use, and this asks for 1073741824 more"]);
    }

    #[test]
    fn what_is_over_already_does_not_refuse_what_takes_none_of_it() {
        let (mut ledger, tenant) = ledger(quota(0, 0));
        add(&mut ledger, tenant);
        assert_eq!(ledger.has_quota(tenant, &Usage { vcpus: 1, ..Usage::default() }), Ok(()));
        assert!(ledger.has_quota(tenant, &Usage { gpus: 1, ..Usage::default() }).is_err());
    }
}
