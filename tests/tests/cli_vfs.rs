//! Virtual functions and the doctor as a person and a program meet them: the command, the bus, the real daemon, a simulated host.
#![allow(clippy::expect_used)]

use std::process::Output;

use tests::session::Session;
use tests::simhost::{SimHost, SimRoot};
use tests::typed::{self, json};

const GPU: &str = "0000:26:00.0";

fn l40s() -> Session {
    typed::session("l40s-vgpu", env!("CARGO_BIN_EXE_gpuward-sim"))
}

fn run(session: &Session, arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = typed::run(session, arguments);
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (status.code(), text(stdout), text(stderr))
}

fn set_by_bus(session: &Session, count: &str) -> Output {
    let object = "/org/gpuward1/device/pci_0000_26_00_0";
    let call = ["call", "org.gpuward1", object, "org.gpuward1.Sriov", "SetVfCount", "ua{sv}", count, "0"];
    session.command("busctl").arg(format!("--address={}", session.address())).args(call).output().expect("runs")
}

#[test]
fn virtual_functions_are_listed_planned_taken_away_and_made() {
    let session = l40s();
    let (status, _, why) = run(&session, &["vfs", "set", GPU, "0"]);
    assert!(status == Some(3) && why.contains("are made by NVIDIA's tool only, which is missing"), "{status:?} {why}");
    SimHost::at(SimRoot::Kept(session.root().to_owned())).set("usr/lib/nvidia/sriov-manage", "#!/bin/sh").expect("laid");
    let listing = json(&session, &["vfs"]);
    assert_eq!(listing["virtual-functions"].as_array().map(Vec::len), Some(32));
    let (status, plan, _) = run(&session, &["plan", "vfs", GPU, "0"]);
    assert!(status == Some(0) && plan.contains("sriov_numvfs") && plan.contains("`gpuward vfs set 0000:26:00.0 0` applies this"), "{plan}");
    let (status, said, why) = run(&session, &["vfs", "set", GPU, "0"]);
    assert!(status == Some(0) && said.starts_with("0000:26:00.0 has 0 virtual functions (job "), "{said}{why}");
    let (_, table, _) = run(&session, &["vfs"]);
    assert!(table.contains("0 of 32") && table.lines().count() == 2, "{table}");
    let made = set_by_bus(&session, "32");
    assert!(String::from_utf8_lossy(&made.stdout).contains("/org/gpuward1/job/"), "{}", String::from_utf8_lossy(&made.stderr));
    let many = set_by_bus(&session, "65536");
    assert!(String::from_utf8_lossy(&many.stderr).contains("65536 is more virtual functions than any device can have"));
}

#[test]
fn the_doctor_is_asked_over_the_bus_and_of_a_tree() {
    let session = l40s();
    let findings = json(&session, &["doctor"]);
    let checks: Vec<_> = findings["findings"].as_array().expect("a list").iter().filter_map(|finding| finding["check"].as_str()).collect();
    assert!(checks.contains(&"iommu") && checks.contains(&"kvm"), "{checks:?}");
    assert_eq!(run(&session, &["doctor"]).0, Some(0), "warnings are no problem");
    let root = SimRoot::temporary("no-iommu").expect("laid");
    let (status, text, _) = run(&session, &["doctor", "--root", root.path().to_str().expect("UTF-8")]);
    assert_eq!(status, Some(1));
    assert!(text.starts_with("problem  the kernel runs without an IOMMU"), "{text}");
}
