//! A tenant's specification out of a tree of values, and what follows from it.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::machine::{LARGEST, format, is_plain_name, name, uuid_of};
use super::node::{Table, invalid};
use super::{DiskSource, MachineSpec, NetworkSource, Node};
use crate::failure::{ErrorKind, Failure};
use crate::id::TenantId;
use crate::ledger::Isolation;

/// The most users, groups, networks or pools of one tenant.
const MOST_NAMES: usize = 64;
/// The word for a limit that is none, and for a list that has all.
pub(crate) const UNLIMITED: &str = "unlimited";

/// Who owns machines and claims, and what it may have. `docs/tenants.md` gives every key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct TenantSpec {
    /// `[a-z0-9][a-z0-9-]{0,62}`, unique on the host.
    pub name: String,
    /// Who may act for it.
    pub owners: Owners,
    /// Tenants of one domain trust each other.
    pub trust_domain: String,
    /// The least isolation that it accepts.
    pub minimum_isolation: Isolation,
    /// With whom it shares a physical device.
    pub share_gpu: ShareGpu,
    /// libvirt networks that its machines may be on.
    pub networks: Names,
    /// libvirt storage pools that its machines may have volumes of.
    pub pools: Names,
    /// What it may have at most.
    pub quota: Quota,
}

/// Who may act for a tenant, by number: names are resolved when a specification is applied.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Owners {
    /// User ids.
    pub users: BTreeSet<u32>,
    /// Group ids; a member's supplementary groups count.
    pub groups: BTreeSet<u32>,
}

/// With whom a tenant shares a physical device of which each has a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShareGpu {
    /// With tenants of its trust domain.
    OwnTrustDomain,
    /// With nobody.
    Never,
    /// With any tenant.
    Any,
}

impl ShareGpu {
    /// Its word on the bus.
    pub fn word(self) -> &'static str {
        match self {
            Self::OwnTrustDomain => "own-trust-domain",
            Self::Never => "never",
            Self::Any => "any",
        }
    }
}

/// Which networks or pools a tenant may name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Names {
    /// Whatever libvirt has: the built-in tenant's.
    All,
    /// These.
    These(BTreeSet<String>),
}

impl Names {
    /// Whether a name is among them.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::These(names) => names.contains(name),
        }
    }

    /// As on the bus: `*`, which no network or pool is called, for all.
    pub fn words(&self) -> Vec<String> {
        match self {
            Self::All => vec!["*".into()],
            Self::These(names) => names.iter().cloned().collect(),
        }
    }
}

/// What a tenant may have at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Quota {
    /// Claims on whole GPUs.
    pub gpus: Limit,
    /// Claims on virtual functions.
    pub vfs: Limit,
    /// Machines that are defined.
    pub machines: Limit,
    /// Virtual CPUs of these.
    pub vcpus: Limit,
    /// Bytes of RAM of these.
    pub memory: Limit,
}

impl Quota {
    /// Every key with its limit.
    pub fn entries(&self) -> [(&'static str, Limit); 5] {
        [("gpus", self.gpus), ("vfs", self.vfs), ("machines", self.machines), ("vcpus", self.vcpus), ("memory", self.memory)]
    }
}

/// How much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// Not more than so many.
    AtMost(u64),
    /// As much as there is.
    Unlimited,
}

impl Limit {
    /// Whether so many are too many.
    pub fn is_exceeded_by(self, wanted: u64) -> bool {
        match self {
            Self::AtMost(most) => wanted > most,
            Self::Unlimited => false,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(most) => most.fmt(f),
            Self::Unlimited => f.write_str(UNLIMITED),
        }
    }
}

impl TenantSpec {
    /// Takes a specification out of a tree, with the id that it asks for.
    ///
    /// # Errors
    /// `InvalidSpec` with the full path of the first key that is wrong, missing or unknown.
    pub fn parse(node: Node) -> Result<(Option<TenantId>, Self), Failure> {
        if node.size() > LARGEST {
            return Err(invalid(format!("the specification has more than {} KiB", LARGEST >> 10)));
        }
        let mut table = Table::new(String::new(), node)?;
        format(&mut table)?;
        let id = uuid_of(&mut table, "uuid")?.map(TenantId);
        let name = name(&mut table, "name")?.ok_or_else(|| table.missing("name"))?;
        let spec = Self {
            owners: owners(&mut table)?,
            trust_domain: self::name(&mut table, "trust-domain")?.unwrap_or_else(|| name.clone()),
            minimum_isolation: table.word("minimum-isolation", MINIMUM_ISOLATION)?,
            share_gpu: table.word("share-gpu", SHARE_GPU)?,
            networks: names(&mut table, "networks")?,
            pools: names(&mut table, "pools")?,
            quota: quota(&mut table)?,
            name,
        };
        table.finish()?;
        Ok((id, spec))
    }

    /// The tenant that is always there: the administrator's own, which nobody else owns and nothing limits.
    pub fn built_in() -> Self {
        let all = Limit::Unlimited;
        Self {
            name: TenantId::BUILT_IN_NAME.into(),
            owners: Owners::default(),
            trust_domain: TenantId::BUILT_IN_NAME.into(),
            minimum_isolation: Isolation::Vf,
            share_gpu: ShareGpu::OwnTrustDomain,
            networks: Names::All,
            pools: Names::All,
            quota: Quota { gpus: all, vfs: all, machines: all, vcpus: all, memory: all },
        }
    }

    /// Whether a user with these groups may act for it.
    pub fn is_owned_by(&self, uid: u32, groups: &[u32]) -> bool {
        self.owners.users.contains(&uid) || groups.iter().any(|group| self.owners.groups.contains(group))
    }

    /// Whether parts of one physical device may be this tenant's and another's: each has to agree.
    pub fn may_share_with(&self, other: &Self) -> bool {
        let agrees = |one: &Self, other: &Self| match one.share_gpu {
            ShareGpu::Never => false,
            ShareGpu::OwnTrustDomain => one.trust_domain == other.trust_domain,
            ShareGpu::Any => true,
        };
        agrees(self, other) && agrees(other, self)
    }

    /// Whether a machine names only what is the tenant's. Paths and bridges are for polkit to judge.
    ///
    /// # Errors
    /// `NotAuthorized` with the key, alike for what another tenant has and for what nobody has.
    pub fn may_name(&self, spec: &MachineSpec) -> Result<(), Failure> {
        for (index, network) in spec.networks.iter().enumerate() {
            if let NetworkSource::Network(name) = &network.source {
                self.is_among(&format!("network[{index}].network"), name, ("networks", &self.networks))?;
            }
        }
        for (index, disk) in spec.disks.iter().enumerate() {
            if let DiskSource::Volume { pool, .. } = &disk.source {
                self.is_among(&format!("disk[{index}].volume"), pool, ("pools", &self.pools))?;
            }
        }
        Ok(())
    }

    fn is_among(&self, key: &str, name: &str, (what, names): (&str, &Names)) -> Result<(), Failure> {
        if names.has(name) {
            return Ok(());
        }
        let shown: String = name.chars().take(64).collect();
        let message = format!("{key} names {shown:?}, which is not among the {what} of tenant {}", self.name);
        let theirs = names.words();
        let theirs = if theirs.is_empty() { "none".to_owned() } else { theirs.join(", ") };
        let failure = Failure::new(ErrorKind::NotAuthorized, message).because(format!("its {what} are: {theirs}"));
        Err(failure.remedy(format!("name one of these, or ask an administrator to add it to the tenant's {what}")))
    }
}

const MINIMUM_ISOLATION: &[(&str, Isolation)] = &[("whole-gpu", Isolation::WholeGpu), ("vf", Isolation::Vf)];
const SHARE_GPU: &[(&str, ShareGpu)] =
    &[("own-trust-domain", ShareGpu::OwnTrustDomain), ("never", ShareGpu::Never), ("any", ShareGpu::Any)];

fn owners(table: &mut Table) -> Result<Owners, Failure> {
    let Some(mut owners) = table.table("owners")? else { return Ok(Owners::default()) };
    let found = Owners { users: ids(&mut owners, "users")?, groups: ids(&mut owners, "groups")? };
    owners.finish().map(|()| found)
}

fn ids(table: &mut Table, key: &'static str) -> Result<BTreeSet<u32>, Failure> {
    let wrong = |table: &Table, node: &Node| match node {
        Node::Integer(number) => table.invalid(key, format!("has {number}; it takes ids from 0 to {}", u32::MAX - 1)),
        Node::Text(name) => table.invalid(key, format!("has {name:?}; the bus takes ids, `gpuward tenant` resolves names")),
        Node::Boolean(_) | Node::Bytes(_) | Node::List(_) | Node::Table(_) => table.invalid(key, "has what is no id"),
    };
    let id = |table: &Table, node: Node| match node {
        // All ones is no user's: setresuid(2).
        Node::Integer(number) => u32::try_from(number).ok().filter(|id| *id != u32::MAX).ok_or_else(|| wrong(table, &node)),
        Node::Text(_) | Node::Boolean(_) | Node::Bytes(_) | Node::List(_) | Node::Table(_) => Err(wrong(table, &node)),
    };
    let nodes = table.list(key, MOST_NAMES)?;
    nodes.into_iter().map(|node| id(table, node)).collect()
}

fn names(table: &mut Table, key: &'static str) -> Result<Names, Failure> {
    let nodes = table.list(key, MOST_NAMES)?;
    let name = |node: Node| match node {
        Node::Text(name) if is_plain_name(&name) => Ok(name),
        Node::Text(name) => Err(table.invalid(key, format!("has {:?}, which is no name", name.chars().take(64).collect::<String>()))),
        Node::Integer(_) | Node::Boolean(_) | Node::Bytes(_) | Node::List(_) | Node::Table(_) => {
            Err(table.invalid(key, "has what is no name"))
        }
    };
    nodes.into_iter().map(name).collect::<Result<_, _>>().map(Names::These)
}

// What has no key is not allowed.
fn quota(table: &mut Table) -> Result<Quota, Failure> {
    let nothing = Limit::AtMost(0);
    let Some(mut quota) = table.table("quota")? else {
        return Ok(Quota { gpus: nothing, vfs: nothing, machines: nothing, vcpus: nothing, memory: nothing });
    };
    let found = Quota {
        gpus: count(&mut quota, "gpus")?,
        vfs: count(&mut quota, "vfs")?,
        machines: count(&mut quota, "machines")?,
        vcpus: count(&mut quota, "vcpus")?,
        memory: memory(&mut quota)?,
    };
    quota.finish().map(|()| found)
}

fn count(table: &mut Table, key: &'static str) -> Result<Limit, Failure> {
    if table.is_text(key, UNLIMITED) {
        return Ok(Limit::Unlimited);
    }
    Ok(Limit::AtMost(table.number(key)?.unwrap_or(0).into()))
}

fn memory(table: &mut Table) -> Result<Limit, Failure> {
    if table.is_text("memory", UNLIMITED) {
        return Ok(Limit::Unlimited);
    }
    Ok(Limit::AtMost(table.size("memory")?.unwrap_or(0)))
}

#[cfg(test)]
mod tests;
