//! Tenants on a simulated host: what each may have and name, and what one sees of the other.
#![allow(clippy::expect_used)]

use std::collections::HashMap;
use std::path::Path;

use manager::client::{CallError, Client, Dict, JobProxy, MachineProxy, ManagerProxy, Options, Record, Spec};
use manager::failure::{ErrorKind, Failure};
use tests::operated::{MANAGER, Operated, path_of};
use tests::person::Person;
use tests::polkit::Who;
use zbus::{OwnedObjectPath, Variant};

const GPUS: [&str; 2] = ["0000:1b:00.0", "0000:43:00.0"];
// Users and groups that every Debian has: dbus-daemon admits nobody whom it cannot look up.
const ALICE: u32 = 1;
const BOB: u32 = 2;
const ACME_GROUP: u32 = 100;

/// Two tenants, each with an owner whom polkit lets use what is their own.
struct Host {
    operated: Operated,
}

impl Host {
    fn start() -> Self {
        let operated = Operated::start("dgx-h100", Path::new(env!("CARGO_BIN_EXE_gpuward-sim"))).expect("the daemon comes up");
        operated.session.polkit.allow("org.gpuward.use-own", Who::Anybody);
        let host = Self { operated };
        host.done(MANAGER, "CreateTenant", &(tenant("acme", ALICE), Options::new()));
        host.done(MANAGER, "CreateTenant", &(tenant("rival", BOB), Options::new()));
        for gpu in GPUS {
            host.done((&path_of(gpu), "Device"), "Assign", &(Options::new(),));
        }
        host
    }

    fn done<B: serde::Serialize + zbus::wire::DynamicType>(&self, at: (&str, &str), member: &str, body: &B) -> Record {
        let ended = self.operated.finish(at, member, body).expect("admitted");
        assert_eq!(ended.text("state"), "done", "{member}: {ended:?}");
        ended.record("result")
    }

    fn tenant(&self, name: &str) -> String {
        let path: OwnedObjectPath =
            self.operated.call(MANAGER, "GetTenant", &(name,)).expect("there").body().deserialize().expect("a path");
        path.to_string()
    }

    fn refused(&self, member: &str, body: &(Options<'_>, Options<'_>)) -> Failure {
        self.operated.refused(MANAGER, member, body)
    }

    fn as_owner<T: Send>(&self, uid: u32, act: impl FnOnce(&Client) -> T + Send) -> T {
        Person::alone(uid).with_client(self.operated.session.address(), act).expect("root can be them")
    }

    /// Machines of both, each with a GPU, started by their owners; their paths.
    fn both_running(&self) -> [String; 2] {
        [(ALICE, "acme"), (BOB, "rival")].map(|(uid, tenant)| self.as_owner(uid, |client| run_machine(client, tenant)))
    }
}

fn options<const N: usize>(entries: [(&'static str, Variant<'static>); N]) -> Options<'static> {
    Options::from(entries)
}

fn of(tenant: &str) -> Options<'static> {
    options([("tenant", tenant.to_owned().into())])
}

fn tenant(name: &'static str, owner: u32) -> Options<'static> {
    let owners: HashMap<String, Variant<'static>> = HashMap::from([("users".into(), vec![owner].into())]);
    let number = Variant::from;
    let quota: HashMap<String, Variant<'static>> =
        HashMap::from([("gpus".into(), number(1_u32)), ("machines".into(), number(2_u32)), ("vcpus".into(), number(4_u32))]);
    let quota: HashMap<String, Variant<'static>> = quota.into_iter().chain([("memory".into(), Variant::from(4_u64 << 30))]).collect();
    options([
        ("format", 1_u32.into()),
        ("name", name.into()),
        ("owners", owners.into()),
        ("networks", vec![format!("{name}-net")].into()),
        ("pools", vec![format!("{name}-pool")].into()),
        ("quota", quota.into()),
    ])
}

fn machine(name: &'static str, volume: String) -> Options<'static> {
    let disk = options([("volume", volume.into())]);
    options([
        ("format", 1_u32.into()),
        ("name", name.into()),
        ("vcpus", 1_u32.into()),
        ("memory", (1_u64 << 30).into()),
        ("disk", vec![disk].into()),
        ("device", vec![options([("kind", "gpu".into())])].into()),
    ])
}

fn sent(spec: Options<'static>) -> Spec {
    spec.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

fn finish(client: &Client, job: OwnedObjectPath) -> Record {
    let ended: Dict = client
        .wait(async { JobProxy::builder(client.bus()).path(job).build().await?.wait(Options::new()).await })
        .expect("the owner sees their job");
    Record(ended)
}

fn run_machine(client: &Client, tenant: &str) -> String {
    let spec = sent(machine("train", format!("{tenant}-pool/a")));
    let job = client.wait(async { ManagerProxy::new(client.bus()).await?.create_machine(spec, of(tenant)).await }).expect("admitted");
    let made = finish(client, job);
    assert_eq!(made.text("state"), "done", "{made:?}");
    let path = made.record("result").text("machine").to_owned();
    let start = async {
        let machine = MachineProxy::builder(client.bus()).path(zbus::ObjectPath::try_from(path.as_str())?).build().await?;
        machine.start(Options::new()).await
    };
    let started = finish(client, client.wait(start).expect("admitted"));
    assert_eq!(started.text("state"), "done", "{started:?}");
    path
}

/// How a call ends for whoever makes it: its error's name and text.
fn answer<B: serde::Serialize + zbus::wire::DynamicType>(client: &Client, path: &str, call: (&str, &str), body: &B) -> String {
    let answered = client.wait(client.bus().call_method(Some("org.gpuward1"), path, Some(call.0), call.1, body));
    match answered {
        Ok(message) => format!("answered {:?}", message.body()),
        Err(CallError::Answered(failure)) => format!("{} {}", failure.kind, failure.message),
        Err(CallError::NoObject(error)) => format!("no object {error}"),
        Err(error) => format!("{error:?}"),
    }
}

#[test]
#[cfg_attr(unprivileged, ignore = "only root can be somebody else")]
fn two_tenants_run_at_once_and_neither_sees_the_other() {
    let host = Host::start();
    let [acme, rival] = host.both_running();
    let other = host.operated.objects().expect("seen");
    let claim = other[&rival]["Machine"].texts("Claims")[0].clone();
    let job = other.iter().find(|(path, _)| path.contains("/job/") && other[*path]["Job"].number("StartedByUID") == Some(i128::from(BOB)));
    let job = job.expect("Bob asked for one").0.clone();
    host.as_owner(ALICE, |client| {
        let names: Vec<_> = client.visible().expect("seen").into_keys().collect();
        assert_eq!(names.iter().filter(|path| path.contains("/machine/")).collect::<Vec<_>>(), [&acme]);
        assert!(!names.contains(&claim) && names.len() == 3, "a machine, its claim and its tenant: {names:?}");
        let absent = |path: &str| path[..path.len() - 4].to_owned() + "0000";
        let tenant = host_path(&other, "rival");
        for (path, interface) in [(&rival, "Machine"), (&claim, "Claim"), (&tenant, "Tenant"), (&job, "Job")] {
            let nobody = if interface == "Job" { "/org/gpuward1/job/999999".to_owned() } else { absent(path) };
            let name = format!("org.gpuward1.{interface}");
            let properties = "org.freedesktop.DBus.Properties";
            let asked = |path: &str| {
                let no_options = (Options::new(),);
                let calls =
                    [("Start", "Machine"), ("GetDomainXML", "Machine"), ("Release", "Claim"), ("Remove", "Tenant"), ("Wait", "Job")];
                let calls =
                    calls.iter().filter(|(_, of)| *of == interface).map(|(call, _)| answer(client, path, (&name, call), &no_options));
                let wrong = answer(client, path, (&name, if interface == "Job" { "Wait" } else { "Remove" }), &("nonsense",));
                let all = answer(client, path, (properties, "GetAll"), &(&name,));
                let one = answer(client, path, (properties, "Get"), &(&name, if interface == "Job" { "Kind" } else { "Generation" }));
                calls.chain([all, one, wrong]).map(|text| text.replace(path, "PATH")).collect::<Vec<_>>()
            };
            assert_eq!(asked(path), asked(&nobody), "{interface}: another's and nobody's answer alike");
            assert!(asked(path).iter().all(|text| text.starts_with("no object")), "{:?}", asked(path));
        }
        let get = |tenant: &str, name: &str| answer(client, "/org/gpuward1", ("org.gpuward1.Manager", "GetMachine"), &(tenant, name));
        assert_eq!(get("rival", "train"), get("nobody", "train"));
        assert!(get("rival", "train").starts_with("NotAuthorized"));
        assert!(get("acme", "other").starts_with("NoSuchMachine"), "one's own is told of");
        let create = |tenant: &str| {
            answer(client, "/org/gpuward1", ("org.gpuward1.Manager", "CreateMachine"), &(machine("x", "a/b".into()), of(tenant)))
        };
        assert_eq!(create("rival"), create("nobody"));
        let result = |job: u64| answer(client, "/org/gpuward1", ("org.gpuward1.Manager", "GetJobResult"), &(job,));
        let theirs = job.rsplit('/').next().and_then(|id| id.parse().ok()).expect("a number");
        assert_eq!(result(theirs), result(999_999));
    });
}

fn host_path(objects: &manager::client::Objects, tenant: &str) -> String {
    let found = objects.iter().find(|(_, object)| object.get("Tenant").is_some_and(|record| record.text("Name") == tenant));
    found.expect("there").0.clone()
}

#[test]
#[cfg_attr(unprivileged, ignore = "only root can be somebody else")]
fn an_owner_by_group_reads_and_uses_what_is_the_tenants() {
    let host = Host::start();
    let mut spec = tenant("shared", ALICE);
    let owners: HashMap<String, Variant<'static>> = HashMap::from([("groups".into(), vec![ACME_GROUP].into())]);
    spec.insert("owners", owners.into());
    host.done(MANAGER, "CreateTenant", &(spec, Options::new()));
    let member = Person { uid: 3, groups: vec![7, ACME_GROUP] };
    let path = member.with_client(host.operated.session.address(), |client| {
        let path = run_machine(client, "shared");
        assert_eq!(client.properties(&path, "Machine").expect("read").text("State"), "running");
        assert!(client.properties(&host_path(&host.operated.objects().expect("seen"), "acme"), "Tenant").is_err());
        path
    });
    let path = path.expect("root can be them");
    let outsider = Person { uid: 3, groups: vec![7] };
    outsider
        .with_client(host.operated.session.address(), |client| assert!(client.properties(&path, "Machine").is_err()))
        .expect("root can be them");
}

#[test]
fn quota_counts_what_is_claimed_and_defined() {
    let host = Host::start();
    let make =
        |name, tenant: &str| host.operated.finish(MANAGER, "CreateMachine", &(machine(name, format!("{tenant}-pool/a")), of(tenant)));
    assert_eq!(make("one", "acme").expect("admitted").text("state"), "done");
    assert_eq!(make("two", "acme").expect("admitted").text("state"), "done");
    let failure = host.refused("CreateMachine", &(machine("three", "acme-pool/a".into()), of("acme")));
    assert_eq!(failure.kind, ErrorKind::QuotaExceeded);
    assert_eq!(failure.why, ["quota.machines is 2; 2 are in use, and this asks for 1 more"]);
    let start = |name: &str| {
        let path: OwnedObjectPath =
            host.operated.call(MANAGER, "GetMachine", &("acme", name)).expect("there").body().deserialize().expect("a path");
        host.operated.finish((&path, "Machine"), "Start", &(Options::new(),))
    };
    assert_eq!(start("one").expect("admitted").text("state"), "done");
    let Err(CallError::Answered(failure)) = start("two") else { panic!("a second GPU is more than the tenant may have") };
    assert_eq!(
        (failure.kind, failure.why.as_slice()),
        (ErrorKind::QuotaExceeded, ["quota.gpus is 1; 1 are in use, and this asks for 1 more".to_owned()].as_slice())
    );
    let usage = host.operated.client.properties(&host.tenant("acme"), "Tenant").expect("read").record("Usage");
    assert_eq!((usage.number("gpus"), usage.number("machines"), usage.number("vcpus")), (Some(1), Some(2), Some(2)));
}

#[test]
fn two_requests_at_once_never_share_what_is_left_of_a_quota() {
    let host = Host::start();
    let claim = |domain: &str| {
        let wish = options([("kind", "gpu".into())]);
        let request = options([("tenant", "acme".into()), ("devices", vec![wish].into()), ("domain-uuid", domain.to_owned().into())]);
        host.operated.submit(MANAGER, "Claim", &(request, Options::new()))
    };
    let jobs = [claim("6b2f5c1e-2f6a-4d55-9f0e-5c7f3f3f0001"), claim("6b2f5c1e-2f6a-4d55-9f0e-5c7f3f3f0002")];
    let ended: Vec<_> = jobs
        .into_iter()
        .flatten()
        .map(|job| {
            let ended: Dict =
                host.operated.call((&job, "Job"), "Wait", &(Options::new(),)).expect("ends").body().deserialize().expect("a{sv}");
            Record(ended).text("state").to_owned()
        })
        .collect();
    assert_eq!(ended.iter().filter(|state| *state == "done").count(), 1, "{ended:?}");
    let claims = host.operated.objects().expect("seen").into_keys().filter(|path| path.contains("/claim/")).count();
    assert_eq!(claims, 1);
}

#[test]
fn what_a_machine_names_has_to_be_its_tenants() {
    let host = Host::start();
    let named = |key: &'static str, list: Vec<Options<'static>>| {
        let mut spec = machine("x", "acme-pool/a".into());
        spec.insert(key, list.into());
        host.refused("CreateMachine", &(spec, of("acme")))
    };
    let foreign = named("disk", vec![options([("volume", "rival-pool/secret".into())])]);
    let absent = named("disk", vec![options([("volume", "no-such-pool/secret".into())])]);
    assert_eq!((foreign.kind, absent.kind), (ErrorKind::NotAuthorized, ErrorKind::NotAuthorized));
    assert_eq!(foreign.message.replace("rival-pool", "X"), absent.message.replace("no-such-pool", "X"));
    let network = named("network", vec![options([("network", "rival-net".into())])]);
    assert_eq!(network.message, "network[0].network names \"rival-net\", which is not among the networks of tenant acme");
    let mut lax = machine("x", "acme-pool/a".into());
    lax.insert("minimum-isolation", "vf".into());
    assert_eq!(host.refused("CreateMachine", &(lax, of("acme"))).kind, ErrorKind::LevelRefused);
    let mut shares = machine("x", "acme-pool/a".into());
    shares.insert("device", vec![options([("kind", "vf".into())])].into());
    shares.insert("hold", "defined".into());
    assert_eq!(host.refused("CreateMachine", &(shares, of("acme"))).kind, ErrorKind::LevelRefused);
}

#[test]
fn what_backs_a_volume_has_to_lie_in_the_tenants_pools() {
    let host = Host::start();
    let start = |volume: &str| {
        let mut spec = machine("x", String::new());
        spec.insert("disk", vec![options([("volume", volume.to_owned().into()), ("format", "qcow2".into())])].into());
        let made = host.done(MANAGER, "CreateMachine", &(spec, of("acme")));
        let at = (made.text("machine"), "Machine");
        let started = host.operated.finish(at, "Start", &(Options::new(),)).expect("admitted");
        let xml = host.operated.client.properties(made.text("machine"), "Machine").expect("read");
        let claims = xml.texts("Claims").len();
        if started.text("state") == "done" {
            host.done(at, "Kill", &(Options::new(),));
        }
        host.done(at, "Remove", &(Options::new(),));
        let result = started.record("result");
        (claims, format!("{} {}", result.text("error"), result.text("message")))
    };
    let foreign = "PreflightFailed disk[0].volume VOLUME is backed by what is not in a pool of the tenant's";
    assert_eq!(start("acme-pool/overlay"), (1, " ".to_owned()));
    for volume in ["acme-pool/of-the-host", "acme-pool/of-the-rival"] {
        let (claims, said) = start(volume);
        assert_eq!((claims, said.replace(volume, "VOLUME").as_str()), (0, foreign), "nothing stays claimed");
    }
    assert_eq!(start("acme-pool/a").1, "PreflightFailed disk[0].volume acme-pool/a is to be read as qcow2, and libvirt says it is \"raw\"");
    assert_eq!(start("acme-pool/nowhere").1, "PreflightFailed disk[0].volume acme-pool/nowhere is not there");
}

#[test]
#[cfg_attr(unprivileged, ignore = "only root can be somebody else")]
fn an_owner_names_no_path_of_the_host() {
    let host = Host::start();
    let asked = host.as_owner(ALICE, |client| {
        let mut spec = machine("x", String::new());
        spec.insert("disk", vec![options([("path", "/etc/shadow".into())])].into());
        answer(client, "/org/gpuward1", ("org.gpuward1.Manager", "CreateMachine"), &(spec, of("acme")))
    });
    assert!(asked.starts_with("NotAuthorized"), "{asked}");
}

#[test]
fn a_tenant_is_changed_and_removed_under_its_own_name_and_only_when_it_has_nothing() {
    let host = Host::start();
    assert_eq!(host.refused("CreateTenant", &(tenant("acme", BOB), Options::new())).kind, ErrorKind::NameTaken);
    let acme = host.tenant("acme");
    let at = (acme.as_str(), "Tenant");
    assert_eq!(host.operated.refused(at, "SetPolicy", &(tenant("other", ALICE), Options::new())).kind, ErrorKind::InvalidSpec);
    let stale = options([("if-generation", 0_u64.into())]);
    assert_eq!(host.operated.refused(at, "SetPolicy", &(tenant("acme", BOB), stale)).kind, ErrorKind::Conflict);
    host.done(at, "SetPolicy", &(tenant("acme", BOB), Options::new()));
    let made = host.done(MANAGER, "CreateMachine", &(machine("a", "acme-pool/a".into()), of("acme")));
    let failure = host.operated.refused(at, "Remove", &(Options::new(),));
    assert_eq!((failure.kind, failure.why), (ErrorKind::Conflict, vec!["machine a".to_owned()]));
    host.done((made.text("machine"), "Machine"), "Remove", &(Options::new(),));
    host.done(at, "Remove", &(Options::new(),));
    assert_eq!(host.operated.refused(MANAGER, "GetTenant", &("acme",)).kind, ErrorKind::NoSuchTenant);
    let default = host.tenant("default");
    assert_eq!(host.operated.refused((&default, "Tenant"), "Remove", &(Options::new(),)).kind, ErrorKind::NotSupported);
}

#[test]
fn tenants_and_their_owners_are_there_after_a_restart() {
    let mut host = Host::start();
    let before = host.operated.client.properties(&host.tenant("acme"), "Tenant").expect("read");
    host.operated.session.kill_daemon().expect("killed");
    host.operated.session.start_daemon().expect("it comes up");
    let after = host.operated.client.properties(&host.tenant("acme"), "Tenant").expect("read");
    for key in ["Owners", "Quota", "Networks", "Pools", "MinimumIsolation", "ShareGpu", "TrustDomain"] {
        assert_eq!(after.value(key), before.value(key), "{key}");
    }
}

#[test]
fn two_tenants_may_have_machines_of_one_name() {
    let host = Host::start();
    let one = host.done(MANAGER, "CreateMachine", &(machine("a", "acme-pool/a".into()), of("acme")));
    let two = host.done(MANAGER, "CreateMachine", &(machine("a", "rival-pool/a".into()), of("rival")));
    assert_ne!(one.text("machine"), two.text("machine"));
    let failure = host.refused("CreateMachine", &(machine("a", "acme-pool/a".into()), of("acme")));
    assert_eq!(failure.kind, ErrorKind::NameTaken);
}
