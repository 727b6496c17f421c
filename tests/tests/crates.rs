//! The one-way direction between the crates: any edge that `docs/design.md` does not draw fails here.
#![allow(clippy::expect_used)]

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{DependencyKind, MetadataCommand};

/// Crate, and the crates of ours it may stand on. The crate `gpuward-tests` uses everything and ships nothing.
const DRAWN: [(&str, &[&str]); 5] = [
    ("gpuward-vfio", &[]),
    ("gpuward-mdev", &["gpuward-vfio"]),
    ("gpuward-xml-templates", &["gpuward-vfio"]),
    ("gpuward-cc-launch", &["gpuward-vfio", "gpuward-xml-templates"]),
    ("gpuward-manager", &["gpuward-vfio", "gpuward-mdev", "gpuward-xml-templates", "gpuward-cc-launch"]),
];

/// Only the manager may know of time and the bus.
const MANAGER_ONLY: [&str; 5] = ["tokio", "zbus", "zbus_polkit", "virt", "virt-sys"];

fn edges() -> BTreeMap<String, BTreeSet<String>> {
    let metadata = MetadataCommand::new().no_deps().exec().expect("cargo metadata");
    let outside_tests = |kind| matches!(kind, DependencyKind::Normal | DependencyKind::Build);
    let of = |package: &cargo_metadata::Package| {
        package.dependencies.iter().filter(|edge| outside_tests(edge.kind)).map(|edge| edge.name.clone()).collect()
    };
    metadata.packages.iter().map(|package| (package.name.to_string(), of(package))).collect()
}

#[test]
fn crates_depend_only_as_the_design_draws() {
    let mut edges = edges();
    edges.remove("gpuward-tests").expect("the tests are a crate");
    let drawn: BTreeMap<_, BTreeSet<_>> =
        DRAWN.iter().map(|(from, to)| (from.to_string(), to.iter().map(|to| to.to_string()).collect())).collect();
    assert_eq!(edges.keys().collect::<Vec<_>>(), drawn.keys().collect::<Vec<_>>(), "a crate that the design does not draw");
    for (package, dependencies) in &edges {
        let ours: BTreeSet<_> = dependencies.iter().filter(|name| name.starts_with("gpuward-")).cloned().collect();
        assert!(ours.is_subset(&drawn[package]), "{package} stands on {:?}", ours.difference(&drawn[package]).collect::<Vec<_>>());
    }
}

#[test]
fn only_the_manager_knows_of_time_the_bus_and_libvirt() {
    let mut edges = edges();
    edges.remove("gpuward-tests");
    edges.remove("gpuward-manager");
    for (package, dependencies) in &edges {
        for crate_ in MANAGER_ONLY {
            assert!(!dependencies.contains(crate_), "{package} depends on {crate_}");
        }
    }
}

#[test]
fn nothing_stands_on_the_tests() {
    for (package, dependencies) in edges() {
        assert!(!dependencies.contains("gpuward-tests"), "{package} stands on the tests");
    }
}
