use std::collections::BTreeMap;

use super::*;
use crate::libvirt::Backing;
use crate::spec::Node;

fn tenant(pools: &str) -> TenantSpec {
    TenantSpec::parse(Node::from_toml(&format!("format = 1\nname = 'acme'\npools = [{pools}]\n")).unwrap()).unwrap().1
}

fn machine(disk: &str) -> MachineSpec {
    let text = format!("format = 1\nname = 'a'\nvcpus = 1\nmemory = '1GiB'\n[[disk]]\n{disk}\n");
    MachineSpec::parse(Node::from_toml(&text).unwrap()).unwrap()
}

fn volume(at: &str, format: &str, backing: Option<(&str, &str)>) -> Volume {
    let (pool, name) = at.split_once('/').unwrap();
    let backing = backing.map(|(path, format)| Backing { path: path.into(), format: format.into() });
    let path = format!("/{at}");
    Volume { pool: pool.into(), name: name.into(), path, kind: "file".into(), format: format.into(), backing }
}

fn judged(disk: &str, chain: Chain) -> Result<Vec<BackedBy>, Failure> {
    let chains: BTreeMap<(String, String), Chain> = [(("tank".to_owned(), "a".to_owned()), chain)].into();
    let ask = |pool: &str, volume: &str| Ok(chains[&(pool.to_owned(), volume.to_owned())].clone());
    backing_by(&ask, &machine(disk), &tenant("'tank', 'golden'"))
}

const QCOW2: &str = "volume = 'tank/a'\nformat = 'qcow2'";

#[test]
fn a_chain_in_the_tenants_pools_is_given_as_it_was_judged() {
    let chain = [
        volume("tank/a", "qcow2", Some(("/tank/b", "qcow2"))),
        volume("tank/b", "qcow2", Some(("/golden/c", "raw"))),
        volume("golden/c", "qcow2", None),
    ];
    let link = |path: &str, format| Link { path: path.into(), block: false, format };
    let found = judged(QCOW2, Chain::Whole(chain.into())).unwrap();
    assert_eq!(found, [Some(vec![link("/tank/b", DiskFormat::Qcow2), link("/golden/c", DiskFormat::Raw)])]);
    assert_eq!(judged(QCOW2, Chain::Whole(vec![volume("tank/a", "qcow2", None)])).unwrap(), [Some(vec![])]);
}

#[test]
fn what_backs_a_raw_disk_is_not_read_by_anybody() {
    assert_eq!(judged("volume = 'tank/a'", Chain::Stray).unwrap(), [Some(vec![])]);
    let stops = [
        volume("tank/a", "qcow2", Some(("/tank/b", "raw"))),
        volume("tank/b", "qcow2", Some(("/tank/c", "qcow2"))),
        volume("tank/c", "qcow2", None),
    ];
    assert_eq!(judged(QCOW2, Chain::Whole(stops.into())).unwrap()[0].as_ref().unwrap().len(), 1);
}

#[test]
fn an_administrators_path_is_left_to_libvirt() {
    assert_eq!(judged("path = '/srv/a'", Chain::Absent).unwrap(), [None]);
}

#[test]
fn what_is_another_tenants_and_what_is_no_volume_are_refused_alike() {
    let foreign = [volume("tank/a", "qcow2", Some(("/rival/secret", "raw"))), volume("rival/secret", "raw", None)];
    let foreign = judged(QCOW2, Chain::Whole(foreign.into())).unwrap_err();
    let stray = judged(QCOW2, Chain::Stray).unwrap_err();
    assert_eq!(
        (foreign.kind, foreign.message.as_str()),
        (ErrorKind::PreflightFailed, "disk[0].volume tank/a is backed by what is not in a pool of the tenant's")
    );
    assert_eq!((foreign.message, foreign.why, foreign.remedy), (stray.message, stray.why, stray.remedy));
}

#[test]
fn a_volume_that_is_not_what_the_disk_says_is_refused() {
    let said = |chain| judged(QCOW2, chain).unwrap_err().message;
    assert_eq!(said(Chain::Absent), "disk[0].volume tank/a is not there");
    let raw = said(Chain::Whole(vec![volume("tank/a", "raw", None)]));
    assert_eq!(raw, "disk[0].volume tank/a is to be read as qcow2, and libvirt says it is \"raw\"");
    let far = [volume("tank/a", "qcow2", Some(("/tank/b", "raw"))), Volume { kind: "network".into(), ..volume("tank/b", "raw", None) }];
    assert_eq!(said(Chain::Whole(far.into())), "disk[0].volume tank/a is backed by a network of format \"raw\"");
}
