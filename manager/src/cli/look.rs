//! `gpuward list` and `gpuward show`.

use std::io;
use std::path::Path;

use serde::Serialize;
use vfio::{Host, Inventory, PciAddress};

use super::args::Tree;
use super::device::Device;
use super::holders::{self, ByDevice};
use super::output::{Output, details};
use super::{Context, Stop};
use crate::client::{DeviceProxy, ManagerProxy, Options, Record};
use crate::failure::{ErrorKind, Failure};

/// What `list --json` prints.
#[derive(Debug, Serialize)]
struct Listing {
    devices: Vec<Device>,
    unreadable: Vec<String>,
}

/// `gpuward list`
pub(super) fn list(context: &mut Context, tree: &Tree, with_holders: bool) -> Result<(), Stop> {
    let mut listing = match &tree.root {
        Some(root) => listed(root)?,
        None => Listing { devices: Device::told(&context.client()?.objects()?), unreadable: Vec::new() },
    };
    if with_holders {
        let holders = match &tree.root {
            Some(root) => of_tree(root)?,
            None => ask_holders(context, &listing.devices)?,
        };
        listing.devices.iter_mut().for_each(|device| device.take_holders(&holders));
    }
    if context.output.is_json() {
        return Ok(context.output.json(&listing)?);
    }
    for line in &listing.unreadable {
        super::warn(line);
    }
    Ok(table(&mut context.output, &listing.devices)?)
}

fn listed(root: &Path) -> Result<Listing, Stop> {
    let inventory = captured(root)?;
    let devices = inventory.devices.values().map(|function| Device::observed(&inventory, function)).collect();
    Ok(Listing { devices, unreadable: inventory.unreadable })
}

fn of_tree(root: &Path) -> Result<ByDevice, Stop> {
    Ok(holders::of_tree(&Host::captured(root), &captured(root)?))
}

fn ask_holders(context: &mut Context, devices: &[Device]) -> Result<ByDevice, Stop> {
    let client = context.client()?;
    let devices: Vec<_> = devices.iter().filter_map(|device| device.address.parse().ok()).collect();
    Ok(client.wait(holders::ask(client.bus(), &devices))?)
}

fn table(output: &mut Output, devices: &[Device]) -> io::Result<()> {
    // A network card that could have virtual functions is of no interest before somebody wants them.
    let is_bystander =
        |device: &&Device| device.class == "physical-function" && device.use_.as_deref().is_none_or(|use_| use_ == "observe");
    let devices: Vec<_> = devices.iter().filter(|device| !is_bystander(device)).collect();
    let number = |number: Option<i64>| number.map(|number| number.to_string()).unwrap_or_default();
    let row = |device: &&Device| {
        vec![
            device.address.clone(),
            device.name(),
            number(device.numa_node),
            device.group.map(|group| group.to_string()).unwrap_or_default(),
            device.state.clone().unwrap_or_default(),
            device.holder(),
        ]
    };
    output.table(&["DEVICE", "MODEL", "NODE", "GROUP", "STATE", "HELD BY"], devices.iter().map(row).collect())
}

/// `gpuward show DEVICE`
pub(super) fn show(context: &mut Context, address: PciAddress, tree: &Tree) -> Result<(), Stop> {
    let (mut device, holders) = match &tree.root {
        Some(root) => (find(&captured(root)?, address)?, of_tree(root)?),
        None => ask(context, address)?,
    };
    device.take_holders(&holders);
    if context.output.is_json() {
        return Ok(context.output.json(&device)?);
    }
    Ok(context.output.line(describe(&device))?)
}

fn ask(context: &mut Context, address: PciAddress) -> Result<(Device, ByDevice), Stop> {
    let client = context.client()?;
    let (path, facts, holders) = client.wait(async {
        let path = ManagerProxy::new(client.bus()).await?.get_device(&address.to_string()).await?;
        let facts = DeviceProxy::builder(client.bus()).path(path.clone()).build().await?.describe(Options::new()).await?;
        Ok((path, facts, holders::ask(client.bus(), &[address]).await?))
    })?;
    let mut device = Device::told_at(&client.objects()?, path.as_str()).ok_or_else(|| absent(address))?;
    device.take_facts(&Record(facts));
    Ok((device, holders))
}

fn captured(root: &Path) -> Result<Inventory, Stop> {
    if !root.join("sys").is_dir() {
        return Err(Stop::Wrong(format!("{} is no captured tree: there is no sys below it", root.display())));
    }
    Ok(Inventory::observe(&Host::captured(root), 0))
}

fn find(inventory: &Inventory, address: PciAddress) -> Result<Device, Stop> {
    let function = inventory.devices.get(&address).ok_or_else(|| absent(address))?;
    Ok(Device::observed(inventory, function))
}

fn absent(address: PciAddress) -> Stop {
    let failure = Failure::new(ErrorKind::NoSuchDevice, format!("there is no device {address}"));
    Stop::Failed(Box::new(failure.remedy("`gpuward list` names those there are")))
}

fn describe(device: &Device) -> String {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let holders = device.holders.iter().flatten().map(|holder| match &holder.unit {
        Some(unit) => format!("{}, unit {unit}", holder.name()),
        None => holder.name(),
    });
    let lines = [
        ("class", device.class.clone()),
        ("identity", device.identity.clone()),
        ("state", [text(&device.state), text(&device.held_by), text(&device.reason)].join(" ").trim().to_owned()),
        ("use", text(&device.use_)),
        ("driver", text(&device.driver)),
        ("override", text(&device.driver_override)),
        ("for guests", text(&device.vfio_driver)),
        ("open by", holders.collect::<Vec<_>>().join("\n")),
        ("bundle", device.bundle.join(" ")),
        ("node", device.numa_node.map(|node| node.to_string()).unwrap_or_default()),
        ("group", group(device)),
        ("members", device.group_members.join(" ")),
        ("undivided by", device.acs.join("\n")),
        ("resets by", device.reset_methods.join(" ")),
        ("cleaned by", device.cleaned_by.clone().or_else(|| device.not_cleaned.clone()).unwrap_or_default()),
        ("regions", device.regions()),
        ("link", text(&device.link)),
        ("power", text(&device.power_state)),
        ("vfio node", text(&device.vfio_node)),
        (
            "functions",
            device.virtual_functions.as_ref().map(|vfs| format!("{} of {} virtual functions", vfs.enabled, vfs.total)).unwrap_or_default(),
        ),
        ("function of", text(&device.physical_function)),
        ("vgpus by", device.vgpu.unwrap_or_default().into()),
        ("display", if device.boot_display == Some(true) { "the firmware showed its console on it".into() } else { String::new() }),
        ("unreadable", device.unreadable.join("\n")),
    ];
    details(&format!("{}  {}", device.address, device.name()), &lines)
}

fn group(device: &Device) -> String {
    let Some(group) = device.group else { return "none".into() };
    match (device.viable, &device.why_not_viable) {
        (Some(true), _) => format!("{group}, viable"),
        (Some(false), Some(why)) => format!("{group}, not viable: {why}"),
        (Some(false), None) => format!("{group}, not viable"),
        (None, _) => group.to_string(),
    }
}
