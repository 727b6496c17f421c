//! `gpuward claims` and `gpuward claim`.

use serde::Serialize;
use vfio::PciAddress;
use zbus::{Connection, OwnedObjectPath, Variant};

use super::args::{ClaimCommand, Claiming, Request};
use super::follow::follow;
use super::names::{called, device_of_path, tenant_name};
use super::output::moment;
use super::{Context, Stop};
use crate::client::{ClaimProxy, DeviceProxy, ENTRY, ManagerProxy, Objects, Options, Record, Spec};
use crate::failure::{ErrorKind, Failure};
use crate::id::ClaimId;

/// A claim as `--json` prints it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Claim {
    claim: String,
    state: String,
    reason: String,
    tenant: String,
    machine: Option<String>,
    domain_uuid: String,
    devices: Vec<String>,
    isolation_level: String,
    release_on: String,
    epoch: u64,
    since: String,
    expires: Option<String>,
}

/// What `claims --json` prints.
#[derive(Debug, Serialize)]
struct Claims {
    claims: Vec<Claim>,
}

/// `gpuward claims`
pub(super) fn list(context: &mut Context) -> Result<(), Stop> {
    let objects = context.client()?.visible()?;
    let mut claims: Vec<_> = objects.iter().filter_map(|(path, object)| Some(told(&objects, path, object.get("Claim")?))).collect();
    claims.sort_by_key(|claim| claim.epoch);
    if context.output.is_json() {
        return Ok(context.output.json(&Claims { claims })?);
    }
    let row = |claim: &Claim| {
        let holder = claim.machine.clone().unwrap_or_else(|| format!("domain {}", claim.domain_uuid));
        let ends = match &claim.expires {
            Some(moment) => format!("{} or {moment}", claim.release_on),
            None => claim.release_on.clone(),
        };
        vec![claim.claim.clone(), claim.state.clone(), claim.devices.join(" "), holder, ends, claim.epoch.to_string(), claim.reason.clone()]
    };
    let rows = claims.iter().map(row).collect();
    Ok(context.output.table(&["CLAIM", "STATE", "DEVICES", "HELD BY", "ENDS ON", "EPOCH", "REASON"], rows)?)
}

/// `gpuward claim …`
pub(super) fn run(context: &mut Context, command: ClaimCommand) -> Result<(), Stop> {
    match command {
        ClaimCommand::Make(claiming) => make(context, claiming),
        ClaimCommand::Release { claim, epoch, request } => release(context, claim, epoch, &request),
        ClaimCommand::Xml { claim } => xml(context, claim),
    }
}

fn make(context: &mut Context, claiming: Claiming) -> Result<(), Stop> {
    let request = claiming.request.clone();
    let options = request.options();
    let call = |bus: Connection| async move {
        let asked = asked_for(&bus, &claiming).await?;
        ManagerProxy::new(&bus).await?.claim(asked, options).await
    };
    let followed = follow(context, &request, call)?;
    let made = followed.made.as_ref().and_then(|made| made.get("claims")?.as_array());
    let claims: Vec<_> = made.into_iter().flatten().filter_map(|path| path.as_str()?.rsplit('/').next()).collect();
    let text = format!("claimed: {}", claims.join(" "));
    followed.say(context, &text)
}

async fn asked_for(bus: &Connection, claiming: &Claiming) -> zbus::Result<Spec> {
    let mut wishes = Vec::new();
    for (kind, count) in [("gpu", claiming.wishes.gpu), ("vf", claiming.wishes.vf)] {
        wishes.extend(count.map(|count| Options::from([("kind", Variant::from(kind)), ("count", Variant::from(count))])));
    }
    for device in &claiming.wishes.device {
        let wish = [("kind", Variant::from(kind_of(bus, *device).await?)), ("identity", Variant::from(device.to_string()))];
        wishes.push(Options::from(wish));
    }
    if let Some(model) = &claiming.model {
        wishes.iter_mut().for_each(|wish| drop(wish.insert("model", Variant::from(model.clone()))));
    }
    Ok(Spec::from([
        ("devices".into(), Variant::from(wishes)),
        ("domain-uuid".into(), Variant::from(claiming.domain.to_string())),
        ("release".into(), Variant::from(claiming.release.clone())),
        ("ttl".into(), Variant::from(claiming.ttl)),
    ]))
}

// Whoever names a device does not have to say what it is.
async fn kind_of(bus: &Connection, device: PciAddress) -> zbus::Result<&'static str> {
    let path = ManagerProxy::new(bus).await?.get_device(&device.to_string()).await?;
    let class = DeviceProxy::builder(bus).path(path).build().await?.class().await?;
    Ok(if class == "virtual-function" { "vf" } else { "gpu" })
}

fn release(context: &mut Context, claim: ClaimId, epoch: Option<u64>, request: &Request) -> Result<(), Stop> {
    let mut options = request.options();
    let call = |bus: Connection| async move {
        let proxy = ClaimProxy::builder(&bus).path(path_of(claim)?).build().await?;
        let epoch = match epoch {
            Some(epoch) => epoch,
            None => proxy.epoch().await?,
        };
        options.insert("epoch", Variant::from(epoch));
        proxy.release(options).await
    };
    let followed = follow(context, request, call).map_err(|stop| stop.of_missing_object(|| absent(claim)))?;
    followed.say(context, &format!("claim {claim} is released"))
}

fn xml(context: &mut Context, claim: ClaimId) -> Result<(), Stop> {
    let client = context.client()?;
    let asked = client.wait(async {
        let proxy = ClaimProxy::builder(client.bus()).path(path_of(claim)?).build().await?;
        proxy.get_hostdev_xml(Options::new()).await
    });
    let xml = asked.map_err(|error| Stop::from(error).of_missing_object(|| absent(claim)))?;
    if context.output.is_json() {
        return Ok(context.output.json(&serde_json::json!({ "claim": claim.to_string(), "xml": xml }))?);
    }
    Ok(context.output.line(xml)?)
}

fn path_of(claim: ClaimId) -> zbus::wire::Result<OwnedObjectPath> {
    OwnedObjectPath::try_from(format!("{ENTRY}/claim/{claim}"))
}

fn absent(claim: ClaimId) -> Failure {
    Failure::new(ErrorKind::Conflict, format!("there is no claim {claim} (any more)")).remedy("`gpuward claims` shows the claims")
}

fn told(objects: &Objects, path: &str, record: &Record) -> Claim {
    let text = |key| record.text(key).to_owned();
    let number = |key| record.number(key).and_then(|number| u64::try_from(number).ok()).unwrap_or_default();
    let devices = record.texts("Devices").into_iter();
    Claim {
        claim: path.rsplit('/').next().unwrap_or_default().to_owned(),
        state: text("State"),
        reason: text("Reason"),
        tenant: tenant_name(objects, record.text("Tenant")),
        machine: Some(record.text("Machine")).filter(|path| *path != "/").map(|path| called(objects, path)),
        domain_uuid: text("DomainUUID"),
        devices: devices.map(|path| device_of_path(&path).map_or(path, |device| device.to_string())).collect(),
        isolation_level: text("IsolationLevel"),
        release_on: text("ReleaseOn"),
        epoch: number("Epoch"),
        since: moment(number("Since")),
        expires: Some(number("Expires")).filter(|seconds| *seconds > 0).map(moment),
    }
}
