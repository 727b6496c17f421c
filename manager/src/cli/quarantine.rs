//! `gpuward reset` and `gpuward quarantine`: cleaning devices, and those that did not come back clean.

use serde::Serialize;
use vfio::PciAddress;

use super::args::{OneDevice, QuarantineCommand};
use super::device::Device;
use super::follow::follow;
use super::{Context, Stop};
use crate::client::{DeviceProxy, ManagerProxy};

/// What is asked of a device.
#[derive(Clone, Copy, Debug)]
enum Wish {
    Reset,
    Clear,
    Recover,
}

/// `gpuward reset DEVICE`
pub(super) fn reset(context: &mut Context, of: &OneDevice) -> Result<(), Stop> {
    ask(context, Wish::Reset, of)
}

/// `gpuward quarantine`
pub(super) fn run(context: &mut Context, command: QuarantineCommand) -> Result<(), Stop> {
    match command {
        QuarantineCommand::List => list(context),
        QuarantineCommand::Clear(of) => ask(context, Wish::Clear, &of),
        QuarantineCommand::Recover(of) => ask(context, Wish::Recover, &of),
    }
}

fn ask(context: &mut Context, wish: Wish, of: &OneDevice) -> Result<(), Stop> {
    let (device, options) = (of.device, of.request.options());
    let followed = follow(context, &of.request, |bus| async move {
        let path = ManagerProxy::new(&bus).await?.get_device(&device.to_string()).await?;
        let device = DeviceProxy::builder(&bus).path(path).build().await?;
        match wish {
            Wish::Reset => device.reset(options).await,
            Wish::Clear => device.clear_quarantine(options).await,
            Wish::Recover => device.recover(options).await,
        }
    })?;
    followed.say(context, &said(wish, device))
}

fn said(wish: Wish, device: PciAddress) -> String {
    match wish {
        Wish::Reset => format!("{device} was reset and answers"),
        Wish::Clear => format!("{device} answers and is out of quarantine"),
        Wish::Recover => format!("{device} was found again, answers and is out of quarantine"),
    }
}

/// What `quarantine list --json` prints.
#[derive(Debug, Serialize)]
struct Listing {
    devices: Vec<Device>,
}

fn list(context: &mut Context) -> Result<(), Stop> {
    let mut devices = Device::told(&context.client()?.objects()?);
    devices.retain(|device| matches!(device.state.as_deref(), Some("quarantined" | "stuck")));
    if context.output.is_json() {
        return Ok(context.output.json(&Listing { devices })?);
    }
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let row = |device: &Device| vec![device.address.clone(), device.name(), text(&device.state), text(&device.reason)];
    Ok(context.output.table(&["DEVICE", "MODEL", "STATE", "REASON"], devices.iter().map(row).collect())?)
}
