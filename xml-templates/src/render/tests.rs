use std::fs;
use std::path::Path;

use crate::*;

fn text(text: &str) -> Text {
    Text::new(text).unwrap()
}

fn minimal(domain_type: DomainType) -> Domain {
    Domain {
        domain_type,
        name: text("gpuward-0a1b2c3d"),
        uuid: text("0a1b2c3d-0000-4000-8000-000000000001"),
        metadata: Metadata::default(),
        memory: 1 << 30,
        vcpus: 2,
        cpu: Cpu::HostPassthrough,
        firmware: Firmware::Bios,
        direct_boot: None,
        disks: Vec::new(),
        interfaces: Vec::new(),
        serial_log: None,
        vsock: false,
        hostdevs: Vec::new(),
        mmio64: Mmio64::default(),
    }
}

fn gpus(addresses: &[&str]) -> Vec<Hostdev> {
    addresses.iter().map(|address| Hostdev { address: address.parse().unwrap() }).collect()
}

fn full() -> Domain {
    let volume = DiskSource::Volume { pool: text("tank"), volume: text("train-1") };
    let backing = vec![
        Backing { path: text("/tank/'b"), block: false, format: DiskFormat::Qcow2 },
        Backing { path: text("/dev/vg/c"), block: true, format: DiskFormat::Raw },
    ];
    Domain {
        metadata: Metadata {
            tenant: text("t00000000000000000000000000000000"),
            request_id: text("req <1> & 'two'"),
            claims: vec![Claim { id: text("c1"), epoch: 7 }, Claim { id: text("c2"), epoch: 8 }],
        },
        firmware: Firmware::Uefi,
        disks: vec![
            Disk { source: volume, format: DiskFormat::Qcow2, backing: Some(backing), readonly: false },
            Disk { source: DiskSource::Path(text("/srv/a\"b'c<d>&.img")), format: DiskFormat::Raw, backing: None, readonly: true },
        ],
        interfaces: vec![
            Interface { source: InterfaceSource::Network(text("acme-net")), mac: text("52:54:00:00:00:01") },
            Interface { source: InterfaceSource::Bridge(text("br0")), mac: text("52:54:00:00:00:02") },
        ],
        serial_log: Some(text("/var/lib/libvirt/gpuward/0a1b2c3d/console.log")),
        vsock: true,
        hostdevs: gpus(&["0000:1b:00.0", "0000:43:00.0"]),
        mmio64: mmio64(&[BarSize(128 << 30), BarSize(128 << 30)], 46, true),
        ..minimal(DomainType::Kvm)
    }
}

/// Each golden file with the least libvirt it is for.
fn goldens() -> Vec<(&'static str, &'static str, String)> {
    let direct =
        DirectBoot { kernel: text("/boot/vmlinuz"), initrd: Some(text("/boot/initrd")), cmdline: Some(text("console=ttyS0 quiet")) };
    let secure = Domain { firmware: Firmware::UefiSecure, cpu: Cpu::HostModel, ..minimal(DomainType::Kvm) };
    let emulated = Domain { direct_boot: Some(direct), cpu: Cpu::Maximum, hostdevs: gpus(&["0000:01:10.0"]), ..minimal(DomainType::Qemu) };
    let board = Domain { mmio64: mmio64(&[BarSize(512 << 30); 16], 46, true), firmware: Firmware::Uefi, ..full() };
    let tested = Domain { hostdevs: gpus(&["0000:1b:00.0", "10000:e1:00.0"]), cpu: Cpu::HostModel, ..minimal(DomainType::Test) };
    let domain = |domain: &Domain| render_domain(domain).unwrap();
    vec![
        ("minimal", "8.7.0", domain(&minimal(DomainType::Kvm))),
        ("full", "8.7.0", domain(&full())),
        ("secure-boot", "8.7.0", domain(&secure)),
        ("emulated-direct-boot", "7.1.0", domain(&emulated)),
        ("board-beyond-ovmfs-window", "8.7.0", domain(&board)),
        ("test-driver", "6.5.0", domain(&tested)),
        ("hostdev", "6.5.0", render_hostdev(&gpus(&["0000:1b:00.0"])[0]).unwrap()),
    ]
}

#[test]
fn golden_files_are_what_is_written() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    for (name, least, xml) in goldens() {
        let path = dir.join(format!("{name}.xml"));
        let expected = format!("<!-- libvirt {least} -->\n{xml}\n");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(&path, &expected).unwrap();
        }
        let golden = fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(golden, expected, "{name}: run with UPDATE_GOLDEN=1 and look at the difference");
    }
}

#[test]
fn hostile_text_stays_text() {
    let hostile = "x'/><disk type=\"block\"><source dev='/dev/sda'/></disk><!-- & ]]>";
    let domain = Domain {
        name: text(hostile),
        interfaces: vec![Interface { source: InterfaceSource::Network(text(hostile)), mac: text(hostile) }],
        ..full()
    };
    let xml = render_domain(&domain).unwrap();
    assert!(!xml.contains("/dev/sda'"), "{xml}");
    assert_eq!(xml.matches("<disk ").count(), 2);
    assert!(!xml.contains("<!--"));
}

#[test]
fn each_device_has_a_root_port_and_an_alias_of_its_own() {
    let xml = render_domain(&full()).unwrap();
    assert_eq!(xml.matches("model='pcie-root-port'").count(), 2);
    assert_eq!(xml.matches("managed='no'").count(), 2);
    assert!(xml.contains("ua-gw-pci_0000_1b_00_0") && xml.contains("ua-gw-pci_0000_43_00_0"));
    assert!(xml.contains("bus='0x01' slot='0x00'") && xml.contains("bus='0x02' slot='0x00'"));
}
