use vfio::{Bar, Function, Kind};

use super::*;
use crate::doctor::{IommuUnit, Readings};
use crate::libvirt::{Capabilities, DomainType};
use crate::plan::tests::{at, function};
use crate::spec::{Firmware, Node};

const GPU: &str = "0000:41:00.0";
const OTHER: &str = "0000:81:00.0";
const GIB: u64 = 1 << 30;

/// A start to which nothing speaks: an H100 on a host of two nodes that is as it should be.
#[derive(Clone)]
struct Start {
    spec: MachineSpec,
    devices: Vec<Function>,
    host: HostFacts,
    told: Told,
    facts: Facts,
}

fn spec(text: &str) -> MachineSpec {
    let text =
        format!("format = 1\nname = 'a'\nvcpus = 8\nmemory = '64GiB'\n{text}\n[[disk]]\nvolume = 'tank/a'\n[[device]]\nkind = 'gpu'\n");
    MachineSpec::parse(Node::from_toml(&text).unwrap()).unwrap()
}

fn bar(index: u8, size: u64) -> Bar {
    Bar { index, base: 0, size, memory: true, wide: true, prefetchable: true }
}

fn gpu(address: &str, node: u32) -> Function {
    Function {
        bars: vec![bar(0, 16 << 20), bar(2, 128 * GIB), bar(4, 32 << 20)],
        numa_node: Some(node),
        driver: Some("vfio-pci".into()),
        ..function(address, Kind::Gpu)
    }
}

fn node(id: u32) -> NumaNode {
    NumaNode { id, cpus: 56, free: Some(500 * GIB), hugepages: Vec::new() }
}

fn intel(name: &str, capability: u64) -> IommuUnit {
    IommuUnit { name: name.into(), capability: Some(capability), extended: Some(0b1000), features: None }
}

/// 48 bits: guest addresses, and page tables of four levels.
const BITS_48: u64 = 47 << 16 | 0b100 << 8;

impl Start {
    fn new() -> Self {
        let readings = Readings {
            release: "6.18.2-amd64".into(),
            iommus: vec![intel("dmar1", BITS_48)],
            dma_entry_limit: Some(65535),
            vfio_node: Some(true),
            libvirt_daemon: Some(("virtqemud".into(), Some(8 << 20), true)),
            ..Readings::default()
        };
        let facts = Facts {
            readings,
            available: Some(900 * GIB),
            nodes: vec![node(0), node(1)],
            container_mode: Some(0o666),
            units: [(at(GPU), "dmar1".to_owned()), (at(OTHER), "dmar1".to_owned())].into(),
            group_nodes: vec![at(GPU), at(OTHER)],
        };
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let can = Capabilities {
            emulator: "/usr/bin/qemu-system-x86_64".into(),
            version: Some(10_000_000),
            most_vcpus: Some(288),
            firmware: words(&["bios", "efi"]),
            secure_boot: true,
            cpu_modes: words(&["host-passthrough", "host-model", "maximum"]),
            host_devices: words(&["usb", "pci"]),
        };
        let host = HostFacts { domain_type: DomainType::Kvm, cpus: 112, memory: 1024 * GIB, libvirt: 11_003_000, address_bits: 46 };
        Self { spec: spec(""), devices: vec![gpu(GPU, 0)], host, told: Told::Can(can), facts }
    }

    fn can(&mut self) -> &mut Capabilities {
        match &mut self.told {
            Told::Can(can) => can,
            Told::Cannot(_) | Told::Unknown(_) => panic!("it is made with an answer"),
        }
    }

    fn findings(&self) -> Vec<Finding> {
        let Self { spec, devices, host, told, facts } = self;
        judge(Subject { spec, devices, host, told, facts })
    }

    /// What is found beside what is true of every machine with devices on a host of two nodes.
    fn ailments(&self) -> Vec<(&'static str, Severity)> {
        let always = [("numa-placement", Severity::Info), ("no-migration", Severity::Info)];
        let found = self.findings().into_iter().map(|finding| (finding.code, finding.severity));
        found.filter(|finding| !always.contains(finding)).collect()
    }
}

type Spoil = fn(&mut Start);

fn each_is_found_alone(severity: Severity, cases: &[(&str, Spoil)]) {
    for (code, spoil) in cases {
        let mut start = Start::new();
        spoil(&mut start);
        assert_eq!(start.ailments(), [(*code, severity)], "{:#?}", start.findings());
        let finding = start.findings().into_iter().find(|finding| finding.code == *code).unwrap();
        assert!(!finding.evidence.is_empty(), "{finding:?}");
        assert!(severity == Severity::Info || !finding.remedy.is_empty(), "{finding:?}");
    }
}

#[test]
fn a_start_to_which_nothing_speaks_has_only_what_is_true_of_all() {
    assert_eq!(Start::new().ailments(), []);
    let codes: Vec<_> = Start::new().findings().iter().map(|finding| finding.code).collect();
    assert_eq!(codes, ["numa-placement", "no-migration"]);
    assert_eq!(refusal(&Start::new().findings()), None);
}

#[test]
fn what_would_fail_is_an_error() {
    each_is_found_alone(
        Severity::Error,
        &[
            ("hypervisor", |start| start.told = Told::Cannot("no emulator".into())),
            ("firmware", |start| start.can().firmware = vec!["bios".into()]),
            ("firmware", |start| {
                start.spec = spec("firmware = 'uefi-secure'");
                start.can().secure_boot = false;
            }),
            ("cpu-mode", |start| start.can().cpu_modes = vec!["maximum".into()]),
            ("vcpus", |start| start.can().most_vcpus = Some(4)),
            ("free-memory", |start| start.facts.available = Some(64 * GIB - 1)),
            ("locked-memory", |start| start.facts.readings.libvirt_daemon = Some(("libvirtd".into(), Some(64 * GIB), false))),
            ("mmio-window", |start| start.host.address_bits = 37),
            ("iommu-width", |start| {
                start.spec.memory = 511 * GIB;
                start.spec.firmware = Firmware::Bios;
                start.facts.nodes[0].free = Some(600 * GIB);
                start.facts.readings.iommus = vec![intel("dmar1", 38 << 16 | 0b10 << 8)];
            }),
            ("dma-entry-limit", |start| start.facts.readings.dma_entry_limit = Some(66)),
            ("vfio-container", |start| start.facts.readings.vfio_node = Some(false)),
            ("vfio-node", |start| start.facts.group_nodes.clear()),
        ],
    );
}

#[test]
fn what_may_go_wrong_is_a_warning() {
    each_is_found_alone(
        Severity::Warning,
        &[
            ("emulation", |start| start.host.domain_type = DomainType::Qemu),
            ("variant-driver", |start| {
                start.devices[0].vfio_driver = "nvgrace-gpu-vfio-pci".into();
                start.host.libvirt = 9_000_000;
            }),
            ("host-devices", |start| start.can().host_devices = vec!["usb".into()]),
            ("free-memory", |start| start.facts.available = Some(64 * GIB)),
            ("mmio-window", |start| start.host.address_bits = 40),
            ("iommu-width", |start| start.facts.readings.iommus = vec![intel("dmar1", 38 << 16 | 0b10 << 8)]),
            ("dma-entry-limit", |start| start.facts.readings.dma_entry_limit = Some(67)),
            ("vfio-container", |start| start.facts.container_mode = Some(0o660)),
            ("huge-bars", |start| start.facts.readings.release = "6.12.57+deb13-amd64".into()),
            ("huge-bars", |start| start.can().version = Some(9_001_000)),
            ("numa-processors", |start| start.spec.vcpus = 57),
            ("numa-memory", |start| start.facts.nodes[0].free = Some(63 * GIB)),
            ("numa-devices", |start| start.devices.push(gpu(OTHER, 1))),
        ],
    );
}

#[test]
fn what_cannot_be_observed_says_so() {
    each_is_found_alone(
        Severity::Info,
        &[
            ("vcpus", |start| start.can().most_vcpus = None),
            ("huge-bars", |start| start.can().version = None),
            ("huge-bars", |start| start.facts.readings.release = "unknown".into()),
            ("free-memory", |start| start.facts.available = None),
            ("locked-memory", |start| start.facts.readings.libvirt_daemon = None),
            ("numa-memory", |start| start.facts.nodes[0].free = None),
            ("mmio-window", |start| start.host.domain_type = DomainType::Test),
            ("mmio-window", |start| start.devices[0].bars.clear()),
            ("iommu-width", |start| start.facts.units.clear()),
            ("iommu-width", |start| start.facts.readings.iommus.clear()),
            ("dma-entry-limit", |start| start.facts.readings.dma_entry_limit = None),
            ("vfio-container", |start| start.facts.readings.vfio_node = None),
            ("vfio-container", |start| start.facts.container_mode = None),
            ("vfio-node", |start| start.devices[0].driver = Some("nvidia".into())),
            ("hugepages", |start| start.facts.nodes[1].hugepages = vec![(GIB, 40)]),
        ],
    );
    let mut start = Start::new();
    start.told = Told::Unknown("no answer".into());
    assert_eq!(start.ailments(), [("hypervisor", Severity::Info), ("huge-bars", Severity::Info)]);
}

/// P77, P78: at 46 bits OVMF's window is 8 TiB.
#[test]
fn large_boards_are_told_to_ovmf_and_refused_where_their_window_does_not_fit() {
    let board = |count: u8, size: u64, bits: u32| {
        let mut start = Start::new();
        start.host.address_bits = bits;
        start.devices = (0..count).map(|bus| Function { bars: vec![bar(2, size)], ..gpu(&format!("0000:{bus:02x}:00.0"), 0) }).collect();
        let window = start.findings().into_iter().find(|finding| finding.code == "mmio-window");
        window.map(|finding| finding.severity)
    };
    assert_eq!(board(8, 128 * GIB, 46), None);
    assert_eq!(board(8, 512 * GIB, 46), None);
    assert_eq!(board(16, 512 * GIB, 46), Some(Severity::Warning));
    assert_eq!(board(8, 128 * GIB, 42), Some(Severity::Warning));
    assert_eq!(board(8, 128 * GIB, 41), Some(Severity::Error));
    assert_eq!(board(2, u64::MAX, 52), Some(Severity::Error));
}

/// Bits 11 to 10 of AMD's extended features, the register at another place in each generation of the kernel.
#[test]
fn the_width_of_an_amd_iommu_is_read_as_its_kernel_writes_it() {
    let width = |features: &str, release: &str| {
        let mut start = Start::new();
        start.facts.readings.release = release.into();
        start.spec.memory = 300 << 40;
        let unit = IommuUnit { name: "dmar1".into(), capability: None, extended: None, features: Some(features.into()) };
        start.facts.readings.iommus = vec![unit];
        start.findings().into_iter().find(|finding| finding.code == "iommu-width").map(|finding| finding.severity)
    };
    assert_eq!(width("800", "5.10.0"), None, "six levels");
    assert_eq!(width("0", "5.10.0"), Some(Severity::Error), "four levels");
    assert_eq!(width("c00", "5.10.0"), Some(Severity::Info), "reserved: not known");
    assert_eq!(width("400:0", "6.6.1"), Some(Severity::Error), "the second is the one");
    assert_eq!(width("400:0", "6.12.1"), None, "the first is the one, with five levels");
    assert_eq!(width("x:0", "6.12.1"), Some(Severity::Info));
}

#[test]
fn the_narrower_of_an_intel_iommus_two_widths_counts() {
    let width = |capability: u64| {
        let mut start = Start::new();
        start.spec.memory = 1 << 42;
        start.facts.readings.iommus = vec![intel("dmar1", capability)];
        start.findings().into_iter().find(|finding| finding.code == "iommu-width").map(|finding| finding.severity)
    };
    assert_eq!(width(BITS_48), None);
    assert_eq!(width(38 << 16 | 0b110 << 8), Some(Severity::Error));
    assert_eq!(width(47 << 16 | 0b010 << 8), Some(Severity::Error));
    assert_eq!(width(56 << 16 | 0b1100 << 8), None);
}

#[test]
fn only_what_is_pinned_has_to_fit_now() {
    let mut start = Start::new();
    start.devices.clear();
    start.spec.devices.clear();
    start.facts = Facts { available: Some(GIB), ..Facts::default() };
    assert_eq!(start.ailments(), [("free-memory", Severity::Warning)]);
}

/// GB200: P89.
#[test]
fn a_node_without_processors_is_no_fault() {
    let mut start = Start::new();
    start.facts.nodes[0].cpus = 0;
    assert_eq!(start.ailments(), [("numa-processors", Severity::Info)]);
    start.devices[0].numa_node = None;
    let finding = start.findings().into_iter().find(|finding| finding.code == "numa-node").unwrap();
    assert_eq!((finding.severity, finding.subject.as_str()), (Severity::Info, GPU));
}

#[test]
fn a_refusal_has_every_error_with_its_evidence_within_its_limit() {
    let mut start = Start::new();
    start.facts.available = Some(GIB);
    start.facts.group_nodes.clear();
    let failure = refusal(&start.findings()).unwrap();
    assert_eq!(failure.kind, ErrorKind::PreflightFailed);
    assert_eq!(
        failure.message,
        "the pre-flight refuses the start, for 2 reasons; the first: its 64 GiB of memory are pinned when it starts, and the host has less"
    );
    let expected = [
        "free-memory: its 64 GiB of memory are pinned when it starts, and the host has less",
        "/proc/meminfo: MemAvailable is 1 GiB",
        "vfio-node: 0000:41:00.0: its IOMMU group has no node, although a VFIO driver has it",
        "/dev/vfio/65 is missing",
    ];
    assert_eq!(failure.why, expected);
    assert_eq!(failure.remedy, "stop other machines, or give it less memory");
    let many: Vec<_> = (0..1000).map(|_| Finding::new("free-memory", Severity::Error, "too little")).collect();
    assert!(refusal(&many).unwrap().why.iter().map(String::len).sum::<usize>() <= MOST_EVIDENCE);
}
