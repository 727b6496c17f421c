//! A host in any state: files missing, garbled, forbidden or replaced never stop a look at the others.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tests::simhost::SimHost;
use vfio::{Holders, Inventory};

/// What happens to one file.
#[derive(Clone, Debug)]
enum Harm {
    Remove,
    Write(Vec<u8>),
    Forbid,
    MakeDirectory,
    PointNowhere,
}

fn harm() -> impl Strategy<Value = Harm> {
    let text = prop_oneof![
        Just(b"0xffffffffffffffffffff\n".to_vec()),
        Just(b"-1".to_vec()),
        Just(b"\xff\xfe\0\x1b[31m".to_vec()),
        Just("9".repeat(5000).into_bytes()),
        proptest::collection::vec(any::<u8>(), 0..300),
    ];
    prop_oneof![Just(Harm::Remove), text.prop_map(Harm::Write), Just(Harm::Forbid), Just(Harm::MakeDirectory), Just(Harm::PointNowhere)]
}

fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() && !path.is_symlink() {
            files(&path, found);
        } else {
            found.push(path);
        }
    }
}

fn inflict(path: &Path, harm: &Harm) {
    if let Harm::Forbid = harm {
        // Does nothing where the path is a link to nowhere; root reads what it may not.
        return fs::set_permissions(path, fs::Permissions::from_mode(0o000)).unwrap_or_default();
    }
    fs::remove_file(path).unwrap();
    match harm {
        Harm::Remove | Harm::Forbid => {}
        Harm::Write(bytes) => fs::write(path, bytes).unwrap(),
        Harm::MakeDirectory => fs::create_dir(path).unwrap(),
        Harm::PointNowhere => symlink("../nowhere/0000:zz:00.9", path).unwrap(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_harmed_tree_is_still_looked_at(harms in proptest::collection::vec((any::<prop::sample::Index>(), harm()), 1..40)) {
        let sim = SimHost::build("workstation").unwrap();
        let mut found = Vec::new();
        files(sim.root(), &mut found);
        for (index, harm) in harms {
            let path = found.remove(index.index(found.len()));
            inflict(&path, &harm);
        }
        let inventory = Inventory::observe(&sim.host(), 1);
        for address in inventory.devices.keys() {
            let bundle = inventory.bundle(*address).unwrap();
            prop_assert!(bundle.devices.contains(address));
        }
        Holders::of(&sim.host(), inventory.devices.values());
    }
}

#[test]
fn a_field_that_is_garbage_is_named_and_the_others_are_read() {
    let sim = SimHost::build("workstation").unwrap();
    let before = Inventory::observe(&sim.host(), 1);
    let gpu = before.devices.values().find(|device| device.boot_vga).unwrap().clone();
    sim.set(format!("sys/bus/pci/devices/{}/numa_node", gpu.address), "many").unwrap();
    let after = Inventory::observe(&sim.host(), 2);
    let harmed = &after.devices[&gpu.address];
    assert_eq!((harmed.numa_node, &harmed.bars, &harmed.driver), (None, &gpu.bars, &gpu.driver));
    assert!(harmed.unreadable.iter().any(|line| line.starts_with("numa_node")), "{:?}", harmed.unreadable);
}

/// P73: a device that leaves while others stay.
#[test]
fn a_device_that_has_left_is_left_out() {
    let sim = SimHost::build("dgx-h100").unwrap();
    let gone = "0000:1b:00.0";
    fs::remove_file(sim.root().join("sys/bus/pci/devices").join(gone)).unwrap();
    let inventory = Inventory::observe(&sim.host(), 1);
    assert_eq!(inventory.devices.len(), 11);
    assert!(inventory.unreadable.is_empty(), "{:?}", inventory.unreadable);
}
