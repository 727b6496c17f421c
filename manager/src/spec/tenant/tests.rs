use super::*;

const ACME: &str = r#"
format = 1
name = "acme"
owners = { users = [1001], groups = [2001, 2002] }
minimum-isolation = "vf"
share-gpu = "any"
networks = ["acme-net"]
pools = ["tank"]
[quota]
gpus = 4
machines = 8
vcpus = "unlimited"
memory = "512GiB"
"#;

fn parse(text: &str) -> Result<TenantSpec, Failure> {
    TenantSpec::parse(Node::from_toml(text).unwrap()).map(|(_, spec)| spec)
}

fn machine(text: &str) -> MachineSpec {
    let text = format!("format = 1\nname = \"a\"\nvcpus = 1\nmemory = \"1GiB\"\n{text}");
    MachineSpec::parse(Node::from_toml(&text).unwrap()).unwrap()
}

#[test]
fn a_missing_quota_key_allows_nothing_and_no_limit_takes_the_word() {
    let quota = parse(ACME).unwrap().quota;
    assert_eq!((quota.gpus, quota.vfs, quota.vcpus), (Limit::AtMost(4), Limit::AtMost(0), Limit::Unlimited));
    assert_eq!(quota.memory, Limit::AtMost(512 << 30));
    let bare = parse("format = 1\nname = 'bare'").unwrap();
    assert!(bare.quota.entries().iter().all(|(_, limit)| *limit == Limit::AtMost(0)));
    assert_eq!((bare.trust_domain.as_str(), bare.minimum_isolation), ("bare", Isolation::WholeGpu));
    assert_eq!((bare.networks, bare.pools), (Names::These(BTreeSet::new()), Names::These(BTreeSet::new())));
}

#[test]
fn what_is_wrong_is_named_by_its_path() {
    let cases = [
        ("name = 'Acme'", "name is \"Acme\"; it takes 1 to 63 of a-z, 0-9 and -, not - first"),
        ("name = 'a'\n[owners]\nusers = [-1]", "owners.users has -1; it takes ids from 0 to 4294967294"),
        ("name = 'a'\n[owners]\nusers = ['alice']", "owners.users has \"alice\"; the bus takes ids, `gpuward tenant` resolves names"),
        ("name = 'a'\nnetworks = ['a/b']", "networks has \"a/b\", which is no name"),
        ("name = 'a'\npools = 'tank'", "pools is text; it takes a list"),
        ("name = 'a'\n[quota]\ngpus = 'many'", "quota.gpus is text; it takes an integer"),
        ("name = 'a'\n[quota]\ngpu = 1", "quota.gpu is no key of a specification"),
        ("name = 'a'\nshare-gpu = 'sometimes'", "share-gpu is \"sometimes\"; it takes own-trust-domain, never, any"),
    ];
    for (text, message) in cases {
        let failure = parse(&format!("format = 1\n{text}")).unwrap_err();
        assert_eq!((failure.kind, failure.message.as_str()), (ErrorKind::InvalidSpec, message));
    }
}

#[test]
fn a_device_is_shared_only_where_both_tenants_agree() {
    let tenant = |name: &str, share: &str, domain: &str| {
        parse(&format!("format = 1\nname = '{name}'\nshare-gpu = '{share}'\ntrust-domain = '{domain}'")).unwrap()
    };
    let (open, closed) = (tenant("open", "any", "one"), tenant("closed", "never", "one"));
    let (near, far) = (tenant("near", "own-trust-domain", "one"), tenant("far", "own-trust-domain", "two"));
    assert!(open.may_share_with(&near) && near.may_share_with(&open));
    assert!(!near.may_share_with(&far) && !open.may_share_with(&far), "far shares with its own alone");
    assert!(!open.may_share_with(&closed) && !closed.may_share_with(&near));
}

#[test]
fn a_machine_may_name_only_what_is_its_tenants() {
    let acme = parse(ACME).unwrap();
    let own = machine("[[disk]]\nvolume = 'tank/a'\n[[network]]\nnetwork = 'acme-net'");
    assert_eq!(acme.may_name(&own), Ok(()));
    let foreign = machine("[[disk]]\nvolume = 'tank/a'\n[[disk]]\nvolume = 'others/a'");
    let failure = acme.may_name(&foreign).unwrap_err();
    assert_eq!(failure.message, "disk[1].volume names \"others\", which is not among the pools of tenant acme");
    assert_eq!(failure.why, ["its pools are: tank"]);
    let network = machine("[[disk]]\nvolume = 'tank/a'\n[[network]]\nnetwork = 'default'");
    assert_eq!(acme.may_name(&network).unwrap_err().kind, ErrorKind::NotAuthorized);
    assert_eq!(TenantSpec::built_in().may_name(&foreign), Ok(()));
}

#[test]
fn an_owner_is_one_by_user_or_by_any_group() {
    let acme = parse(ACME).unwrap();
    assert!(acme.is_owned_by(1001, &[]) && acme.is_owned_by(5, &[7, 2002]));
    assert!(!acme.is_owned_by(5, &[7]) && !TenantSpec::built_in().is_owned_by(1001, &[2001]));
}
