//! Who has a device open: told by the service, or read of a tree's `/proc`.

use std::collections::BTreeMap;

use serde::Serialize;
use vfio::{Holders, Host, Inventory, PciAddress};
use zbus::{Connection, OwnedObjectPath};

use crate::client::{DeviceProxy, ENTRY, Options, Record};

/// A process that has a device open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Holder {
    pub pid: u64,
    pub command: String,
    pub unit: Option<String>,
}

/// Holders by device.
pub(super) type ByDevice = BTreeMap<PciAddress, Vec<Holder>>;

/// Every holder in a tree.
pub(super) fn of_tree(host: &Host, inventory: &Inventory) -> ByDevice {
    let mut holders = ByDevice::new();
    for found in Holders::of(host, inventory.devices.values()).found {
        let holder = Holder { pid: found.pid.into(), command: found.command, unit: found.unit };
        add(holders.entry(found.device).or_default(), holder);
    }
    holders
}

/// What the service finds for each of `devices`.
pub(super) async fn ask(bus: &Connection, devices: &[PciAddress]) -> zbus::Result<ByDevice> {
    let mut holders = ByDevice::new();
    for device in devices {
        let path = OwnedObjectPath::try_from(format!("{ENTRY}/device/{}", device.node_device_name()))?;
        let found = DeviceProxy::builder(bus).path(path).build().await?.list_holders(Options::new()).await?;
        for record in found {
            add(holders.entry(*device).or_default(), told(&Record(record)));
        }
    }
    Ok(holders)
}

// A process that holds several nodes of a device is one holder.
fn add(holders: &mut Vec<Holder>, holder: Holder) {
    if !holders.contains(&holder) {
        holders.push(holder);
    }
}

fn told(record: &Record) -> Holder {
    let unit = Some(record.text("unit").to_owned()).filter(|unit| !unit.is_empty());
    let pid = record.number("pid").and_then(|pid| u64::try_from(pid).ok()).unwrap_or(0);
    Holder { pid, command: record.text("command").into(), unit }
}

impl Holder {
    /// Whether it is known to hold the device; a process that may not be looked at could.
    pub(super) fn is_known(&self) -> bool {
        self.command != "?"
    }

    /// `nvidia-persistenced[812]`
    pub(super) fn name(&self) -> String {
        format!("{}[{}]", self.command, self.pid)
    }
}
