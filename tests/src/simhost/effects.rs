//! What the kernel does when a function comes or goes, or a driver takes it or lets it go: links move, nodes appear, power changes.

use std::io;

use vfio::PciAddress;

use super::drivers;
use super::tree::{PRIVATE, Tree};

/// Lets the function whose files are in `dir` be seen, in `group` if there is an IOMMU. Mirrors `pci_bus_add_device` and
/// `iommu_probe_device`.
///
/// # Errors
/// The file system's.
pub fn appear(tree: &Tree, dir: &str, group: Option<u32>) -> io::Result<()> {
    tree.link(format!("sys/bus/pci/devices/{}", name(dir)), dir)?;
    let Some(group) = group else { return Ok(()) };
    let of_group = format!("sys/kernel/iommu_groups/{group}");
    tree.link(format!("{of_group}/devices/{}", name(dir)), dir)?;
    tree.link(format!("{dir}/iommu_group"), &of_group)?;
    tree.write(format!("{of_group}/type"), "DMA-FQ\n")?;
    tree.write(format!("{of_group}/reserved_regions"), "0x00000000fee00000 0x00000000feefffff msi\n")
}

/// Takes the function in `dir` off the bus for good, as one that was pulled out. Mirrors `pci_stop_and_remove_bus_device`.
///
/// # Errors
/// The file system's.
pub fn vanish(tree: &Tree, dir: &str) -> io::Result<()> {
    if let Some(driver) = tree.link_name(format!("{dir}/driver")) {
        detach(tree, dir, &driver)?;
    }
    if let Some(group) = group(tree, dir) {
        leave_group(tree, dir, &group)?;
    }
    tree.remove(format!("sys/bus/pci/devices/{}", name(dir)))?;
    tree.remove(dir)
}

fn leave_group(tree: &Tree, dir: &str, group: &str) -> io::Result<()> {
    let of_group = format!("sys/kernel/iommu_groups/{group}");
    tree.remove(format!("{of_group}/devices/{}", name(dir)))?;
    if tree.entries(format!("{of_group}/devices")).is_empty() {
        tree.remove(of_group)?;
    }
    Ok(())
}

const REMOVED: &str = ".sim/removed";

/// Takes the function in `dir` off the bus until the next rescan, if it still answers then.
///
/// # Errors
/// The file system's.
pub fn remove(tree: &Tree, dir: &str) -> io::Result<()> {
    if let Some(driver) = tree.link_name(format!("{dir}/driver")) {
        detach(tree, dir, &driver)?;
    }
    let lies = format!("{REMOVED}/{}", name(dir));
    tree.write(format!("{lies}/dir"), dir)?;
    if let Some(group) = group(tree, dir) {
        tree.write(format!("{lies}/group"), &group)?;
        leave_group(tree, dir, &group)?;
        tree.remove(format!("{dir}/iommu_group"))?;
    }
    tree.remove(format!("sys/bus/pci/devices/{}", name(dir)))?;
    tree.rename(dir, format!("{lies}/files"))
}

/// Lets those that were removed and answer be seen again, as the kernel finds them: nothing is left of what it was told. Gives their
/// addresses. The group has the number it had: `iommu_group_alloc` takes the lowest that is free.
///
/// # Errors
/// The file system's.
pub fn find_removed(tree: &Tree) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for address in tree.entries(REMOVED) {
        let lies = format!("{REMOVED}/{address}");
        let dir = tree.read(format!("{lies}/dir"));
        heal(tree, &address, &format!("{lies}/files"))?;
        if is_silent(tree, &format!("{lies}/files"))? {
            continue;
        }
        tree.rename(format!("{lies}/files"), &dir)?;
        let methods = tree.read(format!("{PRIVATE}/functions/{address}/reset_methods"));
        for (file, text) in [("driver_override", "(null)"), ("power/control", "on"), ("power_state", "D0"), ("d3cold_allowed", "1")] {
            tree.write(format!("{dir}/{file}"), format!("{text}\n"))?;
        }
        if !methods.is_empty() {
            tree.write(format!("{dir}/reset_method"), format!("{methods}\n"))?;
        }
        appear(tree, &dir, tree.read(format!("{lies}/group")).parse().ok())?;
        tree.remove(&lies)?;
        found.push(address);
    }
    Ok(found)
}

/// What a reset leaves of the function in `dir`: what a test said with [`super::SimHost::after_reset`], else all as it was.
///
/// # Errors
/// The file system's.
pub fn reset(tree: &Tree, dir: &str) -> io::Result<()> {
    let resets = format!("{PRIVATE}/functions/{}/resets", name(dir));
    let count: u32 = tree.read(&resets).parse().unwrap_or(0);
    tree.write(resets, (count + 1).to_string())?;
    let config = format!("{dir}/config");
    let own = tree.bytes(&config)?;
    let left = match tree.read(format!("{PRIVATE}/functions/{}/after_reset", name(dir))).as_str() {
        "silent" | "dead" => vec![0xff; own.len()],
        "without-regions" => [&own[..0x10], &[0; 24], &own[0x28..]].concat(),
        _ => return Ok(()),
    };
    let kept = format!("{PRIVATE}/functions/{}/config", name(dir));
    if !tree.exists(&kept) {
        tree.write(kept, own)?;
    }
    tree.write(config, left)
}

// One that only needed to be found anew has its configuration space back; one that is dead has not.
fn heal(tree: &Tree, address: &str, files: &str) -> io::Result<()> {
    let own = format!("{PRIVATE}/functions/{address}/config");
    if tree.exists(&own) && tree.read(format!("{PRIVATE}/functions/{address}/after_reset")) != "dead" {
        tree.write(format!("{files}/config"), tree.bytes(&own)?)?;
    }
    Ok(())
}

// `pci_bus_read_dev_vendor_id`: what reads as ones is not there.
fn is_silent(tree: &Tree, files: &str) -> io::Result<bool> {
    Ok(tree.bytes(format!("{files}/config"))?.starts_with(&[0xff; 4]))
}

/// Where the files of virtual function `number` of the function in `dir` lie until it is enabled.
pub fn hidden(dir: &str, number: u16, own: PciAddress) -> String {
    format!("{PRIVATE}/functions/{}/virtual/{number}/{own}", name(dir))
}

/// Lets virtual function `number` of the function in `dir` be seen, and gives its directory. Mirrors `pci_iov_add_virtfn`
/// (drivers/pci/iov.c).
///
/// # Errors
/// The file system's.
pub fn appear_virtual(tree: &Tree, dir: &str, number: u16, group: Option<u32>) -> io::Result<String> {
    let lies = format!("{PRIVATE}/functions/{}/virtual/{number}", name(dir));
    let own = tree.entries(&lies).into_iter().next().ok_or(io::ErrorKind::NotFound)?;
    let above = dir.rsplit_once('/').map_or("", |(above, _)| above);
    let own_dir = format!("{above}/{own}");
    tree.rename(format!("{lies}/{own}"), &own_dir)?;
    appear(tree, &own_dir, group)?;
    tree.link(format!("{dir}/virtfn{number}"), &own_dir)?;
    tree.link(format!("{own_dir}/physfn"), dir)?;
    Ok(own_dir)
}

/// Takes virtual function `number` of the function in `dir` away, which has no driver. Mirrors `pci_iov_remove_virtfn`.
///
/// # Errors
/// The file system's.
pub fn vanish_virtual(tree: &Tree, dir: &str, number: u16) -> io::Result<()> {
    let Some(own) = tree.link_name(format!("{dir}/virtfn{number}")) else { return Ok(()) };
    let above = dir.rsplit_once('/').map_or("", |(above, _)| above);
    let own_dir = format!("{above}/{own}");
    if let Some(group) = group(tree, &own_dir) {
        tree.remove(format!("sys/kernel/iommu_groups/{group}"))?;
        tree.remove(format!("{own_dir}/iommu_group"))?;
    }
    for link in [format!("{dir}/virtfn{number}"), format!("{own_dir}/physfn"), format!("sys/bus/pci/devices/{own}")] {
        tree.remove(link)?;
    }
    tree.rename(&own_dir, format!("{PRIVATE}/functions/{}/virtual/{number}/{own}", name(dir)))
}

/// Lets `driver` take the function in `dir`, which has none. Mirrors `driver_bound` and the driver's probe.
///
/// # Errors
/// The file system's.
pub fn attach(tree: &Tree, dir: &str, driver: &str) -> io::Result<()> {
    if drivers::driver(driver).vfio {
        register_vfio_device(tree, dir)?;
    } else {
        tree.write(format!("{dir}/power_state"), "D0\n")?;
    }
    if driver == "nvidia" {
        register_nvidia_gpu(tree, dir)?;
    }
    tree.link(format!("sys/bus/pci/drivers/{driver}/{}", name(dir)), dir)?;
    tree.link(format!("{dir}/driver"), format!("sys/bus/pci/drivers/{driver}"))
}

/// Takes the function in `dir` from `driver`. Mirrors `__device_release_driver` (drivers/base/dd.c) and the driver's remove.
///
/// # Errors
/// The file system's.
pub fn detach(tree: &Tree, dir: &str, driver: &str) -> io::Result<()> {
    if drivers::driver(driver).vfio {
        unregister_vfio_device(tree, dir)?;
    }
    if driver == "nvidia" {
        tree.remove(format!("dev/nvidia{}", nvidia_minor(tree, dir)))?;
        tree.remove(nvidia_dir(dir))?;
    }
    tree.remove(format!("sys/bus/pci/drivers/{driver}/{}", name(dir)))?;
    tree.remove(format!("{dir}/driver"))
}

/// The nodes through which a program uses the function in `dir` while `driver` has it, below the root.
pub fn nodes(tree: &Tree, dir: &str, driver: &str) -> Vec<String> {
    if drivers::driver(driver).vfio {
        let device = tree.entries(format!("{dir}/vfio-dev")).into_iter().map(|name| format!("dev/vfio/devices/{name}"));
        return device.chain(group(tree, dir).map(|group| format!("dev/vfio/{group}"))).collect();
    }
    if driver == "nvidia" && tree.exists(nvidia_dir(dir)) {
        return vec![format!("dev/nvidia{}", nvidia_minor(tree, dir))];
    }
    Vec::new()
}

/// The number of the group of the function in `dir`.
pub fn group(tree: &Tree, dir: &str) -> Option<String> {
    tree.link_name(format!("{dir}/iommu_group"))
}

/// The last element of a function's directory: its address.
pub fn name(dir: &str) -> &str {
    dir.rsplit('/').next().unwrap_or(dir)
}

// `vfio_pci_core_register_device`: the function may sleep from now on (`pm_runtime_allow`), so an idle one does.
pub fn register_vfio_device(tree: &Tree, dir: &str) -> io::Result<()> {
    tree.write(format!("{dir}/power/control"), "auto\n")?;
    tree.write(format!("{dir}/power_state"), "D3hot\n")?;
    let number = (0..).find(|number| !tree.exists(format!("dev/vfio/devices/vfio{number}"))).unwrap_or(0);
    tree.write(format!("dev/vfio/devices/vfio{number}"), "")?;
    tree.write(format!("{dir}/vfio-dev/vfio{number}/dev"), format!("511:{number}\n"))?;
    match group(tree, dir) {
        Some(group) if !tree.exists(format!("dev/vfio/{group}")) => tree.write(format!("dev/vfio/{group}"), ""),
        _ => Ok(()),
    }
}

// `vfio_pci_core_unregister_device` and `vfio_group_remove`: the group's node goes with its last VFIO device.
fn unregister_vfio_device(tree: &Tree, dir: &str) -> io::Result<()> {
    for device in tree.entries(format!("{dir}/vfio-dev")) {
        tree.remove(format!("dev/vfio/devices/{device}"))?;
    }
    tree.remove(format!("{dir}/vfio-dev"))?;
    tree.write(format!("{dir}/power/control"), "on\n")?;
    tree.write(format!("{dir}/power_state"), "D0\n")?;
    let Some(group) = group(tree, dir) else { return Ok(()) };
    let devices = format!("sys/kernel/iommu_groups/{group}/devices");
    let is_used = tree.entries(&devices).iter().any(|member| tree.exists(format!("{devices}/{member}/vfio-dev")));
    if is_used { Ok(()) } else { tree.remove(format!("dev/vfio/{group}")) }
}

fn nvidia_dir(dir: &str) -> String {
    format!("proc/driver/nvidia/gpus/{}", name(dir))
}

// Only GPUs have a directory and a node, NVSwitches and virtual functions have not; fields as in kernel-open/nvidia/nv-procfs.c.
fn register_nvidia_gpu(tree: &Tree, dir: &str) -> io::Result<()> {
    if !tree.read(format!("{dir}/class")).starts_with("0x03") || tree.exists(format!("{dir}/physfn")) {
        return Ok(());
    }
    let minor = (0..).find(|minor| !tree.exists(format!("dev/nvidia{minor}"))).unwrap_or(0);
    tree.write("dev/nvidiactl", "")?;
    tree.write(format!("dev/nvidia{minor}"), "")?;
    let text = format!("Bus Type: \t PCIe\nBus Location: \t {}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n", name(dir));
    tree.write(format!("{}/unbindLock", nvidia_dir(dir)), "0\n")?;
    tree.write(format!("{}/information", nvidia_dir(dir)), text)
}

fn nvidia_minor(tree: &Tree, dir: &str) -> String {
    let text = tree.read(format!("{}/information", nvidia_dir(dir)));
    let minor = text.lines().find_map(|line| line.strip_prefix("Device Minor:"));
    minor.map(str::trim).unwrap_or("none").to_owned()
}
