//! What the checks need beside the inventory, read by name.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use vfio::Host;

/// What was read. `None` and empty: not there, or not to be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readings {
    /// `/proc/cmdline`.
    pub kernel_line: String,
    /// `/proc/sys/kernel/osrelease`.
    pub release: String,
    /// IOMMU units: their names in `/sys/class/iommu`, and what Intel's say of themselves.
    pub iommus: Vec<IommuUnit>,
    /// `vfio_iommu_type1`'s `allow_unsafe_interrupts`.
    pub unsafe_interrupts: bool,
    /// `vfio`'s `enable_unsafe_noiommu_mode`.
    pub unsafe_noiommu: bool,
    /// `vfio_iommu_type1`'s `dma_entry_limit`.
    pub dma_entry_limit: Option<u64>,
    /// Drivers of the PCI bus.
    pub drivers: Vec<String>,
    /// `/dev/vfio/vfio` is there; `None` in a tree without `/dev`.
    pub vfio_node: Option<bool>,
    /// `/dev/kvm` is there; `None` in a tree without `/dev`.
    pub kvm_node: Option<bool>,
    /// The mode in brackets of `/sys/kernel/security/lockdown`.
    pub lockdown: Option<String>,
    /// Lines of modprobe's configuration that bind by ids, with their file.
    pub bindings_by_id: Vec<String>,
    /// Devices with an override in `/etc/driverctl.d`.
    pub driverctl: Vec<String>,
    /// Parents in `/etc/mdevctl.d`.
    pub mdevctl: Vec<String>,
    /// libvirt's hooks for QEMU may be put there.
    pub has_libvirt: bool,
    /// gpuward's hook is there and may be run.
    pub hook: bool,
    /// How libvirt's daemon may lock memory: its name, its limit in bytes (`None`: none) and whether it may raise it.
    pub libvirt_daemon: Option<(String, Option<u64>, bool)>,
}

/// An IOMMU unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IommuUnit {
    /// `dmar0`, `ivhd0`, `smmu3.0x…`.
    pub name: String,
    /// Capability register of Intel's (VT-d specification 11.4.2).
    pub capability: Option<u64>,
    /// Extended capability register of Intel's (11.4.3).
    pub extended: Option<u64>,
    /// Extended features of AMD's, as the kernel writes them: one register or two, in an order that has changed.
    pub features: Option<String>,
}

const HOOK: &str = "etc/libvirt/hooks/qemu.d/50-gpuward";

impl Readings {
    /// Reads them of a host, or of a captured tree.
    pub fn of(host: &Host) -> Self {
        let text = |file: &str| host.read(file).ok().flatten().unwrap_or_default();
        let entries = |dir: &str| host.entries(dir).ok().flatten().unwrap_or_default();
        let is_on = |file: &str| matches!(text(file).as_str(), "Y" | "1");
        Self {
            kernel_line: text("proc/cmdline"),
            release: text("proc/sys/kernel/osrelease"),
            iommus: entries("sys/class/iommu").into_iter().map(|name| unit(host, name)).collect(),
            unsafe_interrupts: is_on("sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts"),
            unsafe_noiommu: is_on("sys/module/vfio/parameters/enable_unsafe_noiommu_mode"),
            dma_entry_limit: text("sys/module/vfio_iommu_type1/parameters/dma_entry_limit").parse().ok(),
            drivers: entries("sys/bus/pci/drivers"),
            vfio_node: host.exists("dev").then(|| host.exists("dev/vfio/vfio")),
            kvm_node: host.exists("dev").then(|| host.exists("dev/kvm")),
            lockdown: bracketed(&text("sys/kernel/security/lockdown")),
            bindings_by_id: bindings_by_id(host),
            driverctl: entries("etc/driverctl.d"),
            mdevctl: entries("etc/mdevctl.d"),
            has_libvirt: host.exists("etc/libvirt"),
            hook: fs::metadata(host.path(HOOK)).is_ok_and(|file| file.permissions().mode() & 0o111 != 0),
            libvirt_daemon: libvirt_daemon(host),
        }
    }
}

fn unit(host: &Host, name: String) -> IommuUnit {
    let register = |file: &str| {
        let text = host.read(format!("sys/class/iommu/{name}/intel-iommu/{file}")).ok().flatten()?;
        u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()
    };
    let features = host.read(format!("sys/class/iommu/{name}/amd-iommu/features")).ok().flatten();
    IommuUnit { capability: register("cap"), extended: register("ecap"), features, name }
}

/// `integrity` of `none [integrity] confidentiality`.
fn bracketed(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

fn bindings_by_id(host: &Host) -> Vec<String> {
    let mut found = Vec::new();
    for dir in ["etc/modprobe.d", "usr/lib/modprobe.d"] {
        for name in host.entries(dir).ok().flatten().unwrap_or_default().into_iter().filter(|name| name.ends_with(".conf")) {
            let text = host.read(format!("{dir}/{name}")).ok().flatten().unwrap_or_default();
            let binds = |line: &&str| line.trim_start().starts_with("options vfio") && line.contains("ids=");
            found.extend(text.lines().filter(binds).map(|line| format!("/{dir}/{name}: {}", line.trim())));
        }
    }
    found
}

/// CAP_SYS_RESOURCE (include/uapi/linux/capability.h).
const SYS_RESOURCE: u64 = 1 << 24;

fn libvirt_daemon(host: &Host) -> Option<(String, Option<u64>, bool)> {
    let pids = host.entries("proc").ok().flatten()?;
    let read = |pid: &str, file: &str| host.read(format!("proc/{pid}/{file}")).ok().flatten().unwrap_or_default();
    // A user's own daemon runs no guests with devices.
    let is_roots = |pid: &str| read(pid, "status").lines().any(|line| line.split_whitespace().take(2).eq(["Uid:", "0"]));
    let is_daemon = |pid: &String| matches!(read(pid, "comm").as_str(), "libvirtd" | "virtqemud") && is_roots(pid);
    let pid = pids.into_iter().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).find(is_daemon)?;
    let limits = read(&pid, "limits");
    let hard = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?.split_whitespace().nth(1)?.parse().ok();
    let status = read(&pid, "status");
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    let effective = u64::from_str_radix(effective.trim(), 16).ok()?;
    Some((read(&pid, "comm"), hard, effective & SYS_RESOURCE != 0))
}
