//! The golden domains against the libvirt of this host: its schema, and its test driver.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use virt::connect::Connect;

fn goldens() -> Vec<(String, PathBuf)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../xml-templates/golden");
    let mut found: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found.into_iter().map(|path| (fs::read_to_string(&path).unwrap(), path)).collect()
}

fn is_domain(xml: &str) -> bool {
    xml.contains("<domain ")
}

#[test]
fn golden_domains_are_valid_by_this_hosts_schema() {
    let mut checked = 0;
    for (xml, path) in goldens() {
        if !is_domain(&xml) {
            continue;
        }
        let run = Command::new("virt-xml-validate").arg(&path).arg("domain").output();
        let output = run.expect("virt-xml-validate is missing; `make test` installs it (libvirt-clients, libxml2-utils)");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", path.display());
        checked += 1;
    }
    assert!(checked >= 6, "only {checked} golden domains were found");
}

// The test driver takes only domains of its own type, so the type alone is changed; firmware is a matter for QEMU's driver.
#[test]
fn golden_domains_are_understood_by_libvirts_test_driver() {
    let connection = Connect::open(Some("test:///default")).unwrap();
    for (xml, path) in goldens() {
        if !is_domain(&xml) || xml.contains("qemu:commandline") {
            continue;
        }
        let xml = xml.replace("type='kvm'", "type='test'").replace("type='qemu'>", "type='test'>").replace("machine='q35'", "");
        let xml = xml.replace(" firmware='efi'", "").replace("arch='x86_64'", "arch='i686'");
        let domain = connection.define_domain_xml(&xml).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let back = domain.xml_desc(0).unwrap();
        assert_eq!(back.matches("<hostdev ").count(), xml.matches("<hostdev ").count(), "{}", path.display());
        assert_eq!(back.matches("ua-gw-").count(), xml.matches("ua-gw-").count(), "{}: aliases are kept", path.display());
        assert_eq!(back.contains("gpuward:machine"), xml.contains("gpuward:machine"), "{}: metadata are kept", path.display());
        domain.undefine().unwrap();
    }
}
