//! The entry object.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use vfio::Holders;
use zbus::message::Header;
use zbus::object_server::SignalEmitter;
use zbus::{Connection, Variant, interface};

use super::authority::Action;
use super::clients;
use super::dict::{Dict, Options, Received, node_of, shortened};
use super::error::BusError;
use super::paths::{self, Path};
use super::service::{Conditions, Service, parse_device};
use crate::config::Use;
use crate::doctor::{self, Finding};
use crate::failure::{ErrorKind, Failure};
use crate::id::{JobId, TenantId};
use crate::request::{Ask, Goal, PlanStep, Request};
use crate::spec::{ClaimSpec, MachineSpec, Node};

/// A dictionary on its way out.
pub(super) type Answer = HashMap<String, Variant<'static>>;

/// `org.gpuward1.Manager`
pub(super) struct Manager(pub(super) Arc<Service>);

/// What this daemon can do beyond version 1.0 of the interface; grows with what is added.
const FEATURES: [&str; 6] = ["assign", "claims", "doctor", "machines", "reset", "vfs"];

#[interface(name = "org.gpuward1.Manager")]
impl Manager {
    /// What `Apply` would do for these goals: nothing is changed.
    ///
    /// A goal is `goal` (s: `assign`, `release` or `vfs`), `device` (s: an address); for `assign` `force` (b, default false); for `vfs`
    /// `count` (u: how many virtual functions the device is to have).
    /// No options. Answers `steps` (aa{sv}) in order, each with `stage` (u: steps of one stage run side by side), `device` (s),
    /// `knob` (s), `from` (s) and `to` (s); `refusals` (aa{sv}), each with `error` (s), `message` (s), `why` (as) and `remedy` (s);
    /// and `digest` (s), for `Apply`. No steps and no refusals mean that all is as wished.
    ///
    /// Polkit action: `org.gpuward.inspect`.
    #[zbus(out_args("plan"))]
    async fn plan(&self, goals: Vec<Received>, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Answer, BusError> {
        self.0.check(&header, Action::Inspect, "plan").await?;
        Options::new(options)?.done()?;
        let goals = parse_goals(goals)?;
        let report = self.0.ask(|reply| Ask::Plan(goals, reply)).await?;
        let refusals: Vec<_> = report.refusals.iter().map(|refusal| super::dict::of_failure(Some(refusal))).collect();
        let mut plan = Dict::new();
        plan.put("steps", report.steps.iter().map(step).collect::<Vec<_>>()).put("refusals", refusals).put("digest", report.digest);
        Ok(plan.into_map())
    }

    /// Carries out goals (as in `Plan`) together: all of them, or none.
    ///
    /// Options: `plan-digest` (s: refused with `Conflict` where the plan is another by now), `request-id` (s), `if-generation` (t).
    /// Refusals: HostNotReady, NoSuchDevice, Held, GroupShared, NotViable, AlreadyClaimed, Quarantined, LevelRefused, Busy, Conflict,
    /// TooMany.
    ///
    /// Polkit actions: `org.gpuward.assign`; a goal with `force` needs `org.gpuward.force` too.
    #[zbus(out_args("job"))]
    async fn apply(&self, goals: Vec<Received>, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let caller = self.0.check(&header, Action::Assign, "apply").await?;
        let mut options = Options::new(options)?;
        let (plan_digest, conditions) = (options.text("plan-digest")?, Conditions::take(&mut options)?);
        options.done()?;
        let goals = parse_goals(goals)?;
        if goals.iter().any(|goal| matches!(goal, Goal::Assign { force: true, .. })) {
            self.0.check(&header, Action::Force, "apply").await?;
        }
        self.0.submit(caller, Request::Apply { goals, plan_digest }, conditions).await
    }

    /// The device at an address (`0000:41:00.0`); InvalidSpec where that is none, else NoSuchDevice. Polkit action: `org.gpuward.inspect`.
    #[zbus(out_args("device"))]
    async fn get_device(&self, address: &str, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        self.0.check(&header, Action::Inspect, address).await?;
        let device = parse_device(address)?;
        let known = self.0.view().devices.contains_key(&device);
        let absent = || Failure::new(ErrorKind::NoSuchDevice, format!("there is no device {device} on this host"));
        known.then(|| paths::device(device)).ok_or_else(|| absent().remedy("`gpuward list` shows the devices there are").into())
    }

    /// The devices that a process has open or mapped. Polkit action: `org.gpuward.inspect`.
    #[zbus(name = "GetDevicesByPID", out_args("devices"))]
    async fn get_devices_by_pid(&self, pid: u32, #[zbus(header)] header: Header<'_>) -> Result<Vec<Path>, BusError> {
        self.0.check(&header, Action::Inspect, "process").await?;
        let (host, inventory) = (self.0.host.clone(), self.0.view().inventory.clone());
        let look = move || Holders::by_pid(&host, inventory.devices.values(), pid).found;
        let found = tokio::task::spawn_blocking(look).await.map_err(|error| Failure::of(ErrorKind::Internal, &error))?;
        let devices: BTreeSet<_> = found.iter().map(|holder| holder.device).collect();
        Ok(devices.into_iter().map(paths::device).collect())
    }

    /// The machine of a tenant, both by name. Polkit action: `org.gpuward.inspect`.
    #[zbus(out_args("machine"))]
    async fn get_machine(&self, tenant: &str, name: &str, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        self.0.check(&header, Action::Inspect, name).await?;
        only_tenant(tenant)?;
        let view = self.0.view();
        let found = view.machines.iter().find(|(_, machine)| machine.name == name);
        let absent = || Failure::new(ErrorKind::NoSuchMachine, format!("tenant {tenant} has no machine {:?}", shortened(name)));
        found
            .map(|(id, _)| paths::machine(*id))
            .ok_or_else(|| absent().remedy("`gpuward machine list` shows the machines there are").into())
    }

    /// Every machine: `machine` (o), `name` (s), `tenant` (s), `state` (s). No options. Polkit action: `org.gpuward.inspect`.
    #[zbus(out_args("machines"))]
    async fn list_machines(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Vec<Answer>, BusError> {
        self.0.check(&header, Action::Inspect, "machines").await?;
        Options::new(options)?.done()?;
        let list = |(id, machine): (&crate::id::MachineId, &crate::view::MachineView)| {
            let mut dict = Dict::new();
            dict.put("machine", paths::machine(*id)).put("name", machine.name.clone());
            dict.put("tenant", TenantId::BUILT_IN_NAME.to_owned()).put("state", super::machine::word(machine.state));
            dict.into_map()
        };
        Ok(self.0.view().machines.iter().map(list).collect())
    }

    /// Records a machine, off; nothing is claimed before it starts, unless it holds its claims while it is defined.
    ///
    /// The specification has the keys of `docs/machine-spec.md`; unknown keys are refused by their full path, at most 256 KiB.
    /// Options: `tenant` (s: `default`), `request-id` (s), `if-generation` (t). The job's `Result` has `machine` (o).
    ///
    /// Refusals: InvalidSpec, NotSupported, LevelRefused, NoSuchTenant, NameTaken, HostNotReady, Conflict, TooMany.
    /// Polkit actions: `org.gpuward.manage-machines`; host paths, bridges and kernels need `org.gpuward.configure` too.
    #[zbus(out_args("job"))]
    async fn create_machine(&self, spec: Received, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let caller = self.0.check(&header, Action::ManageMachines, "create").await?;
        let mut options = Options::new(options)?;
        let (tenant, conditions) = (options.text("tenant")?, Conditions::take(&mut options)?);
        options.done()?;
        only_tenant(tenant.as_deref().unwrap_or(TenantId::BUILT_IN_NAME))?;
        let spec = MachineSpec::parse(tree_of(&spec)?)?;
        if let Some(key) = spec.needs_administrator() {
            let named = |failure: Failure| failure.because(format!("{key} names what libvirt would open as root"));
            self.0.check(&header, Action::Configure, &key).await.map_err(named)?;
        }
        self.0.submit(caller, Request::CreateMachine { spec: Box::new(spec) }, conditions).await
    }

    /// Claims devices for a domain that another manager runs: libvirt's hook then lets exactly that domain start with them.
    ///
    /// `request` has `devices` (aa{sv}: wishes, with the keys of `[[device]]` in `docs/machine-spec.md`), `domain-uuid` (s), `tenant` (s:
    /// `default`), `release` (s: what ends the claims: `manual`, the default, only `Claim.Release`; `domain-stopped`, the domain ran and
    /// is gone; `client-gone`, the caller's connection has left the bus) and `ttl` (u: seconds after which they end in any case; 0,
    /// the default: never). Whatever ends a claim, its devices are given to nobody else while a process holds them, and are sanitised
    /// then. A domain that stops or is undefined keeps its `manual` claim.
    ///
    /// Options: `request-id` (s), `if-generation` (t). The job's `Result` has `claims` (ao), one a bundle, and `claim` (o) where it is one.
    /// Refusals: InvalidSpec, NoSuchTenant, NoSuchDevice, NoFit, AlreadyClaimed, Conflict, HostNotReady, TooMany.
    ///
    /// Polkit action: `org.gpuward.manage-machines`.
    #[zbus(out_args("job"))]
    async fn claim(
        &self,
        request: Received,
        options: Received,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<Path, BusError> {
        let caller = self.0.check(&header, Action::ManageMachines, "claim").await?;
        let conditions = Conditions::only(options)?;
        let spec = ClaimSpec::parse(tree_of(&request)?)?;
        only_tenant(&spec.tenant)?;
        let client = clients::caller(&header, connection)?;
        self.0.submit(caller, Request::Claim { spec, client }, conditions).await
    }

    /// Observes the host anew. Options: `request-id` (s), `if-generation` (t). Polkit action: `org.gpuward.inspect`.
    #[zbus(out_args("job"))]
    async fn rescan(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let caller = self.0.check(&header, Action::Inspect, "rescan").await?;
        self.0.submit(caller, Request::Rescan, Conditions::only(options)?).await
    }

    /// What stands between this host and handing out its devices. Each finding has `check` (s: stable, as in `docs/doctor.md`), `subject` (s: an
    /// address; empty for the host), `severity` (s: `ok`, `note`, `warning` or `problem`), `message` (s), `evidence` (as) and `remedy` (s).
    /// Nothing is changed. No options. Polkit action: `org.gpuward.inspect`.
    #[zbus(out_args("findings"))]
    async fn doctor(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Vec<Answer>, BusError> {
        self.0.check(&header, Action::Inspect, "doctor").await?;
        Options::new(options)?.done()?;
        let (host, view) = (self.0.host.clone(), self.0.view());
        let wanted = view.devices.iter().filter(|(_, device)| device.use_ != Use::Observe).map(|(address, _)| *address).collect();
        let look = move || doctor::examine(&host, &view.inventory, &wanted);
        let findings = tokio::task::spawn_blocking(look).await.map_err(|error| Failure::of(ErrorKind::Internal, &error))?;
        Ok(findings.iter().map(finding).collect())
    }

    /// How a job ended, for a client that came late: what `Job.Wait` answers, with the state of one that is not over. Polkit action: `org.gpuward.inspect`.
    #[zbus(out_args("result"))]
    async fn get_job_result(&self, job: u64, #[zbus(header)] header: Header<'_>) -> Result<Answer, BusError> {
        self.0.check(&header, Action::Inspect, "job").await?;
        let view = self.0.view();
        let absent = || Failure::new(ErrorKind::Conflict, format!("there is no job {job} any more")).remedy("the last jobs are kept");
        Ok(super::job::outcome(view.jobs.get(&JobId(job)).ok_or_else(absent)?))
    }

    /// A job was admitted: `kind` (s), `objects` (ao), `request-id` (s).
    #[zbus(signal)]
    pub(super) async fn job_new(emitter: &SignalEmitter<'_>, id: u64, job: Path, details: Answer) -> zbus::Result<()>;

    /// A job ended; every object and property says already what came of it. `result` is the job's last state. Details:
    /// `error` (s), `message` (s), `objects` (ao), `request-id` (s), `generation` (t).
    #[zbus(signal)]
    pub(super) async fn job_removed(emitter: &SignalEmitter<'_>, id: u64, job: Path, result: &str, details: Answer) -> zbus::Result<()>;

    /// Something happened that properties do not tell. `seq` grows by one with each event of this `InstanceId`. Kinds:
    /// claim-made, claim-released, sanitised, quarantined, drifted, stuck, device-gone, machine-started, machine-stopped.
    #[zbus(signal)]
    pub(super) async fn event(emitter: &SignalEmitter<'_>, seq: u64, kind: &str, subject: Path, details: Answer) -> zbus::Result<()>;

    /// The daemon's version.
    #[zbus(property(emits_changed_signal = "const"))]
    fn version(&self) -> &'static str {
        env!("CARGO_PKG_VERSION")
    }

    /// What this daemon can do beyond the first version of the interface. The set may grow.
    #[zbus(property(emits_changed_signal = "const"))]
    fn features(&self) -> Vec<&'static str> {
        FEATURES.to_vec()
    }

    /// Another at each start of the daemon: with another one, read everything anew.
    #[zbus(property(emits_changed_signal = "const"))]
    fn instance_id(&self) -> &str {
        &self.0.instance
    }

    /// `recovering` (changes answer HostNotReady), `ready`, or `degraded` (read-only, see `HostStateReason`).
    #[zbus(property)]
    fn host_state(&self) -> &'static str {
        self.0.view().host_state.word()
    }

    /// Which file is wrong and what to do, while `degraded`; else empty.
    #[zbus(property)]
    fn host_state_reason(&self) -> String {
        match &self.0.view().host_state {
            crate::view::HostState::Degraded { reason } => reason.clone(),
            crate::view::HostState::Recovering | crate::view::HostState::Ready => String::new(),
        }
    }

    /// Grows with each change of anything published.
    #[zbus(property(emits_changed_signal = "false"))]
    fn generation(&self) -> u64 {
        self.0.view().generation
    }
}

fn tree_of(spec: &Received) -> Result<Node, Failure> {
    let entries = spec.iter().map(|(key, value)| Ok((key.clone(), node_of(value, key)?)));
    Ok(Node::Table(entries.collect::<Result<_, Failure>>()?))
}

fn only_tenant(name: &str) -> Result<(), Failure> {
    let known = name == TenantId::BUILT_IN_NAME;
    let absent =
        || Failure::new(ErrorKind::NoSuchTenant, format!("there is no tenant {:?}; there is {}", shortened(name), TenantId::BUILT_IN_NAME));
    known.then_some(()).ok_or_else(absent)
}

fn parse_goals(goals: Vec<Received>) -> Result<Vec<Goal>, Failure> {
    if goals.is_empty() {
        return Err(Failure::new(ErrorKind::InvalidSpec, "there is no goal"));
    }
    goals.into_iter().map(parse_goal).collect()
}

fn parse_goal(goal: Received) -> Result<Goal, Failure> {
    let mut keys = Options::new(goal)?;
    let missing = |key: &str| Failure::new(ErrorKind::InvalidSpec, format!("a goal has no {key}"));
    let device = parse_device(&keys.text("device")?.ok_or_else(|| missing("device"))?)?;
    let goal = match keys.text("goal")?.ok_or_else(|| missing("goal"))?.as_str() {
        "assign" => Goal::Assign { device, force: keys.flag("force")? },
        "release" => Goal::Release { device },
        "vfs" => Goal::Vfs { device, count: count(keys.number("count")?.ok_or_else(|| missing("count"))?)? },
        other => {
            return Err(Failure::new(
                ErrorKind::InvalidSpec,
                format!("{:?} is no goal; there are assign, release and vfs", shortened(other)),
            ));
        }
    };
    keys.done().map(|()| goal)
}

fn finding(finding: &Finding) -> Answer {
    let mut dict = Dict::new();
    dict.put("check", finding.check).put("subject", finding.subject.clone()).put("severity", finding.severity.word());
    dict.put("message", finding.message.clone()).put("evidence", finding.evidence.clone()).put("remedy", finding.remedy.clone());
    dict.into_map()
}

/// A number of virtual functions: SR-IOV counts them in 16 bits.
pub(super) fn count(count: u64) -> Result<u16, Failure> {
    u16::try_from(count)
        .map_err(|_| Failure::new(ErrorKind::InvalidSpec, format!("{count} is more virtual functions than any device can have")))
}

fn step(step: &PlanStep) -> Answer {
    let mut dict = Dict::new();
    dict.put("stage", step.stage).put("device", step.device.to_string()).put("knob", step.knob.clone());
    dict.put("from", step.from.clone()).put("to", step.to.clone());
    dict.into_map()
}
