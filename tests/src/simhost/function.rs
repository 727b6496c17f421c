//! Lays the files of one function's directory in sysfs.
//!
//! Attributes and their formats are those of `drivers/pci/pci-sysfs.c`.

use std::io;

use vfio::PciAddress;

use super::config_space::{Source, config_space};
use super::description::{BarSpec, Model, Placed};
use super::tree::{PRIVATE, Tree};

/// A function that has its place.
#[derive(Clone, Debug)]
pub struct Laid {
    /// Its directory, below the root.
    pub dir: String,
    /// Its address.
    pub address: PciAddress,
    /// Whether it is a virtual function.
    pub is_virtual: bool,
    /// Device id of its virtual functions, 0 without any.
    pub virtual_id: u16,
}

/// Lays the files of `laid`; links to it, its group and its driver come later.
///
/// # Errors
/// The file system's.
pub fn lay_function(tree: &Tree, laid: &Laid, placed: &Placed, model: &Model, bases: &[(u8, u64)]) -> io::Result<()> {
    let put = |name: &str, text: String| tree.write(format!("{}/{name}", laid.dir), text + "\n");
    for (name, text) in identity(model).into_iter().chain(state(laid, placed, model)) {
        put(name, text)?;
    }
    let source = Source { model, placed, is_virtual: laid.is_virtual, virtual_id: laid.virtual_id, bases };
    tree.write(format!("{}/config", laid.dir), config_space(&source))?;
    put("resource", resource(model, bases))?;
    lay_link(tree, laid, model)?;
    // A virtual function has none: it goes with its physical one (`pci_dev_hp_attrs_are_visible`).
    if !laid.is_virtual {
        put("remove", String::new())?;
    }
    if model.port.is_some() {
        put("reset_subordinate", String::new())?;
    }
    lay_reset(tree, laid, model)?;
    if let Some(sriov) = &model.sriov {
        put("sriov_totalvfs", sriov.total.to_string())?;
        put("sriov_numvfs", placed.vfs.to_string())?;
        put("sriov_offset", sriov.offset.to_string())?;
        put("sriov_stride", sriov.stride.to_string())?;
        put("sriov_vf_device", format!("{:x}", laid.virtual_id))?;
        put("sriov_drivers_autoprobe", "1".into())?;
    }
    for (name, text) in &placed.files {
        put(name, text.clone())?;
    }
    Ok(())
}

fn identity(model: &Model) -> Vec<(&'static str, String)> {
    let (id, subsystem) = (model.id, model.subsystem);
    let modalias = format!(
        "pci:v{:08X}d{:08X}sv{:08X}sd{:08X}bc{}sc{}i{}",
        id.0,
        id.1,
        subsystem.0,
        subsystem.1,
        model.class[0..2].to_uppercase(),
        model.class[2..4].to_uppercase(),
        model.class[4..6].to_uppercase()
    );
    vec![
        ("vendor", format!("0x{:04x}", id.0)),
        ("device", format!("0x{:04x}", id.1)),
        ("subsystem_vendor", format!("0x{:04x}", subsystem.0)),
        ("subsystem_device", format!("0x{:04x}", subsystem.1)),
        ("class", format!("0x{}", model.class)),
        ("revision", format!("0x{:02x}", model.revision)),
        ("modalias", modalias),
    ]
}

fn state(laid: &Laid, placed: &Placed, model: &Model) -> Vec<(&'static str, String)> {
    let mut state = vec![
        ("driver_override", "(null)".into()),
        ("power/control", "on".into()),
        ("power_state", "D0".into()),
        // Without a power management capability nothing allows it, and virtual functions have none.
        ("d3cold_allowed", u8::from(!laid.is_virtual).to_string()),
        ("numa_node", placed.numa.to_string()),
        ("enable", "1".into()),
        ("ari_enabled", "0".into()),
    ];
    if model.class.starts_with("0300") {
        state.push(("boot_vga", u8::from(placed.boot_vga == Some(true)).to_string()));
    }
    state
}

fn lay_link(tree: &Tree, laid: &Laid, model: &Model) -> io::Result<()> {
    let Some((speed, width)) = model.link.as_deref().and_then(|link| link.split_once(" x")) else { return Ok(()) };
    let put = |name: &str, text: &str| tree.write(format!("{}/{name}", laid.dir), format!("{text}\n"));
    put("current_link_speed", speed)?;
    put("max_link_speed", speed)?;
    put("current_link_width", width)?;
    put("max_link_width", width)
}

// `reset` exists only where there is a method (`pci_dev_reset_attr_is_visible`).
fn lay_reset(tree: &Tree, laid: &Laid, model: &Model) -> io::Result<()> {
    if model.reset.is_empty() {
        return Ok(());
    }
    tree.write(format!("{PRIVATE}/functions/{}/reset_methods", laid.address), &model.reset)?;
    tree.write(format!("{}/reset", laid.dir), "")?;
    tree.write(format!("{}/reset_method", laid.dir), format!("{}\n", model.reset))
}

/// The lines of `resource`: 6 regions, the ROM and 6 regions of virtual functions; a bridge's 4 windows too.
fn resource(model: &Model, bases: &[(u8, u64)]) -> String {
    let lines = if model.port.is_some() { 17 } else { 13 };
    let line = |index: u8| {
        let found = model.bars.iter().zip(bases).find(|(bar, _)| bar.index == index);
        let (start, end, flags) = found.map_or((0, 0, 0), |(bar, (_, base))| (*base, base + bar.size - 1, flags(bar)));
        format!("0x{start:016x} 0x{end:016x} 0x{flags:016x}")
    };
    (0..lines).map(line).collect::<Vec<_>>().join("\n")
}

/// `IORESOURCE_*` with the low bits of the region's register, as the kernel keeps both in one word.
fn flags(bar: &BarSpec) -> u64 {
    const SIZE_ALIGNED: u64 = 0x40000;
    match (bar.memory, bar.wide, bar.prefetchable) {
        _ if bar.index == 6 => 0x46200,
        (false, _, _) => SIZE_ALIGNED | 0x101,
        (true, false, false) => SIZE_ALIGNED | 0x200,
        (true, false, true) => SIZE_ALIGNED | 0x2208,
        (true, true, false) => SIZE_ALIGNED | 0x10_0204,
        (true, true, true) => SIZE_ALIGNED | 0x10_220c,
    }
}
