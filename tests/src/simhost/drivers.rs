//! The drivers that the simulated kernel has, as data: `tests/hosts/drivers.toml`.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::LazyLock;

use serde::Deserialize;

use super::tree::Tree;

/// What the simulated kernel knows of a driver.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Driver {
    /// What it matches, as `vendor:device/class` with `*` for any.
    ids: Vec<String>,
    /// Its ids match only where `driver_override` is set.
    #[serde(default)]
    override_only: bool,
    /// It registers its devices with VFIO.
    #[serde(default)]
    pub vfio: bool,
    /// It can make virtual functions.
    #[serde(default)]
    pub sriov: bool,
}

static DRIVERS: LazyLock<BTreeMap<String, Driver>> = LazyLock::new(|| {
    toml::from_str(include_str!("../../hosts/drivers.toml")).unwrap_or_else(|error| panic!("tests/hosts/drivers.toml: {error}"))
});

/// What is known of the driver `name`; a driver without ids where nothing is.
pub fn driver(name: &str) -> Driver {
    DRIVERS.get(name).cloned().unwrap_or_default()
}

/// Lays the directories of the loaded drivers: those named, and vfio-pci.
///
/// # Errors
/// The file system's.
pub fn lay<'a>(tree: &Tree, named: impl Iterator<Item = &'a str>) -> io::Result<()> {
    let loaded: BTreeSet<&str> = named.chain(["vfio-pci"]).collect();
    for name in loaded {
        for file in ["bind", "unbind", "new_id", "remove_id", "uevent"] {
            tree.write(format!("sys/bus/pci/drivers/{name}/{file}"), "")?;
        }
    }
    Ok(())
}

/// Whether the driver `name` takes the function in `dir`. Mirrors `pci_match_device` (drivers/pci/pci-driver.c).
pub fn matches(tree: &Tree, dir: &str, name: &str) -> bool {
    let driver_override = tree.read(format!("{dir}/driver_override"));
    let is_overridden = driver_override != "(null)" && tree.exists(format!("{dir}/driver_override"));
    if is_overridden {
        return driver_override == name;
    }
    let driver = driver(name);
    !driver.override_only && driver.ids.iter().any(|id| id_matches(tree, dir, id))
}

fn id_matches(tree: &Tree, dir: &str, id: &str) -> bool {
    let Some((ids, class)) = id.split_once('/') else { return false };
    let Some((vendor, device)) = ids.split_once(':') else { return false };
    let is = |file: &str, wanted: &str| wanted == "*" || tree.read(format!("{dir}/{file}")) == format!("0x{wanted}");
    let class_is = class == "*" || tree.read(format!("{dir}/class")).trim_start_matches("0x").starts_with(class);
    class_is && is("vendor", vendor) && is("device", device)
}
