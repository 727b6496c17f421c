//! Hosts and parts of hosts that were captured on real machines: see `tests/fixtures/NOTICE`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::description::Description;
use super::tree::Tree;
use super::{drivers, effects, machine};
use crate::umockdev;

/// The name of the host that was captured as a whole: an A2 with 16 virtual functions and 3 mediated devices.
pub const A2: &str = "a2-mdev";

/// Around what was captured: what every host has.
const AROUND: &str = "summary = 'A captured host.'\nmodel = {}\nfunction = []\n";

/// Lays the host [`A2`].
///
/// # Errors
/// The file system's.
pub fn lay_a2(tree: &Tree) -> io::Result<()> {
    machine::lay(tree, &Description::parse(AROUND).map_err(io::Error::other)?)?;
    umockdev::lay(tree.root(), &fs::read_to_string(fixture("a2-mdev.umockdev"))?)?;
    drivers::lay(tree, ["nvidia", "pcieport"].into_iter())?;
    tree.write("proc/iomem", "")?;
    for device in tree.entries("sys/bus/pci/devices") {
        let dir = format!("sys/bus/pci/devices/{device}");
        if tree.exists(format!("{dir}/physfn")) {
            copy(&fixture("a2-mdev"), &tree.root().join(&dir))?;
            tree.link(format!("sys/class/mdev_bus/{device}"), &dir)?;
        }
    }
    Ok(())
}

/// Lays what the vGPU driver shows below virtual functions, on a host whose functions are laid: it registers them with VFIO too.
///
/// # Errors
/// The file system's.
pub fn lay_l40s_vgpu(tree: &Tree) -> io::Result<()> {
    for device in tree.entries("sys/bus/pci/devices") {
        let dir = format!("sys/bus/pci/devices/{device}");
        if tree.exists(format!("{dir}/physfn")) {
            copy(&fixture("l40s-vgpu"), &tree.root().join(&dir).join("nvidia"))?;
            effects::register_vfio_device(tree, &dir)?;
        }
    }
    Ok(())
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let (entry, target) = (entry?, to.to_owned());
        let target = target.join(entry.file_name());
        if entry.file_type()?.is_dir() { copy(&entry.path(), &target)? } else { fs::write(target, fs::read(entry.path())?)? }
    }
    Ok(())
}
