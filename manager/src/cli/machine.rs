//! `gpuward machine`.

use std::os::fd::OwnedFd;
use std::path::Path;

use serde::Serialize;
use zbus::{Connection, OwnedObjectPath, Variant};

use super::args::{MachineCommand, OneMachine, Request};
use super::follow::follow;
use super::names::{MachineName, device_of_path, tenant_name};
use super::output::details;
use super::{Context, Stop, spec};
use crate::client::{MachineProxy, ManagerProxy, Objects, Options, Record, failure_in};
use crate::failure::{ErrorKind, Failure};
use crate::id::TenantId;

/// A machine as `--json` prints it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Machine {
    name: String,
    tenant: String,
    uuid: String,
    state: String,
    reason: String,
    isolation_level: String,
    devices: Vec<String>,
    device_map: Vec<Given>,
    leader: Option<u64>,
    guest_state: String,
    error: Option<Failure>,
}

/// What `machine list --json` prints.
#[derive(Debug, Serialize)]
struct Machines {
    machines: Vec<Machine>,
}

/// What `machine explain --json` prints.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Explanation {
    state: String,
    reason: String,
    guest_state: String,
    waits_for: String,
    deadline: Option<u32>,
    deadline_made_of: String,
    reboots: u32,
    error: Option<Failure>,
}

/// A device of a machine, as `--json` prints it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Given {
    host_address: String,
    guest_address: Option<String>,
    alias: String,
    claim: String,
}

/// What is done to a machine that is there.
#[derive(Clone, Copy, Debug)]
enum Verb {
    Start,
    Stop,
    Kill,
    Reboot,
    Remove,
}

/// `gpuward machine …`
pub(super) fn run(context: &mut Context, command: MachineCommand) -> Result<(), Stop> {
    match command {
        MachineCommand::Create { name, file, request } => create(context, &name, &file, &request),
        MachineCommand::Start(machine) => act(context, Verb::Start, &machine),
        MachineCommand::Stop(machine) => act(context, Verb::Stop, &machine),
        MachineCommand::Kill(machine) => act(context, Verb::Kill, &machine),
        MachineCommand::Reboot(machine) => act(context, Verb::Reboot, &machine),
        MachineCommand::Console { name } => console(context, &name),
        MachineCommand::Explain { name } => explain(context, &name),
        MachineCommand::Remove(machine) => act(context, Verb::Remove, &machine),
        MachineCommand::List => list(context),
        MachineCommand::Show { name } => show(context, &name),
    }
}

fn create(context: &mut Context, name: &MachineName, file: &Path, request: &Request) -> Result<(), Stop> {
    let spec = spec::read(file, name)?;
    let mut options = request.options();
    if name.tenant != TenantId::BUILT_IN_NAME {
        options.insert("tenant", Variant::from(name.tenant.clone()));
    }
    let create = |bus: Connection| async move { ManagerProxy::new(&bus).await?.create_machine(spec, options).await };
    follow(context, request, create)?.say(context, &format!("machine {name} is made, and off"))
}

fn act(context: &mut Context, verb: Verb, machine: &OneMachine) -> Result<(), Stop> {
    let OneMachine { name, request } = machine;
    let (wanted, options) = (name.clone(), request.options());
    let call = |bus: Connection| async move {
        let path = find(&bus, &wanted).await?;
        let machine = MachineProxy::builder(&bus).path(path).build().await?;
        match verb {
            Verb::Start => machine.start(options).await,
            Verb::Stop => machine.stop(options).await,
            Verb::Kill => machine.kill(options).await,
            Verb::Reboot => machine.reboot(options).await,
            Verb::Remove => machine.remove(options).await,
        }
    };
    let done = match verb {
        Verb::Start => "is running",
        Verb::Stop => "is off",
        Verb::Kill => "is off, killed",
        Verb::Reboot => "was asked to reboot",
        Verb::Remove => "is forgotten",
    };
    follow(context, request, call)?.say(context, &format!("machine {name} {done}"))
}

fn console(context: &mut Context, name: &MachineName) -> Result<(), Stop> {
    let client = context.client()?;
    let open = async {
        let machine = MachineProxy::builder(client.bus()).path(find(client.bus(), name).await?).build().await?;
        machine.open_console(Options::new()).await
    };
    let socket = OwnedFd::from(client.wait(open)?);
    super::console::talk(&socket.into(), &name.to_string())
}

fn explain(context: &mut Context, name: &MachineName) -> Result<(), Stop> {
    let client = context.client()?;
    let ask = async {
        let machine = MachineProxy::builder(client.bus()).path(find(client.bus(), name).await?).build().await?;
        machine.explain(Options::new()).await
    };
    let told = Record(client.wait(ask)?);
    let explanation = Explanation {
        state: told.text("state").into(),
        reason: told.text("reason").into(),
        guest_state: told.text("guest-state").into(),
        waits_for: told.text("waits-for").into(),
        deadline: told.number("deadline").and_then(|seconds| u32::try_from(seconds).ok()),
        deadline_made_of: told.text("deadline-made-of").into(),
        reboots: told.number("reboots").and_then(|count| u32::try_from(count).ok()).unwrap_or_default(),
        error: failure_in(&told.record("error")),
    };
    if context.output.is_json() {
        return Ok(context.output.json(&explanation)?);
    }
    let Explanation { state, reason, guest_state, waits_for, deadline, deadline_made_of, reboots, error } = explanation;
    let lines = [
        ("state", [state.as_str(), reason.as_str()].join(" ").trim().to_owned()),
        ("guest", guest_state),
        ("reboots", reboots.to_string()),
        ("waits for", waits_for),
        ("deadline", deadline.map(|seconds| format!("{seconds} s = {deadline_made_of}")).unwrap_or_default()),
        ("failure", error.map(|failure| failure.to_string()).unwrap_or_default()),
    ];
    Ok(context.output.line(details(&name.to_string(), &lines))?)
}

async fn find(bus: &Connection, name: &MachineName) -> zbus::Result<OwnedObjectPath> {
    ManagerProxy::new(bus).await?.get_machine(&name.tenant, &name.name).await
}

fn list(context: &mut Context) -> Result<(), Stop> {
    let objects = context.client()?.visible()?;
    let all = objects.values().filter_map(|interfaces| Some(told(&objects, interfaces.get("Machine")?)));
    let mut machines: Vec<_> = all.collect();
    machines.sort_by(|one, other| (&one.tenant, &one.name).cmp(&(&other.tenant, &other.name)));
    if context.output.is_json() {
        return Ok(context.output.json(&Machines { machines })?);
    }
    let row = |machine: &Machine| {
        let name = format!("{}/{}", machine.tenant, machine.name);
        vec![name, machine.state.clone(), machine.isolation_level.clone(), machine.devices.join(" "), machine.reason.clone()]
    };
    let rows = machines.iter().map(row).collect();
    Ok(context.output.table(&["MACHINE", "STATE", "ISOLATION", "DEVICES", "REASON"], rows)?)
}

fn show(context: &mut Context, name: &MachineName) -> Result<(), Stop> {
    let client = context.client()?;
    let path = client.wait(find(client.bus(), name))?;
    let objects = client.visible()?;
    let told = objects.get(path.as_str()).and_then(|interfaces| Some(told(&objects, interfaces.get("Machine")?)));
    let gone = || Stop::Failed(Box::new(Failure::new(ErrorKind::NoSuchMachine, format!("there is no machine {name} any more"))));
    let machine = told.ok_or_else(gone)?;
    if context.output.is_json() {
        return Ok(context.output.json(&machine)?);
    }
    let lines = [
        ("uuid", machine.uuid.clone()),
        ("state", [machine.state.as_str(), machine.reason.as_str()].join(" ").trim().to_owned()),
        ("isolation", machine.isolation_level.clone()),
        ("devices", machine.device_map.iter().map(Given::in_words).collect::<Vec<_>>().join(" ")),
        ("qemu", machine.leader.map(|pid| format!("process {pid}")).unwrap_or_default()),
        ("guest", machine.guest_state.clone()),
        ("failure", machine.error.as_ref().map(ToString::to_string).unwrap_or_default()),
    ];
    Ok(context.output.line(details(&name.to_string(), &lines))?)
}

impl Given {
    fn read(record: &Record) -> Self {
        let claim = record.text("claim");
        Self {
            host_address: record.text("host-address").into(),
            guest_address: Some(record.text("guest-address").to_owned()).filter(|address| !address.is_empty()),
            alias: record.text("alias").into(),
            claim: claim.rsplit('/').next().unwrap_or(claim).into(),
        }
    }

    fn in_words(&self) -> String {
        match &self.guest_address {
            Some(guest) => format!("{} (in the guest {guest})", self.host_address),
            None => self.host_address.clone(),
        }
    }
}

fn told(objects: &Objects, record: &Record) -> Machine {
    let text = |key| record.text(key).to_owned();
    let claims = record.texts("Claims").into_iter();
    let devices = claims.filter_map(|claim| Some(objects.get(&claim)?.get("Claim")?.texts("Devices"))).flatten();
    Machine {
        name: text("Name"),
        tenant: tenant_name(objects, record.text("Tenant")),
        uuid: text("UUID"),
        state: text("State"),
        reason: text("Reason"),
        isolation_level: text("IsolationLevel"),
        devices: devices.map(|path| device_of_path(&path).map_or(path, |device| device.to_string())).collect(),
        device_map: record.records("DeviceMap").iter().map(Given::read).collect(),
        leader: record.number("Leader").and_then(|pid| u64::try_from(pid).ok()).filter(|pid| *pid > 0),
        guest_state: text("GuestState"),
        error: failure_in(&record.record("Error")),
    }
}
