//! `gpuward doctor` on simulated hosts: over the bus, of a tree, and of garbage.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;

use manager::doctor::{Severity, examine};
use tests::simhost::{SimHost, names};
use vfio::Inventory;

fn findings(host: &str) -> Vec<(Severity, String)> {
    let sim = SimHost::build(host).unwrap();
    let inventory = Inventory::observe(&sim.host(), 0);
    let wanted: BTreeSet<_> = inventory.devices.keys().copied().collect();
    let found = examine(&sim.host(), &inventory, &wanted);
    found.into_iter().map(|finding| (finding.severity, format!("{} {}", finding.check, finding.subject).trim().to_owned())).collect()
}

fn grave(host: &str) -> Vec<String> {
    findings(host).into_iter().filter(|(severity, _)| *severity == Severity::Problem).map(|(_, what)| what).collect()
}

#[test]
fn a_dgx_has_no_problem_and_a_host_without_iommu_has_one() {
    assert_eq!(grave("dgx-h100"), [] as [String; 0]);
    assert_eq!(grave("no-iommu")[0], "iommu");
}

#[test]
fn p28_who_shares_a_group_is_found_for_each_device() {
    let grave = grave("crowded-group");
    assert!(grave.iter().any(|what| what == "group-shared 0000:01:00.0"), "{grave:?}");
}

#[test]
fn every_host_can_be_examined() {
    for host in names() {
        let found = findings(host);
        assert!(found.iter().any(|(_, what)| what == "iommu"), "{host}: {found:?}");
    }
}
