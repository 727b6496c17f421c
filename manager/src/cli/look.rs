//! `gpuward list` and `gpuward show`.

use std::io;
use std::path::Path;

use serde::Serialize;
use vfio::{Host, Inventory, PciAddress};

use super::device::Device;
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
pub(super) fn list(context: &mut Context, root: Option<&Path>) -> Result<(), Stop> {
    let listing = match root {
        Some(root) => {
            let inventory = captured(root)?;
            let devices = inventory.devices.values().map(|function| Device::observed(&inventory, function)).collect();
            Listing { devices, unreadable: inventory.unreadable }
        }
        None => Listing { devices: Device::told(&context.client()?.objects()?), unreadable: Vec::new() },
    };
    if context.output.is_json() {
        return Ok(context.output.json(&listing)?);
    }
    for line in &listing.unreadable {
        super::warn(line);
    }
    Ok(table(&mut context.output, &listing.devices)?)
}

fn table(output: &mut Output, devices: &[Device]) -> io::Result<()> {
    let number = |number: Option<i64>| number.map(|number| number.to_string()).unwrap_or_default();
    let row = |device: &Device| {
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
pub(super) fn show(context: &mut Context, address: PciAddress, root: Option<&Path>) -> Result<(), Stop> {
    let (device, holders) = match root {
        Some(root) => (find(&captured(root)?, address)?, Vec::new()),
        None => ask(context, address)?,
    };
    if context.output.is_json() {
        let shown = Shown { device: &device, holders: &holders };
        return Ok(context.output.json(&shown)?);
    }
    Ok(context.output.line(describe(&device, &holders))?)
}

/// What `show --json` prints: the device, and who has it open.
#[derive(Debug, Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    device: &'a Device,
    holders: &'a [Holder],
}

/// A process that has a device open.
#[derive(Debug, Serialize)]
struct Holder {
    pid: u64,
    command: String,
    unit: Option<String>,
}

fn ask(context: &mut Context, address: PciAddress) -> Result<(Device, Vec<Holder>), Stop> {
    let client = context.client()?;
    let (path, holders) = client.wait(async {
        let path = ManagerProxy::new(client.bus()).await?.get_device(&address.to_string()).await?;
        let device = DeviceProxy::builder(client.bus()).path(path.clone()).build().await?;
        Ok((path, device.list_holders(Options::new()).await?))
    })?;
    let device = Device::told_at(&client.objects()?, path.as_str()).ok_or_else(|| absent(address))?;
    Ok((device, holders.into_iter().map(|holder| holder_of(&Record(holder))).collect()))
}

fn holder_of(record: &Record) -> Holder {
    let unit = Some(record.text("unit").to_owned()).filter(|unit| !unit.is_empty());
    let pid = record.number("pid").and_then(|pid| u64::try_from(pid).ok()).unwrap_or(0);
    Holder { pid, command: record.text("command").into(), unit }
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

fn describe(device: &Device, holders: &[Holder]) -> String {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let holders = holders.iter().map(|holder| match &holder.unit {
        Some(unit) => format!("{}[{}], unit {unit}", holder.command, holder.pid),
        None => format!("{}[{}]", holder.command, holder.pid),
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
        ("resets by", device.reset_methods.join(" ")),
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
