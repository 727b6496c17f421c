//! A tenant's policy as lines of text, from a file and from the service alike, and names of users and groups as numbers.

use std::collections::HashMap;

use zbus::Variant;

use crate::client::{Record, Spec, to_json};
use crate::id::TenantId;
use crate::spec::{Limit, TenantSpec, UNLIMITED};

/// One key of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub key: &'static str,
    pub text: String,
}

/// Numbers of users' or groups' names, and names of their numbers.
struct Kind {
    key: &'static str,
    word: &'static str,
    id: fn(&str) -> Option<u32>,
    name: fn(u32) -> Option<String>,
}

const USERS: Kind = Kind {
    key: "users",
    word: "user",
    id: |name| uzers::get_user_by_name(name).map(|user| user.uid()),
    name: |id| uzers::get_user_by_uid(id).map(|user| user.name().to_string_lossy().into_owned()),
};
const GROUPS: Kind = Kind {
    key: "groups",
    word: "group",
    id: |name| uzers::get_group_by_name(name).map(|group| group.gid()),
    name: |id| uzers::get_group_by_gid(id).map(|group| group.name().to_string_lossy().into_owned()),
};

const QUOTA: [&str; 5] = ["quota.gpus", "quota.vfs", "quota.machines", "quota.vcpus", "quota.memory"];

/// The specification with ids in place of owners' names.
pub(super) fn resolve(text: &str) -> Result<String, String> {
    let mut table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(1, |span| text[..span.start].lines().count().max(1));
        format!("line {line}: {}", error.message())
    })?;
    if let Some(owners) = table.get_mut("owners").and_then(toml::Value::as_table_mut) {
        for kind in [USERS, GROUPS] {
            let ids = owners.get_mut(kind.key).and_then(toml::Value::as_array_mut);
            ids.into_iter().flatten().try_for_each(|owner| resolve_one(&kind, owner))?;
        }
    }
    Ok(table.to_string())
}

fn resolve_one(kind: &Kind, owner: &mut toml::Value) -> Result<(), String> {
    let Some(name) = owner.as_str() else { return Ok(()) };
    let id = (kind.id)(name).ok_or_else(|| format!("owners.{} has {name:?}: this host knows no such {}", kind.key, kind.word))?;
    *owner = i64::from(id).into();
    Ok(())
}

/// A policy out of a file.
pub(super) fn lines_of(spec: &TenantSpec) -> Vec<Line> {
    let line = |key, text: String| Line { key, text };
    let mut lines = vec![
        line("owners.users", called(&USERS, spec.owners.users.iter().copied())),
        line("owners.groups", called(&GROUPS, spec.owners.groups.iter().copied())),
        line("trust-domain", spec.trust_domain.clone()),
        line("minimum-isolation", spec.minimum_isolation.word().into()),
        line("share-gpu", spec.share_gpu.word().into()),
        line("networks", spec.networks.words().join(" ")),
        line("pools", spec.pools.words().join(" ")),
    ];
    let limits = QUOTA.into_iter().zip(spec.quota.entries());
    lines.extend(limits.map(|(key, (name, limit))| line(key, amount(name, limit))));
    lines
}

/// A policy as the service tells it.
pub(super) fn lines_told(record: &Record) -> Vec<Line> {
    let line = |key, text: String| Line { key, text };
    let (owners, quota) = (record.record("Owners"), record.record("Quota"));
    let mut lines = vec![
        line("owners.users", called(&USERS, ids(&owners, USERS.key))),
        line("owners.groups", called(&GROUPS, ids(&owners, GROUPS.key))),
        line("trust-domain", record.text("TrustDomain").into()),
        line("minimum-isolation", record.text("MinimumIsolation").into()),
        line("share-gpu", record.text("ShareGpu").into()),
        line("networks", record.texts("Networks").join(" ")),
        line("pools", record.texts("Pools").join(" ")),
    ];
    lines.extend(QUOTA.map(|key| line(key, limit_told(&quota, key.trim_start_matches("quota.")))));
    lines
}

/// Users and groups in one word each.
pub(super) fn owners_told(owners: &Record) -> String {
    let users = ids(owners, USERS.key).into_iter().map(|id| short(&USERS, id));
    let groups = ids(owners, GROUPS.key).into_iter().map(|id| format!("@{}", short(&GROUPS, id)));
    users.chain(groups).collect::<Vec<_>>().join(" ")
}

/// How much of a quota is used: `2 of 4`.
pub(super) fn used(usage: &Record, quota: &Record, key: &str) -> String {
    let has = usage.number(key).and_then(|number| u64::try_from(number).ok()).unwrap_or_default();
    format!("{} of {}", amount(key, Limit::AtMost(has)), limit_told(quota, key))
}

fn limit_told(quota: &Record, key: &str) -> String {
    match quota.number(key).and_then(|number| u64::try_from(number).ok()) {
        Some(most) => amount(key, Limit::AtMost(most)),
        None => quota.text(key).to_owned(),
    }
}

fn amount(key: &str, limit: Limit) -> String {
    const GIB: u64 = 1 << 30;
    match limit {
        Limit::AtMost(bytes) if key == "memory" && bytes > 0 && bytes % GIB == 0 => format!("{}GiB", bytes / GIB),
        Limit::AtMost(bytes) if key == "memory" && bytes > 0 && bytes % (1 << 20) == 0 => format!("{}MiB", bytes >> 20),
        Limit::AtMost(_) | Limit::Unlimited => limit.to_string(),
    }
}

fn ids(owners: &Record, key: &str) -> Vec<u32> {
    let list = owners.value(key).map(to_json);
    let numbers = list.as_ref().and_then(serde_json::Value::as_array).into_iter().flatten();
    numbers.filter_map(|number| u32::try_from(number.as_u64()?).ok()).collect()
}

fn called(kind: &Kind, ids: impl IntoIterator<Item = u32>) -> String {
    let called = |id| (kind.name)(id).map_or_else(|| id.to_string(), |name| format!("{name} ({id})"));
    ids.into_iter().map(called).collect::<Vec<_>>().join(" ")
}

fn short(kind: &Kind, id: u32) -> String {
    (kind.name)(id).unwrap_or_else(|| id.to_string())
}

/// The specification as the bus takes it, with every key.
pub(super) fn to_bus(id: Option<TenantId>, spec: &TenantSpec) -> Spec {
    let owners: HashMap<String, Variant<'static>> = HashMap::from([
        ("users".into(), spec.owners.users.iter().copied().collect::<Vec<u32>>().into()),
        ("groups".into(), spec.owners.groups.iter().copied().collect::<Vec<u32>>().into()),
    ]);
    let limit = |key: &str, limit: Limit| match limit {
        Limit::Unlimited => UNLIMITED.into(),
        Limit::AtMost(most) if key == "memory" => Variant::from(most),
        // What is no number of 32 bits was refused when the file was read.
        Limit::AtMost(most) => Variant::from(u32::try_from(most).unwrap_or(u32::MAX)),
    };
    let quota: HashMap<String, Variant<'static>> =
        spec.quota.entries().into_iter().map(|(key, most)| (key.to_owned(), limit(key, most))).collect();
    let mut sent = Spec::from([
        ("format".into(), 1_u32.into()),
        ("name".into(), spec.name.clone().into()),
        ("owners".into(), owners.into()),
        ("trust-domain".into(), spec.trust_domain.clone().into()),
        ("minimum-isolation".into(), spec.minimum_isolation.word().into()),
        ("share-gpu".into(), spec.share_gpu.word().into()),
        ("networks".into(), spec.networks.words().into()),
        ("pools".into(), spec.pools.words().into()),
        ("quota".into(), quota.into()),
    ]);
    if let Some(id) = id {
        sent.insert("uuid".into(), id.0.to_string().into());
    }
    sent
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Node;

    #[test]
    fn owners_are_known_by_name_and_sent_by_number() {
        let text = resolve("format = 1\nname = 'a'\n[owners]\nusers = ['root', 7]\ngroups = ['root']").unwrap();
        let (_, spec) = TenantSpec::parse(Node::from_toml(&text).unwrap()).unwrap();
        assert_eq!(spec.owners.users.iter().copied().collect::<Vec<_>>(), [0, 7]);
        assert_eq!(lines_of(&spec)[1].text, "root (0)");
        let unknown = resolve("[owners]\nusers = ['no-such-user-here']").unwrap_err();
        assert_eq!(unknown, "owners.users has \"no-such-user-here\": this host knows no such user");
    }

    #[test]
    fn amounts_are_short_where_they_are_round() {
        assert_eq!(amount("memory", Limit::AtMost(512 << 30)), "512GiB");
        assert_eq!(amount("memory", Limit::AtMost((512 << 30) + 1)), "549755813889");
        assert_eq!((amount("gpus", Limit::AtMost(4)), amount("vcpus", Limit::Unlimited)), ("4".into(), "unlimited".into()));
    }
}
