use vfio::{Bar, Kind};

use super::*;
use crate::id::{ClaimId, MachineId, TenantId};
use crate::libvirt::hostdevs;
use crate::plan::tests::function;
use crate::spec::Node;

const HOST: HostFacts = HostFacts { domain_type: DomainType::Kvm, cpus: 64, memory: 1 << 40, libvirt: 12_009_000, address_bits: 46 };

fn spec(more: &str) -> MachineSpec {
    let text = format!(
        "format = 1\nname = \"a\"\nuuid = \"6f3f24d4-8e3c-4a54-9b1e-2f1d8c4e9a10\"\nvcpus = 4\nmemory = \"2GiB\"\n{more}
        [[disk]]\nvolume = \"tank/a\"\n[[network]]\nnetwork = \"acme\"\n"
    );
    MachineSpec::parse(Node::from_toml(&text).unwrap()).unwrap()
}

fn metadata() -> Metadata {
    let claims = [(ClaimId(Uuid::from_u128(7)), 41)].into();
    Metadata { machine: MachineId(spec("").uuid), tenant: TenantId::BUILT_IN, claims, request: "a <b>".into() }
}

fn gpu(gib: u64) -> Function {
    let mut gpu = function("0000:41:00.0", Kind::Gpu);
    gpu.bars = vec![Bar { index: 2, base: 0, size: gib << 30, memory: true, wide: true, prefetchable: true }];
    gpu
}

fn with(devices: &[Function]) -> Given<'_> {
    Given { devices, backing: &[] }
}

#[test]
fn what_backs_a_disk_is_said_to_the_end() {
    let chain = [Some(vec![Link { path: "/golden/b".into(), block: false, format: DiskFormat::Raw }])];
    let xml = domain_xml(&spec(""), Given { backing: &chain, ..Given::default() }, &metadata(), &HOST).unwrap();
    let backed = xml.split_once("<backingStore type='file'>").expect("said").1;
    assert!(backed.contains("<source file='/golden/b'/>") && backed.contains("<backingStore/>"), "{xml}");
    let alone = domain_xml(&spec(""), Given { backing: &[Some(vec![])], ..Given::default() }, &metadata(), &HOST).unwrap();
    assert_eq!(alone.matches("<backingStore").count(), 1, "nothing backs it, whatever its header says");
}

#[test]
fn a_domain_carries_what_it_is_recognised_by() {
    let xml = domain_xml(&spec(""), with(&[gpu(128)]), &metadata(), &HOST).unwrap();
    assert_eq!(Metadata::read(&xml), Some(metadata()));
    assert_eq!(hostdevs(&xml).unwrap(), [gpu(128).address]);
    assert!(xml.contains("<name>gpuward-6f3f24d4</name>") && xml.contains("managed='no'"), "{xml}");
    assert!(xml.contains("<log file='/var/lib/libvirt/gpuward/gpuward-6f3f24d4-serial.log'"), "{xml}");
}

#[test]
fn room_for_large_bars_is_made() {
    let hole = |devices: &[Function]| {
        let xml = domain_xml(&spec(""), with(devices), &metadata(), &HOST).unwrap();
        xml.contains("<pcihole64")
    };
    assert!(hole(&[gpu(128)]));
    assert!(!hole(&[gpu(1)]));
}

#[test]
fn emulation_does_not_pass_a_processor_through() {
    let mode = |domain_type| domain(&spec(""), Given::default(), &metadata(), &HostFacts { domain_type, ..HOST }).unwrap().cpu;
    assert_eq!(mode(DomainType::Kvm), Cpu::HostPassthrough);
    assert_eq!(mode(DomainType::Qemu), Cpu::Maximum);
}

#[test]
fn addresses_of_interfaces_stay_with_the_machine() {
    let mac = |uuid, index| derived_mac(Uuid::from_u128(uuid), index);
    assert_eq!(mac(1, 0), mac(1, 0));
    assert_ne!(mac(1, 0), mac(1, 1));
    assert_ne!(mac(1, 0), mac(2, 0));
}

#[test]
fn a_machine_larger_than_the_host_gets_no_domain() {
    let failure = domain_xml(&spec(""), Given::default(), &metadata(), &HostFacts { cpus: 2, ..HOST }).unwrap_err();
    assert_eq!(failure.message, "vcpus is 4; the host has 2 processors");
}
