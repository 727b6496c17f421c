use std::collections::BTreeSet;

use vfio::{Bar, Iommu, Kind};

use super::readings::IommuUnit;
use super::*;
use crate::plan::tests::{at, function};

const GPU: &str = "0000:41:00.0";

/// A host that is as it should be, with one GPU.
struct Case {
    readings: Readings,
    inventory: Inventory,
}

impl Case {
    fn new() -> Self {
        let unit = IommuUnit { name: "dmar0".into(), capability: Some(0x2f_0000), extended: Some(0b1000), features: None };
        let readings = Readings {
            release: "6.18.2-amd64".into(),
            iommus: vec![unit],
            drivers: vec!["vfio-pci".into()],
            vfio_node: Some(true),
            kvm_node: Some(true),
            has_libvirt: true,
            hook: true,
            dma_entry_limit: Some(65535),
            lockdown: Some("none".into()),
            libvirt_daemon: Some(("virtqemud".into(), Some(8 << 20), true)),
            ..Readings::default()
        };
        let gpu = function(GPU, Kind::Gpu);
        let inventory = Inventory { devices: [(gpu.address, gpu)].into(), iommu: Iommu::On, ..Inventory::default() };
        Self { readings, inventory }
    }

    fn findings(&self) -> Vec<Finding> {
        let wanted = BTreeSet::from([at(GPU)]);
        judge(Patient { readings: &self.readings, inventory: &self.inventory, wanted: &wanted })
    }

    fn ailments(&self) -> Vec<(&'static str, Severity)> {
        self.findings().iter().filter(|finding| finding.severity > Severity::Ok).map(|finding| (finding.check, finding.severity)).collect()
    }

    fn gpu(&mut self) -> &mut Function {
        self.inventory.devices.get_mut(&at(GPU)).unwrap()
    }
}

#[test]
fn a_host_that_is_as_it_should_be_has_no_ailment() {
    assert_eq!(Case::new().ailments(), []);
    let fine: Vec<_> = Case::new().findings().iter().map(|finding| finding.check).collect();
    assert_eq!(fine, ["iommu", "interrupt-remapping", "iommu-width"]);
}

#[test]
fn each_ailment_is_found_alone_and_says_what_to_do() {
    type Spoil = fn(&mut Case);
    let cases: [(Spoil, &str, Severity); 19] = [
        (|case| case.readings.kernel_line = "intremap=off".into(), "interrupt-remapping", Severity::Problem),
        (|case| case.inventory.iommu = Iommu::Off, "iommu", Severity::Problem),
        (|case| case.readings.unsafe_interrupts = true, "interrupt-remapping", Severity::Problem),
        (|case| case.readings.iommus[0].extended = Some(0), "interrupt-remapping", Severity::Warning),
        (|case| case.readings.iommus[0].capability = Some(0x26_0000), "iommu-width", Severity::Warning),
        (|case| case.readings.unsafe_noiommu = true, "unsafe-noiommu", Severity::Problem),
        (|case| case.readings.kernel_line = "quiet pcie_acs_override=downstream".into(), "acs-override", Severity::Warning),
        (|case| case.readings.kernel_line = "vfio-pci.ids=10de:2330".into(), "bindings-by-id", Severity::Warning),
        (
            |case| case.readings.bindings_by_id = vec!["/etc/modprobe.d/a.conf: options vfio-pci ids=1".into()],
            "bindings-by-id",
            Severity::Warning,
        ),
        (|case| case.readings.dma_entry_limit = Some(1000), "dma-entry-limit", Severity::Warning),
        (|case| case.readings.vfio_node = Some(false), "vfio", Severity::Problem),
        (|case| case.readings.kvm_node = Some(false), "kvm", Severity::Warning),
        (|case| case.readings.lockdown = Some("integrity".into()), "lockdown", Severity::Note),
        (|case| case.readings.hook = false, "libvirt-hook", Severity::Warning),
        (|case| case.readings.libvirt_daemon = Some(("libvirtd".into(), Some(64 << 20), false)), "locked-memory", Severity::Problem),
        (|case| case.readings.drivers = vec!["nvidia".into()], "vfio-driver", Severity::Problem),
        (|case| case.gpu().reset_methods.clear(), "no-reset", Severity::Warning),
        (|case| case.readings.driverctl = vec!["pci-0000:41:00.0".into()], "other-manager", Severity::Warning),
        (|case| case.gpu().unreadable = vec!["config: permission denied".into()], "unreadable", Severity::Note),
    ];
    for (spoil, check, severity) in cases {
        let mut case = Case::new();
        spoil(&mut case);
        assert_eq!(case.ailments(), [(check, severity)]);
        let findings = case.findings();
        let finding = findings.iter().find(|finding| finding.severity > Severity::Ok).unwrap();
        assert!(!finding.remedy.is_empty(), "{finding:?}");
    }
}

#[test]
fn a_huge_bar_is_slow_only_on_a_kernel_that_maps_it_page_by_page() {
    let mut case = Case::new();
    let bar = Bar { index: 1, base: 0, size: 128 << 30, memory: true, wide: true, prefetchable: true };
    case.gpu().bars = vec![bar];
    assert_eq!(case.ailments(), []);
    case.readings.release = "6.12.57+deb13-amd64".into();
    assert_eq!(case.ailments(), [("huge-bars", Severity::Note)]);
    case.readings.release = "unknown".into();
    assert_eq!(case.ailments(), [], "what is not known is not judged");
}

#[test]
fn nothing_is_judged_that_could_not_be_read() {
    let case = Case { readings: Readings::default(), ..Case::new() };
    assert_eq!(case.ailments(), []);
}
