//! The entry object.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use vfio::Holders;
use zbus::message::Header;
use zbus::object_server::SignalEmitter;
use zbus::{Connection, Variant, interface};

use super::authority::{Action, Caller};
use super::clients;
use super::dict::{Dict, Options, Received, shortened, tree_of};
use super::error::BusError;
use super::guard::Belongs;
use super::paths::{self, Path};
use super::preflight::Wanted;
use super::service::{Conditions, Service, parse_device};
use crate::config::Use;
use crate::doctor::{self, Finding};
use crate::failure::{ErrorKind, Failure};
use crate::id::{JobId, MachineId, TenantId};
use crate::preflight;
use crate::request::{Ask, Goal, PlanStep, Planned, Request, TenantChange};
use crate::spec::{ClaimSpec, MachineSpec, TenantSpec};
use crate::view::{MachineView, View};

/// A dictionary on its way out.
pub(super) type Answer = HashMap<String, Variant<'static>>;

/// `org.gpuward1.Manager`
pub(super) struct Manager(pub(super) Arc<Service>);

/// What this daemon can do beyond version 1.0 of the interface; grows with what is added.
const FEATURES: [&str; 8] = ["assign", "claims", "doctor", "machines", "preflight", "reset", "tenants", "vfs"];

impl Manager {
    /// The tenant with this name, for a caller who may do `action` for it. To others absent and foreign ones are alike.
    async fn tenant(&self, header: &Header<'_>, action: Action, name: &str) -> Result<(Caller, TenantId), Failure> {
        let found = self.0.view().tenant_called(name);
        let caller = self.0.check_own(header, (action, Belongs::ToTenant(found, None)), shortened(name)).await?;
        Ok((caller, found.ok_or_else(|| no_tenant(name))?))
    }

    /// The machine of a tenant that the caller may look at, by its name.
    fn machine(&self, id: TenantId, tenant: &str, name: &str) -> Result<MachineId, Failure> {
        let view = self.0.view();
        let found = view.machines.iter().find(|(_, machine)| machine.tenant == id && machine.name == name);
        let absent = || Failure::new(ErrorKind::NoSuchMachine, format!("tenant {tenant} has no machine {:?}", shortened(name)));
        found.map(|(id, _)| *id).ok_or_else(|| absent().remedy("`gpuward machine list` shows the machines there are"))
    }

    /// Whether the caller may name what a specification names.
    async fn may_name(&self, header: &Header<'_>, spec: &MachineSpec) -> Result<(), Failure> {
        let Some(key) = spec.needs_administrator() else { return Ok(()) };
        let named = |failure: Failure| failure.because(format!("{key} names what libvirt would open as root"));
        self.0.check(header, Action::Configure, &key).await.map(drop).map_err(named)
    }

    /// The tenants that the caller may list, with their machines; `None`: all.
    async fn own_tenants(&self, header: &Header<'_>) -> Result<Option<BTreeSet<TenantId>>, Failure> {
        let who = self.0.authority.who(header).await?;
        let view = self.0.view();
        let own: BTreeSet<_> = view.tenants.keys().filter(|id| view.is_owner(**id, who.uid, &who.groups)).copied().collect();
        if who.sees_everything || own.is_empty() {
            self.0.check(header, Action::Inspect, "tenants").await?;
            return Ok(None);
        }
        self.0.check(header, Action::UseOwn, "tenants").await?;
        Ok(Some(own))
    }
}

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

    /// The tenant with this name. Polkit action: `org.gpuward.inspect`; `org.gpuward.use-own` for owners.
    #[zbus(out_args("tenant"))]
    async fn get_tenant(&self, name: &str, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        Ok(paths::tenant(self.tenant(&header, Action::Inspect, name).await?.1))
    }

    /// The machine of a tenant, both by name. Polkit action: `org.gpuward.inspect`; `org.gpuward.use-own` for owners.
    #[zbus(out_args("machine"))]
    async fn get_machine(&self, tenant: &str, name: &str, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let id = self.tenant(&header, Action::Inspect, tenant).await?.1;
        Ok(paths::machine(self.machine(id, tenant, name)?))
    }

    /// Every machine that the caller may see, an owner those of their tenants: `machine` (o), `name` (s), `tenant` (s), `state` (s).
    ///
    /// No options. Polkit action: `org.gpuward.inspect`; `org.gpuward.use-own` for owners.
    #[zbus(out_args("machines"))]
    async fn list_machines(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Vec<Answer>, BusError> {
        let own = self.own_tenants(&header).await?;
        Options::new(options)?.done()?;
        let view = self.0.view();
        Ok(machines_of(&view, |tenant| own.as_ref().is_none_or(|own| own.contains(&tenant))))
    }

    /// Every tenant that the caller may see, an owner their own: `tenant` (o), `name` (s).
    ///
    /// No options. Polkit action: `org.gpuward.inspect`; `org.gpuward.use-own` for owners.
    #[zbus(out_args("tenants"))]
    async fn list_tenants(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Vec<Answer>, BusError> {
        let own = self.own_tenants(&header).await?;
        Options::new(options)?.done()?;
        let view = self.0.view();
        let seen = view.tenants.iter().filter(|(id, _)| own.as_ref().is_none_or(|own| own.contains(*id)));
        let told = seen.map(|(id, tenant)| {
            let mut dict = Dict::new();
            dict.put("tenant", paths::tenant(*id)).put("name", tenant.spec.name.clone());
            dict.into_map()
        });
        Ok(told.collect())
    }

    /// Records a tenant: who may act for it, and what it may have.
    ///
    /// The specification has `format` (u: 1), `name` (s), `uuid` (s: its path is known beforehand then), `owners` (a{sv}: `users` au,
    /// `groups` au), `trust-domain` (s), `minimum-isolation` (s), `share-gpu` (s), `networks` (as), `pools` (as) and `quota` (a{sv}: `gpus`,
    /// `vfs`, `machines`, `vcpus` u, `memory` t; or `unlimited` s). `docs/tenants.md` says what each means; a key of the quota that is
    /// missing allows nothing. Options: `request-id` (s), `if-generation` (t). The job's `Result` has `tenant` (o).
    ///
    /// Refusals: InvalidSpec, NameTaken, HostNotReady, Conflict, TooMany. Polkit action: `org.gpuward.manage-tenants`.
    #[zbus(out_args("job"))]
    async fn create_tenant(&self, spec: Received, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let caller = self.0.check(&header, Action::ManageTenants, "create").await?;
        let conditions = Conditions::only(options)?;
        let (id, spec) = TenantSpec::parse(tree_of(&spec)?)?;
        let request = Request::Tenant(TenantChange::Create { tenant: id.unwrap_or_else(TenantId::random), spec: Box::new(spec) });
        self.0.submit(caller, request, conditions).await
    }

    /// Records a machine, off; nothing is claimed before it starts, unless it holds its claims while it is defined.
    ///
    /// The specification has the keys of `docs/machine-spec.md`; unknown keys are refused by their full path, at most 256 KiB.
    /// Options: `tenant` (s: its name, default `default`), `request-id` (s), `if-generation` (t). The job's `Result` has `machine` (o).
    ///
    /// Refusals: InvalidSpec, NotSupported, LevelRefused, QuotaExceeded, NoSuchTenant, NameTaken, HostNotReady, Conflict, TooMany;
    /// NotAuthorized for networks and pools that are not the tenant's.
    /// Polkit actions: `org.gpuward.manage-machines`, `org.gpuward.use-own` for owners; host paths, bridges and kernels need `org.gpuward.configure` too.
    #[zbus(out_args("job"))]
    async fn create_machine(&self, spec: Received, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let (caller, tenant) = self.tenant(&header, Action::ManageMachines, named_tenant(&options)).await?;
        let mut options = Options::new(options)?;
        let conditions = Conditions::take(&mut options)?;
        options.text("tenant")?;
        options.done()?;
        let spec = MachineSpec::parse(tree_of(&spec)?)?;
        self.may_name(&header, &spec).await?;
        self.0.submit(caller, Request::CreateMachine { tenant, spec: Box::new(spec) }, conditions).await
    }

    /// Claims devices for a domain that another manager runs: libvirt's hook then lets exactly that domain start with them.
    ///
    /// `request` has `devices` (aa{sv}: wishes, with the keys of `[[device]]` in `docs/machine-spec.md`), `domain-uuid` (s), `tenant` (s: its
    /// name, default `default`), `release` (s: what ends the claims: `manual`, the default, only `Claim.Release`; `domain-stopped`, the domain ran and
    /// is gone; `client-gone`, the caller's connection has left the bus) and `ttl` (u: seconds after which they end in any case; 0,
    /// the default: never). Whatever ends a claim, its devices are given to nobody else while a process holds them, and are sanitised
    /// then. A domain that stops or is undefined keeps its `manual` claim.
    ///
    /// Options: `request-id` (s), `if-generation` (t). The job's `Result` has `claims` (ao), one a bundle, and `claim` (o) where it is one.
    /// Refusals: InvalidSpec, NoSuchTenant, LevelRefused, QuotaExceeded, NoSuchDevice, NoFit, AlreadyClaimed, Conflict, HostNotReady, TooMany.
    ///
    /// Polkit action: `org.gpuward.manage-machines`; `org.gpuward.use-own` for owners.
    #[zbus(out_args("job"))]
    async fn claim(
        &self,
        request: Received,
        options: Received,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<Path, BusError> {
        let (caller, tenant) = self.tenant(&header, Action::ManageMachines, named_tenant(&request)).await?;
        let conditions = Conditions::only(options)?;
        let spec = ClaimSpec::parse(tree_of(&request)?)?;
        let client = clients::caller(&header, connection)?;
        self.0.submit(caller, Request::Claim { tenant, spec, client }, conditions).await
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

    /// What speaks against starting a machine here and now, as each start looks itself before it changes anything; nothing is changed and nothing claimed.
    ///
    /// `request` has `tenant` (s: its name, default `default`) and either `machine` (s: the name of one of its machines, which is off) or `spec`
    /// (a{sv}: as for `CreateMachine`). Each finding has `code` (s: stable, as in `docs/preflight.md`), `severity` (s: `error`, the start would be
    /// refused; `warning`; `info`), `subject` (s: an address; empty for the whole), `message` (s), `evidence` (as) and `remedy` (s), the gravest first.
    /// What cannot be observed is an `info` that says so. The set of codes may grow.
    ///
    /// Refusals: InvalidSpec, UnknownOption, NotSupported, LevelRefused, NoSuchTenant, NoSuchMachine, Conflict (it is not off), HypervisorFailed;
    /// NotAuthorized for networks and pools that are not the tenant's.
    /// Polkit actions: `org.gpuward.inspect`, `org.gpuward.use-own` for owners; host paths, bridges and kernels in `spec` need `org.gpuward.configure` too.
    #[zbus(out_args("findings"))]
    async fn preflight(&self, request: Received, #[zbus(header)] header: Header<'_>) -> Result<Vec<Answer>, BusError> {
        let name = named_tenant(&request);
        let tenant = self.tenant(&header, Action::Inspect, name).await?.1;
        let planned = match Wanted::parse(&request)? {
            Wanted::Machine(machine) => Planned::Machine(self.machine(tenant, name, &machine)?),
            Wanted::Spec(spec) => {
                self.may_name(&header, &spec).await?;
                Planned::Spec { tenant, spec }
            }
        };
        let case = self.0.ask(|reply| Ask::Preflight(planned, reply)).await?;
        let host = self.0.host.clone();
        let look = move || preflight::examine(&host, &case);
        let findings = tokio::task::spawn_blocking(look).await.map_err(|error| Failure::of(ErrorKind::Internal, &error))?;
        Ok(findings.iter().map(super::preflight::finding).collect())
    }

    /// How a job ended, for a client that came late: what `Job.Wait` answers, with the state of one that is not over. Polkit action: `org.gpuward.inspect`.
    #[zbus(out_args("result"))]
    async fn get_job_result(&self, job: u64, #[zbus(header)] header: Header<'_>) -> Result<Answer, BusError> {
        let view = self.0.view();
        self.0.check_own(&header, (Action::Inspect, super::job::of_job(&view, JobId(job))), "job").await?;
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

/// The machines of some tenants, for a list.
pub(super) fn machines_of(view: &View, wanted: impl Fn(TenantId) -> bool) -> Vec<Answer> {
    let list = |(id, machine): (&MachineId, &MachineView)| {
        let tenant = view.tenants.get(&machine.tenant).map(|tenant| tenant.spec.name.clone()).unwrap_or_default();
        let mut dict = Dict::new();
        dict.put("machine", paths::machine(*id)).put("name", machine.name.clone());
        dict.put("tenant", tenant).put("state", super::machine::word(machine.state));
        dict.into_map()
    };
    view.machines.iter().filter(|(_, machine)| wanted(machine.tenant)).map(list).collect()
}

// Read before anything else is: who may not act for it learns nothing about the rest. What is no text is refused later, by its key.
fn named_tenant(received: &Received) -> &str {
    match received.get("tenant").map(|value| -> &Variant<'static> { value }) {
        Some(Variant::Str(name)) => name.as_str(),
        Some(_) | None => TenantId::BUILT_IN_NAME,
    }
}

fn no_tenant(name: &str) -> Failure {
    let failure = Failure::new(ErrorKind::NoSuchTenant, format!("there is no tenant {:?}", shortened(name)));
    failure.remedy("`gpuward tenant list` shows the tenants there are")
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
