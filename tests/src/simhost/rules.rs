//! How the simulated kernel answers a store: one small function for each of the kernel's own, with its errno.
//!
//! A rule holds only what a real kernel was seen to do: `tests/rig/cases/sim-rules.py` asks one the same, and `tests/simrules.rs`
//! compares. Not asked there, but reported or read in the source: what NVIDIA's driver waits for ([`Attribute::waits_for`]), its
//! `unbindLock`, and functions that vfio-pci does not take (`probe`). Functions named are those of Linux 6.12.

use std::io;
use std::path::Path;

use rustix::io::Errno;
use vfio::PciAddress;

use super::drivers;
use super::effects::{self, name};
use super::tree::{PRIVATE, Tree};

/// Longest value of a text attribute: `PAGE_SIZE - 1`.
const LONGEST: usize = 4095;

/// An attribute that takes stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attribute {
    /// `drivers/<driver>/bind`.
    Bind(String),
    /// `drivers/<driver>/unbind`.
    Unbind(String),
    /// `drivers_probe`.
    DriversProbe,
    /// `rescan` of all buses.
    Rescan,
    /// `/proc/driver/nvidia/gpus/<address>/unbindLock`.
    UnbindLock(String),
    /// A file of the function in this directory.
    Function(String, FunctionFile),
}

/// A file of a function that takes stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // named as in sysfs
pub enum FunctionFile {
    DriverOverride,
    PowerControl,
    D3coldAllowed,
    Remove,
    Reset,
    ResetMethod,
    ResetSubordinate,
    SriovNumvfs,
    SriovDriversAutoprobe,
}

impl Attribute {
    /// The attribute at `path`, as `open(O_WRONLY)` answers: ENOENT where it is not, EACCES where it takes no stores
    /// (`kernfs_fop_open`: sysfs checks the file's mode also for root).
    ///
    /// # Errors
    /// Those two.
    pub fn open(tree: &Tree, path: &Path) -> Result<Self, Errno> {
        let real = tree.resolve(path).ok_or(Errno::NOENT)?;
        let real = real.to_string_lossy();
        if real == "sys/bus/pci/drivers_probe" {
            return Ok(Self::DriversProbe);
        }
        if real == "sys/bus/pci/rescan" {
            return Ok(Self::Rescan);
        }
        if let Some((driver, file)) = real.strip_prefix("sys/bus/pci/drivers/").and_then(|rest| rest.split_once('/')) {
            return match file {
                "bind" => Ok(Self::Bind(driver.into())),
                "unbind" => Ok(Self::Unbind(driver.into())),
                _ => Err(Errno::ACCESS),
            };
        }
        if let Some(gpu) = real.strip_prefix("proc/driver/nvidia/gpus/").and_then(|rest| rest.strip_suffix("/unbindLock")) {
            return Ok(Self::UnbindLock(gpu.into()));
        }
        FunctionFile::of(&real).map(|(dir, file)| Self::Function(dir.into(), file)).ok_or(Errno::ACCESS)
    }

    /// The directory of the function whose lock the store takes, if it is there.
    pub fn locks(&self, tree: &Tree, value: &str) -> Option<String> {
        match self {
            Self::Bind(_) | Self::Unbind(_) | Self::DriversProbe => find_device(tree, value),
            Self::Rescan | Self::UnbindLock(_) | Self::Function(_, FunctionFile::D3coldAllowed | FunctionFile::ResetMethod) => None,
            Self::Function(dir, _) => Some(dir.clone()),
        }
    }

    /// Nodes that must be closed before the store can go on.
    ///
    /// vfio's remove waits for its users (`vfio_unregister_group_dev`), NVIDIA's for its usage count to fall to zero
    /// (reported in NVIDIA/open-gpu-kernel-modules#1374).
    pub fn waits_for(&self, tree: &Tree, value: &str) -> Vec<String> {
        match self {
            Self::Unbind(driver) => match find_device(tree, value) {
                Some(dir) if driver_of(tree, &dir).as_deref() == Some(driver) => effects::nodes(tree, &dir, driver),
                _ => Vec::new(),
            },
            // `remove` takes the driver away first.
            Self::Function(dir, FunctionFile::Remove) => {
                driver_of(tree, dir).map(|driver| effects::nodes(tree, dir, &driver)).unwrap_or_default()
            }
            Self::Bind(_) | Self::DriversProbe | Self::Rescan | Self::UnbindLock(_) | Self::Function(..) => Vec::new(),
        }
    }

    /// Does what the kernel does.
    ///
    /// # Errors
    /// The errno that the kernel answers.
    pub fn store(&self, tree: &Tree, value: &str) -> Result<(), Errno> {
        // `sysfs_kf_write`: nothing written reaches no attribute.
        if value.is_empty() {
            return Ok(());
        }
        match self {
            Self::Bind(driver) => bind_store(tree, driver, value),
            Self::Unbind(driver) => unbind_store(tree, driver, value),
            Self::DriversProbe => drivers_probe_store(tree, value),
            Self::Rescan => rescan_store(tree, value),
            Self::UnbindLock(gpu) => unbind_lock_store(tree, gpu, value),
            Self::Function(dir, file) => file.store(tree, dir, value),
        }
    }
}

impl FunctionFile {
    const NAMES: [(&str, Self); 9] = [
        ("/driver_override", Self::DriverOverride),
        ("/power/control", Self::PowerControl),
        ("/d3cold_allowed", Self::D3coldAllowed),
        ("/remove", Self::Remove),
        ("/reset", Self::Reset),
        ("/reset_method", Self::ResetMethod),
        ("/reset_subordinate", Self::ResetSubordinate),
        ("/sriov_numvfs", Self::SriovNumvfs),
        ("/sriov_drivers_autoprobe", Self::SriovDriversAutoprobe),
    ];

    fn of(path: &str) -> Option<(&str, Self)> {
        let (dir, file) = Self::NAMES.iter().find_map(|(name, file)| Some((path.strip_suffix(name)?, *file)))?;
        name(dir).parse::<PciAddress>().ok()?;
        Some((dir, file))
    }

    fn store(self, tree: &Tree, dir: &str, value: &str) -> Result<(), Errno> {
        match self {
            Self::DriverOverride => driver_override_store(tree, dir, value),
            Self::PowerControl => control_store(tree, dir, value),
            Self::D3coldAllowed => d3cold_allowed_store(tree, dir, value),
            Self::Remove => remove_store(tree, dir, value),
            Self::Reset => reset_store(tree, dir, value),
            Self::ResetMethod => reset_method_store(tree, dir, value),
            Self::ResetSubordinate => reset_subordinate_store(tree, dir, value),
            Self::SriovNumvfs => sriov_numvfs_store(tree, dir, value),
            Self::SriovDriversAutoprobe => sriov_drivers_autoprobe_store(tree, dir, value),
        }
    }
}

/// `bind_store` (drivers/base/bus.c) and `device_driver_attach` (drivers/base/dd.c): ENODEV for no such device and for one that
/// the driver does not take, EBUSY where it has a driver, else what the probe answers.
fn bind_store(tree: &Tree, driver: &str, value: &str) -> Result<(), Errno> {
    let dir = find_device(tree, value).ok_or(Errno::NODEV)?;
    if !drivers::matches(tree, &dir, driver) {
        return Err(Errno::NODEV);
    }
    if driver_of(tree, &dir).is_some() {
        return Err(Errno::BUSY);
    }
    probe(tree, &dir, driver)
}

/// `unbind_store` (drivers/base/bus.c): ENODEV unless this driver has the device.
fn unbind_store(tree: &Tree, driver: &str, value: &str) -> Result<(), Errno> {
    let dir = find_device(tree, value).ok_or(Errno::NODEV)?;
    if driver_of(tree, &dir).as_deref() != Some(driver) {
        return Err(Errno::NODEV);
    }
    kernel_moved(effects::detach(tree, &dir, driver))
}

/// `nv_procfs_write_unbind_lock` (kernel-open/nvidia/nv-procfs.c): 1 is taken only while nobody uses the GPU, which only reading it
/// back tells.
fn unbind_lock_store(tree: &Tree, gpu: &str, value: &str) -> Result<(), Errno> {
    let file = format!("proc/driver/nvidia/gpus/{gpu}/unbindLock");
    let dir = find_device(tree, gpu).ok_or(Errno::NOENT)?;
    let is_used = effects::nodes(tree, &dir, "nvidia").iter().any(|node| tree.is_open(Path::new(node)));
    match number(value)? {
        0 => kernel_moved(tree.write(file, "0\n")),
        1 if !is_used => kernel_moved(tree.write(file, "1\n")),
        _ => Ok(()),
    }
}

/// `drivers_probe_store` (drivers/base/bus.c): ENODEV for no such device; success says nothing of whether a driver took it, a
/// probe that fails is passed over (`really_probe`).
fn drivers_probe_store(tree: &Tree, value: &str) -> Result<(), Errno> {
    let dir = find_device(tree, value).ok_or(Errno::NODEV)?;
    if driver_of(tree, &dir).is_some() {
        return Ok(());
    }
    let loaded = tree.entries("sys/bus/pci/drivers");
    let mut fitting = loaded.iter().filter(|driver| drivers::matches(tree, &dir, driver));
    fitting.any(|driver| probe(tree, &dir, driver).is_ok());
    Ok(())
}

/// `driver_set_override` (drivers/base/driver.c): EINVAL from a page on; the text is cut at the first newline; nothing before it
/// clears. It neither binds nor unbinds, and any name is taken.
fn driver_override_store(tree: &Tree, dir: &str, value: &str) -> Result<(), Errno> {
    if value.len() >= LONGEST {
        return Err(Errno::INVAL);
    }
    let name = value.split('\n').next().unwrap_or_default();
    let shown = if name.is_empty() { "(null)" } else { name };
    kernel_moved(tree.write(format!("{dir}/driver_override"), format!("{shown}\n")))
}

/// `control_store` (drivers/base/power/sysfs.c): `auto` or `on`, else EINVAL. `on` wakes the function (`pm_runtime_forbid`);
/// `auto` lets one sleep that VFIO has and nobody uses.
fn control_store(tree: &Tree, dir: &str, value: &str) -> Result<(), Errno> {
    let word = value.strip_suffix('\n').unwrap_or(value);
    let has_vfio = driver_of(tree, dir).is_some_and(|driver| drivers::driver(&driver).vfio);
    let state = match word {
        "on" => Some("D0"),
        "auto" => has_vfio.then_some("D3hot"),
        _ => return Err(Errno::INVAL),
    };
    if let Some(state) = state.filter(|_| driver_of(tree, dir).is_some()) {
        kernel_moved(tree.write(format!("{dir}/power_state"), format!("{state}\n")))?;
    }
    kernel_moved(tree.write(format!("{dir}/power/control"), format!("{word}\n")))
}

/// `d3cold_allowed_store` (drivers/pci/pci-sysfs.c): EINVAL unless a number; any but 0 is 1.
fn d3cold_allowed_store(tree: &Tree, dir: &str, value: &str) -> Result<(), Errno> {
    let allowed = number(value)? != 0;
    kernel_moved(tree.write(format!("{dir}/d3cold_allowed"), format!("{}\n", u8::from(allowed))))
}

/// `reset_store` (drivers/pci/pci-sysfs.c): EINVAL unless 1, ENOTTY where every method was disabled.
fn reset_store(tree: &Tree, dir: &str, value: &str) -> Result<(), Errno> {
    if number(value)? != 1 {
        return Err(Errno::INVAL);
    }
    if tree.read(format!("{dir}/reset_method")).is_empty() {
        return Err(Errno::NOTTY);
    }
    kernel_moved(effects::reset(tree, dir))
}

/// `reset_subordinate_store` (drivers/pci/pci-sysfs.c, since Linux 6.13): EINVAL unless a number, nothing for 0; `__pci_reset_bus`
/// resets every function below the bridge.
fn reset_subordinate_store(tree: &Tree, dir: &str, value: &str) -> Result<(), Errno> {
    if number(value)? == 0 {
        return Ok(());
    }
    let below = tree.entries(dir).into_iter().filter(|name| name.parse::<PciAddress>().is_ok());
    below.for_each(|function| moved(effects::reset(tree, &format!("{dir}/{function}"))));
    Ok(())
}

/// `remove_store` (drivers/pci/pci-sysfs.c): EINVAL unless a number, nothing for 0; `pci_stop_and_remove_bus_device_locked` takes the
/// driver away, and a physical function's virtual ones with it.
fn remove_store(tree: &Tree, dir: &str, value: &str) -> Result<(), Errno> {
    if number(value)? == 0 {
        return Ok(());
    }
    let enabled = tree.read(format!("{dir}/sriov_numvfs")).parse().unwrap_or(0);
    if enabled > 0 {
        disable_sriov(tree, dir, enabled)?;
    }
    kernel_moved(effects::remove(tree, dir))
}

/// `rescan_store` (drivers/pci/pci-sysfs.c): EINVAL unless a number, nothing for 0; `pci_rescan_bus` finds what answers, with nothing
/// left of what the kernel knew of it, and offers it to the drivers (`pci_bus_add_device`).
fn rescan_store(tree: &Tree, value: &str) -> Result<(), Errno> {
    if number(value)? == 0 {
        return Ok(());
    }
    for found in moved(effects::find_removed(tree)) {
        drivers_probe_store(tree, &found)?;
    }
    Ok(())
}

/// `reset_method_store` (drivers/pci/pci.c): a list of methods that the function supports, in the order wanted; an empty line
/// disables all; `default` restores; EINVAL for a method unknown or not supported.
fn reset_method_store(tree: &Tree, dir: &str, value: &str) -> Result<(), Errno> {
    if value.len() >= LONGEST {
        return Err(Errno::INVAL);
    }
    let supported = tree.read(private(dir, "reset_methods"));
    let methods: Vec<_> = value.split_whitespace().collect();
    if methods == ["default"] {
        return kernel_moved(tree.write(format!("{dir}/reset_method"), format!("{supported}\n")));
    }
    if methods.iter().any(|method| !supported.split(' ').any(|known| known == *method)) {
        return Err(Errno::INVAL);
    }
    kernel_moved(tree.write(format!("{dir}/reset_method"), format!("{}\n", methods.join(" "))))
}

/// `sriov_numvfs_store` (drivers/pci/iov.c): EINVAL unless a number, ERANGE above the total, nothing where it is so already,
/// ENOENT without a driver that can, EBUSY from one number to another. New functions are offered to the drivers where
/// `sriov_drivers_autoprobe` is 1.
fn sriov_numvfs_store(tree: &Tree, dir: &str, value: &str) -> Result<(), Errno> {
    let read = |file: &str| tree.read(format!("{dir}/{file}")).parse::<u64>().unwrap_or(0);
    let (wanted, enabled) = (number(value)?, read("sriov_numvfs"));
    if wanted > read("sriov_totalvfs") {
        return Err(Errno::RANGE);
    }
    if wanted == enabled {
        return Ok(());
    }
    if !driver_of(tree, dir).is_some_and(|driver| drivers::driver(&driver).sriov) {
        return Err(Errno::NOENT);
    }
    if wanted != 0 && enabled != 0 {
        return Err(Errno::BUSY);
    }
    let count = |number: u64| u16::try_from(number).map_err(|_| Errno::INVAL);
    if wanted == 0 { disable_sriov(tree, dir, count(enabled)?) } else { enable_sriov(tree, dir, count(wanted)?) }
}

/// What NVIDIA's `sriov-manage -e` and `-d` come to: all virtual functions on its driver, or none. It does nothing where it is so
/// already (vGPU user guide; reported in cozystack/ansible-cozystack#70).
///
/// # Errors
/// ENODEV for no such device, ENOENT where the driver does not have it.
pub fn sriov_manage(tree: &Tree, device: &str, enable: bool) -> Result<(), Errno> {
    let dir = find_device(tree, device).ok_or(Errno::NODEV)?;
    if driver_of(tree, &dir).as_deref() != Some("nvidia") {
        return Err(Errno::NOENT);
    }
    let read = |file: &str| tree.read(format!("{dir}/{file}")).parse::<u16>().unwrap_or(0);
    match (enable, read("sriov_numvfs")) {
        (true, 0) => enable_sriov(tree, &dir, read("sriov_totalvfs")),
        (false, enabled) if enabled > 0 => disable_sriov(tree, &dir, enabled),
        (true, _) | (false, _) => Ok(()),
    }
}

/// `sriov_enable` (drivers/pci/iov.c).
fn enable_sriov(tree: &Tree, dir: &str, wanted: u16) -> Result<(), Errno> {
    for number in 0..wanted {
        let own = moved(effects::appear_virtual(tree, dir, number, free_group(tree, dir)));
        if tree.read(format!("{dir}/sriov_drivers_autoprobe")) == "1" {
            drivers_probe_store(tree, name(&own))?;
        }
    }
    kernel_moved(tree.write(format!("{dir}/sriov_numvfs"), format!("{wanted}\n")))
}

/// `sriov_disable` (drivers/pci/iov.c), from the last to the first.
fn disable_sriov(tree: &Tree, dir: &str, enabled: u16) -> Result<(), Errno> {
    for number in (0..enabled).rev() {
        if let Some(own) = tree.resolve(Path::new(&format!("{dir}/virtfn{number}"))) {
            let own = own.to_string_lossy();
            if let Some(driver) = driver_of(tree, &own) {
                moved(effects::detach(tree, &own, &driver));
            }
        }
        moved(effects::vanish_virtual(tree, dir, number));
    }
    kernel_moved(tree.write(format!("{dir}/sriov_numvfs"), "0\n"))
}

fn free_group(tree: &Tree, dir: &str) -> Option<u32> {
    effects::group(tree, dir)?;
    (0..).find(|number| !tree.exists(format!("sys/kernel/iommu_groups/{number}")))
}

/// `sriov_drivers_autoprobe_store` (drivers/pci/iov.c): `kstrtobool`, EINVAL for anything else.
fn sriov_drivers_autoprobe_store(tree: &Tree, dir: &str, value: &str) -> Result<(), Errno> {
    let on = match value.trim_end_matches('\n') {
        "1" | "y" | "Y" | "on" => 1,
        "0" | "n" | "N" | "off" => 0,
        _ => return Err(Errno::INVAL),
    };
    kernel_moved(tree.write(format!("{dir}/sriov_drivers_autoprobe"), format!("{on}\n")))
}

/// `pci_device_probe`, `pci_dma_configure` and the driver's own probe: ENODEV for a virtual function whose physical one has
/// `sriov_drivers_autoprobe` 0 and that has no override; for vfio drivers EINVAL without a group and EBUSY for a physical function
/// with virtual ones (`vfio_pci_core_register_device`); for others EBUSY while a program owns the group's DMA
/// (`iommu_device_use_default_domain`).
fn probe(tree: &Tree, dir: &str, driver: &str) -> Result<(), Errno> {
    let is_overridden = tree.read(format!("{dir}/driver_override")) != "(null)";
    if tree.read(format!("{dir}/physfn/sriov_drivers_autoprobe")) == "0" && !is_overridden {
        return Err(Errno::NODEV);
    }
    let group = effects::group(tree, dir);
    if drivers::driver(driver).vfio {
        if group.is_none() || tree.read(format!("{dir}/class")).starts_with("0x0604") {
            return Err(Errno::INVAL);
        }
        if !matches!(tree.read(format!("{dir}/sriov_numvfs")).as_str(), "" | "0") {
            return Err(Errno::BUSY);
        }
    } else if group.is_some_and(|group| tree.is_open(Path::new(&format!("dev/vfio/{group}")))) {
        return Err(Errno::BUSY);
    }
    kernel_moved(effects::attach(tree, dir, driver))
}

/// `bus_find_device_by_name`: by `sysfs_streq`, which forgives one newline.
fn find_device(tree: &Tree, value: &str) -> Option<String> {
    let address: PciAddress = value.strip_suffix('\n').unwrap_or(value).parse().ok()?;
    let real = tree.resolve(Path::new(&format!("sys/bus/pci/devices/{address}")))?;
    Some(real.to_string_lossy().into_owned())
}

fn driver_of(tree: &Tree, dir: &str) -> Option<String> {
    tree.link_name(format!("{dir}/driver"))
}

fn private(dir: &str, file: &str) -> String {
    format!("{PRIVATE}/functions/{}/{file}", name(dir))
}

/// `kstrtoul` with base 0: one newline is forgiven, white space and signs are not.
fn number(value: &str) -> Result<u64, Errno> {
    let text = value.strip_suffix('\n').unwrap_or(value);
    let parsed = match text.strip_prefix("0x") {
        Some(hexadecimal) => u64::from_str_radix(hexadecimal, 16),
        None if text.len() > 1 && text.starts_with('0') => u64::from_str_radix(text, 8),
        None => text.parse(),
    };
    parsed.map_err(|_| Errno::INVAL)
}

fn kernel_moved(result: io::Result<()>) -> Result<(), Errno> {
    moved(result);
    Ok(())
}

// The tree is the kernel's memory: a file system that fails under it is no answer of a kernel.
fn moved<T>(result: io::Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("the simulated host's tree cannot be changed: {error}"))
}
