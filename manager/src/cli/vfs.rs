//! `gpuward vfs`: virtual functions, and the functions that they are parts of.

use serde::Serialize;

use super::args::VfsCommand;
use super::change::{self, Wish};
use super::device::Device;
use super::{Context, Stop};

/// `gpuward vfs`, `gpuward vfs set`
pub(super) fn run(context: &mut Context, command: Option<VfsCommand>) -> Result<(), Stop> {
    match command {
        None => list(context),
        Some(VfsCommand::Set { wish, request }) => change::apply(context, Wish::Vfs(wish.count), &[wish.device], &request),
    }
}

/// What `vfs --json` prints: physical functions, and the virtual ones of all.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Listing {
    physical_functions: Vec<Device>,
    virtual_functions: Vec<Device>,
}

fn list(context: &mut Context) -> Result<(), Stop> {
    let devices = Device::told(&context.client()?.objects()?);
    let (virtual_functions, others): (Vec<_>, Vec<_>) = devices.into_iter().partition(|device| device.physical_function.is_some());
    let physical_functions = others.into_iter().filter(|device| device.virtual_functions.is_some()).collect();
    let listing = Listing { physical_functions, virtual_functions };
    if context.output.is_json() {
        return Ok(context.output.json(&listing)?);
    }
    let mut rows = Vec::new();
    for parent in &listing.physical_functions {
        let count = parent.virtual_functions.as_ref().map(|count| format!("{} of {}", count.enabled, count.total));
        rows.push(row(parent, "", count.unwrap_or_default()));
        let of_parent = listing.virtual_functions.iter().filter(|device| device.physical_function.as_deref() == Some(&parent.address));
        rows.extend(of_parent.map(|device| row(device, "  ", String::new())));
    }
    Ok(context.output.table(&["DEVICE", "MODEL", "FUNCTIONS", "GROUP", "STATE", "HELD BY"], rows)?)
}

fn row(device: &Device, indent: &str, count: String) -> Vec<String> {
    let group = device.group.map(|group| group.to_string()).unwrap_or_default();
    vec![format!("{indent}{}", device.address), device.name(), count, group, device.state.clone().unwrap_or_default(), device.holder()]
}
