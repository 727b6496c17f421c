//! The parts of a simulated host that are no PCI function: memory, CPUs, the kernel's name and modules, processes.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::description::{Description, Process};
use super::tree::Tree;

const RELEASE: &str = "6.12.57+deb13-amd64";

/// The override-only aliases of the kernel's VFIO drivers. Source: `MODULE_DEVICE_TABLE` of each below `drivers/vfio/pci`.
const ALIASES: &str = "\
# Aliases extracted from modules themselves.
alias pci:v*d*sv*sd*bc01sc08i02* nvme
alias pci:v000010DEd*sv*sd*bc03sc00i00* nvidia
alias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia
alias pci:v000010DEd*sv*sd*bc06sc80i00* nvidia
alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci
alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci
alias vfio_pci:v000010DEd00002345sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci
alias vfio_pci:v000010DEd00002348sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci
alias vfio_pci:v000010DEd00002941sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci
alias vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_vfio_pci
alias vfio_pci:v00001AF4d00001041sv*sd*bc*sc*i* virtio_vfio_pci
alias vfio_pci:v00008086d00004941sv*sd*bc*sc*i* qat_vfio_pci
alias vfio_pci:v00008086d00004943sv*sd*bc*sc*i* qat_vfio_pci
alias vfio_pci:v00008086d00004945sv*sd*bc*sc*i* qat_vfio_pci
";

/// Lays everything but PCI functions and processes.
///
/// # Errors
/// The file system's.
pub fn lay(tree: &Tree, description: &Description) -> io::Result<()> {
    let boot_id = uuid::Uuid::new_v4();
    let iommu = if description.iommu { " intel_iommu=on iommu=pt" } else { "" };
    tree.write("proc/sys/kernel/osrelease", format!("{RELEASE}\n"))?;
    tree.write("proc/sys/kernel/random/boot_id", format!("{boot_id}\n"))?;
    tree.write("proc/cmdline", format!("BOOT_IMAGE=/boot/vmlinuz-{RELEASE} root=/dev/sda2 ro quiet{iommu}\n"))?;
    let memory = description.memory_gib << 20;
    tree.write("proc/meminfo", format!("MemTotal: {memory:>15} kB\nMemAvailable: {:>11} kB\n", memory / 10 * 9))?;
    tree.write("proc/mounts", format!("/dev/sda2 / ext4 rw,relatime 0 0\n{}\n", description.mounts.join("\n")))?;
    tree.write(format!("lib/modules/{RELEASE}/modules.alias"), ALIASES)?;
    tree.write("sys/bus/pci/drivers_probe", "")?;
    tree.write("sys/bus/pci/rescan", "")?;
    tree.write("sys/bus/pci/drivers_autoprobe", "1\n")?;
    tree.write("sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "N\n")?;
    tree.write("dev/vfio/vfio", "")?;
    // As udev has it (rules.d/50-udev-default.rules).
    fs::set_permissions(tree.root().join("dev/vfio/vfio"), Permissions::from_mode(0o666))?;
    tree.make_dir("sys/kernel/iommu_groups")?;
    tree.make_dir("sys/class/iommu")?;
    if description.iommu {
        tree.make_dir("sys/devices/virtual/iommu/dmar0")?;
        tree.link("sys/class/iommu/dmar0", "sys/devices/virtual/iommu/dmar0")?;
    }
    lay_cpus(tree, description)
}

fn lay_cpus(tree: &Tree, description: &Description) -> io::Result<()> {
    let range = |first: u32, count: u32| format!("{first}-{}\n", first + count - 1);
    for file in ["online", "possible", "present"] {
        tree.write(format!("sys/devices/system/cpu/{file}"), range(0, description.cpus))?;
    }
    let each = description.cpus / description.numa_nodes;
    for node in 0..description.numa_nodes {
        tree.write(format!("sys/devices/system/node/node{node}/cpulist"), range(node * each, each))?;
        let free = (description.memory_gib << 20) / u64::from(description.numa_nodes) / 10 * 9;
        tree.write(format!("sys/devices/system/node/node{node}/meminfo"), format!("Node {node} MemFree: {free:>15} kB\n"))?;
    }
    tree.write("sys/devices/system/node/online", range(0, description.numa_nodes))
}

/// Lays `/proc/<pid>` of a process.
///
/// # Errors
/// The file system's.
pub fn lay_process(tree: &Tree, process: &Process) -> io::Result<()> {
    let dir = format!("proc/{}", process.pid);
    tree.write(format!("{dir}/comm"), format!("{}\n", process.comm))?;
    tree.write(format!("{dir}/cmdline"), process.cmdline.join("\0") + "\0")?;
    tree.write(format!("{dir}/cgroup"), format!("0::{}\n", process.cgroup))?;
    tree.write(format!("{dir}/stat"), format!("{} ({}) S 1 1 1 0{} 4711 0 0\n", process.pid, process.comm, " 0".repeat(14)))?;
    let maps = process.maps.iter().map(|node| format!("7f0000000000-7f0001000000 rw-s 00000000 00:05 900 {node}\n"));
    tree.write(format!("{dir}/maps"), maps.collect::<String>())?;
    tree.make_dir(format!("{dir}/fd"))?;
    for (number, node) in process.opens.iter().enumerate() {
        let fd = tree.root().join(&dir).join("fd").join((number + 3).to_string());
        std::os::unix::fs::symlink(Path::new(node), fd)?;
    }
    Ok(())
}
