//! The service on a private bus, as its clients meet it: the real daemon on a simulated host.
#![allow(clippy::expect_used)]

use std::path::Path;
use std::time::{Duration, Instant};

use manager::client::{CallError, Dict, Options, Record};
use manager::failure::ErrorKind;
use tests::operated::{MANAGER, Operated, path_of};
use zbus::export::ordered_stream::OrderedStreamExt;
use zbus::{Message, OwnedObjectPath, Variant};

const GPU: &str = "0000:1b:00.0";
const OTHER: &str = "0000:43:00.0";
const HELD: &str = "0000:52:00.0";

fn start() -> Operated {
    Operated::start("dgx-h100", Path::new(env!("CARGO_BIN_EXE_gpuward-sim"))).expect("the daemon comes up")
}

fn client(name: &str) -> String {
    format!("{}/clients/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn options<const N: usize>(entries: [(&'static str, Variant<'static>); N]) -> Options<'static> {
    Options::from(entries)
}

fn goal(word: &'static str, device: &'static str) -> Options<'static> {
    options([("goal", word.into()), ("device", device.into())])
}

fn machine<const N: usize>(changes: [(&'static str, Variant<'static>); N]) -> Options<'static> {
    let disk = options([("volume", "tank/a".into())]);
    let mut spec = options([
        ("format", 1_u32.into()),
        ("name", "a".into()),
        ("vcpus", 1_u32.into()),
        ("memory", (1_u64 << 30).into()),
        ("disk", vec![disk].into()),
    ]);
    spec.extend(changes);
    spec
}

/// Every method of every interface on one object of each kind, as `path interface member signature`.
fn every_method(host: &Operated) -> Vec<String> {
    let mut seen = std::collections::BTreeSet::new();
    let mut methods = Vec::new();
    let objects = host.objects().expect("listed");
    let entry = "/org/gpuward1".to_owned();
    for path in objects.keys().chain([&entry]) {
        for (interface, member, signature) in methods_of(host, path) {
            if seen.insert((interface.clone(), member.clone())) {
                methods.push(format!("{path} {interface} {member} {signature}"));
            }
        }
    }
    methods
}

fn methods_of(host: &Operated, path: &str) -> Vec<(String, String, String)> {
    let bus = host.client.bus();
    let introspectable = Some("org.freedesktop.DBus.Introspectable");
    let answer = host.client.wait(bus.call_method(Some("org.gpuward1"), path, introspectable, "Introspect", &()));
    let xml: String = answer.expect("answered").body().deserialize().expect("text");
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    let document = roxmltree::Document::parse_with_options(&xml, options).expect("XML");
    // Of this object only: the answer has those below it too.
    let interfaces = document.root_element().children().filter(|node| node.has_tag_name("interface"));
    let methods = interfaces.flat_map(|interface| interface.children()).filter(|node| node.has_tag_name("method"));
    let ours = methods.filter_map(|method| {
        let interface = method.parent()?.attribute("name").filter(|name| name.starts_with("org.gpuward1."))?;
        let inputs = method.children().filter(|node| node.attribute("direction") == Some("in"));
        let signature: String = inputs.filter_map(|input| input.attribute("type")).collect();
        let signature = if signature.is_empty() { "-".into() } else { signature };
        Some((interface.to_owned(), method.attribute("name")?.to_owned(), signature))
    });
    ours.collect()
}

#[test]
fn a_caller_who_may_nothing_is_refused_every_method_in_the_same_words() {
    let host = start();
    host.start_machine(GPU).expect("started");
    let methods = every_method(&host);
    assert!(methods.len() >= 25, "{methods:#?}");
    host.session.polkit.forbid_all();
    let answers = host.asked_by_stranger(&methods.join("\n")).expect("asked");
    assert_eq!(answers.lines().count(), methods.len());
    for (method, answer) in methods.iter().zip(answers.lines()) {
        // A tenant's objects are not there for them.
        let of_a_tenant = ["/machine/", "/claim/", "/job/", "/tenant/"].iter().any(|kind| method.contains(kind));
        let refused = if of_a_tenant { "org.freedesktop.DBus.Error.UnknownObject" } else { "org.gpuward1.Error.NotAuthorized" };
        assert!(answer.ends_with(&format!(" {refused}")), "{method}: {answer}");
    }
    eprintln!("{} methods refused", methods.len());
}

#[test]
#[cfg_attr(unprivileged, ignore = "only root can be somebody else")]
fn a_stranger_reads_no_property_and_no_list_of_objects() {
    let host = start();
    let machine = host.start_machine(GPU).expect("started");
    let device = path_of(GPU);
    let calls = format!(
        "{device} org.freedesktop.DBus.Properties Get org.gpuward1.Device\n\
         {machine} org.freedesktop.DBus.Properties Get org.gpuward1.Machine\n\
         {machine} org.freedesktop.DBus.Properties GetAll org.gpuward1.Machine\n\
         /org/gpuward1 org.freedesktop.DBus.ObjectManager GetManagedObjects -\n"
    );
    let answers = host.asked_by_stranger(&calls).expect("asked");
    let expected = "Get org.gpuward1.Error.NotAuthorized\nGet org.freedesktop.DBus.Error.UnknownObject\n\
                    GetAll org.freedesktop.DBus.Error.UnknownObject\nGetManagedObjects org.gpuward1.Error.NotAuthorized\n";
    assert_eq!(answers, expected);
}

#[test]
fn bad_input_is_refused_by_name_and_nothing_changes() {
    let host = start();
    let device = path_of(OTHER);
    let (none, at) = (Options::new(), (device.as_str(), "Device"));
    let spec = |changes| (changes, Options::new());
    let unknown = options([("kindd", "gpu".into())]);
    let held = path_of(HELD);
    let long = "x".repeat(1000);
    let cases = [
        (host.refused(MANAGER, "GetDevice", &("gpu0",)), ErrorKind::InvalidSpec, "\"gpu0\" is no PCI address"),
        (host.refused(MANAGER, "GetDevice", &("0000:ff:00.0",)), ErrorKind::NoSuchDevice, "no device 0000:ff:00.0"),
        (host.refused(MANAGER, "GetMachine", &("default", "a/b<c")), ErrorKind::NoSuchMachine, "a/b<c"),
        (host.refused(MANAGER, "GetMachine", &("acme", "a")), ErrorKind::NoSuchTenant, "acme"),
        (host.refused(MANAGER, "GetJobResult", &(4711_u64,)), ErrorKind::Conflict, "4711"),
        (host.refused(MANAGER, "Plan", &(vec![goal("explode", OTHER)], &none)), ErrorKind::InvalidSpec, "\"explode\""),
        (host.refused(MANAGER, "Plan", &(vec![options([("goal", "assign".into())])], &none)), ErrorKind::InvalidSpec, "device"),
        (
            host.refused(MANAGER, "Plan", &(vec![goal("assign", OTHER)], options([("colour", 1_u32.into())]))),
            ErrorKind::UnknownOption,
            "colour",
        ),
        (host.refused(at, "Assign", &(options([("dry-run", true.into())]),)), ErrorKind::UnknownOption, "dry-run"),
        (host.refused(at, "Assign", &(options([("force", "yes".into())]),)), ErrorKind::InvalidSpec, "force"),
        (host.refused(at, "Assign", &(options([("request-id", long.into())]),)), ErrorKind::InvalidSpec, "request-id"),
        (host.refused(at, "Assign", &(options([("if-generation", 0_u64.into())]),)), ErrorKind::Conflict, "generation"),
        (host.refused(at, "ClearQuarantine", &(&none,)), ErrorKind::Conflict, "quarantine"),
        (host.refused((&held, "Device"), "Assign", &(&none,)), ErrorKind::Held, HELD),
        (
            host.refused(MANAGER, "Apply", &(vec![goal("assign", OTHER)], options([("plan-digest", "0".into())]))),
            ErrorKind::Conflict,
            "plan",
        ),
        (
            host.refused(MANAGER, "CreateMachine", &spec(machine([("device", vec![unknown].into())]))),
            ErrorKind::InvalidSpec,
            "device[0].kind",
        ),
        (host.refused(MANAGER, "CreateMachine", &spec(machine([("colour", "red".into())]))), ErrorKind::InvalidSpec, "colour"),
        (host.refused(MANAGER, "Claim", &spec(options([("ttl", 5_u32.into())]))), ErrorKind::InvalidSpec, "domain-uuid is missing"),
        (host.refused(MANAGER, "Claim", &(wanted("manual"), &none)), ErrorKind::NoFit, "devices[0] wishes for 1 GPU"),
        (host.refused(MANAGER, "Claim", &(wanted("manual"), options([("ttl", 5_u32.into())]))), ErrorKind::UnknownOption, "ttl"),
        (host.refused(MANAGER, "CreateMachine", &spec(machine([("vcpus", 0_u32.into())]))), ErrorKind::InvalidSpec, "vcpus"),
        (host.refused(MANAGER, "CreateMachine", &spec(machine([("name", "a<b".into())]))), ErrorKind::InvalidSpec, "name"),
        (host.refused(MANAGER, "CreateMachine", &spec(machine([("memory", 0.5_f64.into())]))), ErrorKind::InvalidSpec, "memory"),
    ];
    for (failure, kind, says) in &cases {
        assert_eq!((failure.kind, failure.message.contains(says)), (*kind, true), "{failure:?} says {says:?}");
    }
    let objects = host.objects().expect("listed");
    assert!(objects.values().all(|object| !object.contains_key("Machine")));
    let moved = objects.values().filter_map(|object| object.get("Device")).filter(|device| device.text("State") != "host");
    assert_eq!(moved.count(), 0);
}

#[test]
fn a_request_with_the_same_id_is_the_same_job_and_with_another_content_a_conflict() {
    let host = start();
    let (device, other) = (path_of(GPU), path_of(OTHER));
    let named = || options([("request-id", "r-1".into())]);
    let job = host.submit((&device, "Device"), "Assign", &(named(),)).expect("admitted");
    let again = host.submit((&device, "Device"), "Assign", &(named(),)).expect("known");
    assert_eq!(job, again);
    assert_eq!(host.refused((&other, "Device"), "Assign", &(named(),)).kind, ErrorKind::Conflict);
}

/// The signals of one job, up to its end.
fn signals_of_a_job(host: &Operated, member: &str) -> (OwnedObjectPath, Vec<Message>) {
    let mut signals = host.client.signals().expect("subscribed");
    let device = path_of(GPU);
    let job = host.submit((&device, "Device"), member, &(Options::new(),)).expect("admitted");
    let heard = host.client.wait(async {
        let mut heard = Vec::new();
        while let Some(signal) = signals.next().await {
            let signal = signal?;
            let is_last = signal.header().member().is_some_and(|member| member.as_str() == "JobRemoved");
            heard.push(signal);
            if is_last {
                break;
            }
        }
        Ok(heard)
    });
    (job, heard.expect("heard"))
}

fn position(heard: &[Message], member: &str, holds: impl Fn(&Message) -> bool) -> usize {
    let found = heard.iter().position(|signal| signal.header().member().is_some_and(|name| name.as_str() == member) && holds(signal));
    found.unwrap_or_else(|| panic!("no such {member} among {heard:#?}"))
}

fn changed(signal: &Message) -> (String, Record) {
    let (interface, changed, _): (String, Dict, Vec<String>) = signal.body().deserialize().expect("as documented");
    (interface, Record(changed))
}

#[test]
fn a_job_is_announced_first_and_its_end_comes_after_everything_it_changed() {
    let host = start();
    let (job, heard) = signals_of_a_job(&host, "Assign");
    let device = path_of(GPU);
    let is_about = |signal: &Message, path: &str| signal.header().path().is_some_and(|about| about.as_str() == path);
    let added = position(&heard, "InterfacesAdded", |signal| {
        let (path, _): (OwnedObjectPath, std::collections::HashMap<String, Dict>) = signal.body().deserialize().expect("as documented");
        path == job
    });
    let new = position(&heard, "JobNew", |_| true);
    let free = position(&heard, "PropertiesChanged", |signal| is_about(signal, &device) && changed(signal).1.text("State") == "free");
    let done = position(&heard, "PropertiesChanged", |signal| is_about(signal, &job) && changed(signal).1.text("State") == "done");
    let removed = position(&heard, "JobRemoved", |_| true);
    assert!(added < new && new < free && free < removed && done < removed, "{added} {new} {free} {done} {removed}");
    assert_eq!(removed, heard.len() - 1);
    let (id, path, result, detail): (u64, OwnedObjectPath, String, Dict) = heard[removed].body().deserialize().expect("as documented");
    assert_eq!((format!("/org/gpuward1/job/{id}"), result.as_str()), (path.to_string(), "done"));
    assert_eq!(Record(detail).texts("objects"), std::slice::from_ref(&device));
    let all_at_once = changed(&heard[free]).1;
    assert!(all_at_once.value("Generation").is_some(), "several properties in one signal: {all_at_once:?}");
    assert_eq!(host.objects().expect("listed")[&device]["Device"].text("State"), "free");
}

#[test]
fn what_a_job_came_to_can_still_be_asked() {
    let host = start();
    let device = path_of(GPU);
    let job = host.submit((&device, "Device"), "Assign", &(Options::new(),)).expect("admitted");
    let waited: Dict = host.call((&job, "Job"), "Wait", &(Options::new(),)).expect("answered").body().deserialize().expect("a{sv}");
    let id: u64 = job.rsplit('/').next().expect("has one").parse().expect("a number");
    let kept: Dict = host.call(MANAGER, "GetJobResult", &(id,)).expect("answered").body().deserialize().expect("a{sv}");
    assert_eq!(waited, kept);
    assert_eq!(host.refused((&job, "Job"), "Cancel", &()).kind, ErrorKind::Conflict);
}

#[test]
fn a_machine_starts_holds_its_gpu_and_gives_it_back() {
    let host = start();
    let machine = host.start_machine(GPU).expect("started");
    let objects = host.objects().expect("listed");
    let shown = &objects[&machine]["Machine"];
    assert_eq!((shown.text("Name"), shown.text("State")), ("train-1", "running"));
    let claim = &objects[&shown.texts("Claims")[0]]["Claim"];
    assert_eq!((claim.text("Machine"), claim.texts("Devices")), (machine.as_str(), vec![path_of(GPU)]));
    assert_eq!(objects[&path_of(GPU)]["Device"].text("State"), "running");
    let xml: String =
        host.call((&machine, "Machine"), "GetDomainXML", &(Options::new(),)).expect("answered").body().deserialize().expect("s");
    assert!(xml.contains("ua-gw-pci_0000_1b_00_0"), "{xml}");
    let device = &shown.records("DeviceMap")[0];
    let facts = ["claim", "host-address", "guest-address", "alias"].map(|key| device.text(key).to_owned());
    assert_eq!(facts, [shown.texts("Claims")[0].as_str(), GPU, "0000:01:00.0", "ua-gw-pci_0000_1b_00_0"]);
    let explained: Dict =
        host.call((&machine, "Machine"), "Explain", &(Options::new(),)).expect("answered").body().deserialize().expect("a{sv}");
    let explained = Record(explained);
    assert_eq!(["state", "guest-state", "waits-for"].map(|key| explained.text(key)), ["running", "started", ""]);
    let rebooted = host.finish((&machine, "Machine"), "Reboot", &(Options::new(),)).expect("admitted");
    assert_eq!(rebooted.text("state"), "done", "{rebooted:?}");
    let killed = host.finish((&machine, "Machine"), "Kill", &(Options::new(),)).expect("admitted");
    assert_eq!(killed.text("state"), "done", "{killed:?}");
    let removed = host.finish((&machine, "Machine"), "Remove", &(Options::new(),)).expect("admitted");
    assert_eq!(removed.text("state"), "done", "{removed:?}");
    let objects = host.objects().expect("listed");
    assert!(!objects.contains_key(&machine));
    assert_eq!(objects[&path_of(GPU)]["Device"].text("State"), "free");
}

/// What `Manager.Claim` takes for one GPU.
fn wanted(release: &'static str) -> Options<'static> {
    options([
        ("devices", vec![options([("kind", "gpu".into())])].into()),
        ("domain-uuid", "6b2f5c1e-2f6a-4d55-9f0e-5c7f3f3f0001".into()),
        ("release", release.into()),
    ])
}

#[test]
fn a_claim_for_a_domain_of_others_is_made_seen_and_released() {
    let host = start();
    host.finish((&path_of(GPU), "Device"), "Assign", &(Options::new(),)).expect("admitted");
    let made = host.finish(MANAGER, "Claim", &(wanted("manual"), Options::new())).expect("admitted").record("result");
    let claim = made.text("claim").to_owned();
    assert_eq!(made.texts("claims"), std::slice::from_ref(&claim));
    let objects = host.objects().expect("listed");
    let shown = &objects[&claim]["Claim"];
    let words = ["State", "ReleaseOn", "DomainUUID", "Machine", "IsolationLevel"].map(|key| shown.text(key));
    assert_eq!(words, ["active", "manual", "6b2f5c1e-2f6a-4d55-9f0e-5c7f3f3f0001", "/", "whole-gpu"]);
    let at = (claim.as_str(), "Claim");
    let xml: String = host.call(at, "GetHostdevXML", &(Options::new(),)).expect("answered").body().deserialize().expect("s");
    assert!(xml.contains("bus='0x1b'") || xml.contains("bus=\"0x1b\""), "{xml}");
    assert_eq!(host.refused(at, "Release", &(Options::new(),)).message, "option epoch is missing");
    let epoch = u64::try_from(shown.number("Epoch").expect("it has one")).expect("positive");
    let late = host.refused(at, "Release", &(options([("epoch", (epoch + 1).into())]),));
    assert_eq!(late.kind, ErrorKind::Conflict);
    let released = host.finish(at, "Release", &(options([("epoch", epoch.into())]),)).expect("admitted");
    assert_eq!(released.text("state"), "done", "{released:?}");
    let objects = host.objects().expect("listed");
    assert!(!objects.contains_key(&claim));
    assert_eq!(objects[&path_of(GPU)]["Device"].text("State"), "free");
}

#[test]
fn a_claim_that_lives_with_its_client_ends_with_it_also_over_a_restart_of_the_daemon() {
    let mut host = start();
    host.finish((&path_of(GPU), "Device"), "Assign", &(Options::new(),)).expect("admitted");
    let state = |host: &Operated| host.objects().expect("listed")[&path_of(GPU)]["Device"].text("State").to_owned();
    let claims = |client: &manager::client::Client| {
        let asked = async {
            let proxy = manager::client::ManagerProxy::new(client.bus()).await?;
            let owned = wanted("client-gone").into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
            proxy.claim(owned, Options::new()).await
        };
        client.wait(asked).expect("admitted")
    };
    let client = manager::client::Client::connect(Some(host.session.address())).expect("connected");
    claims(&client);
    until(&host, |host| state(host) == "claimed");
    host.session.kill_daemon().expect("killed");
    host.session.start_daemon().expect("started");
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(state(&host), "claimed", "its client is still there");
    drop(client);
    until(&host, |host| state(host) == "free");

    let client = manager::client::Client::connect(Some(host.session.address())).expect("connected");
    claims(&client);
    until(&host, |host| state(host) == "claimed");
    host.session.kill_daemon().expect("killed");
    drop(client);
    host.session.start_daemon().expect("started");
    until(&host, |host| state(host) == "free");
}

#[test]
fn polkit_is_asked_about_the_caller_with_what_the_call_is_about() {
    let host = start();
    if host.has_strangers() {
        host.asked_by_stranger(&format!("{} org.gpuward1.Device Assign a{{sv}}\n", path_of(GPU))).expect("asked");
    } else {
        host.finish((&path_of(GPU), "Device"), "Assign", &(Options::new(),)).expect("allowed");
    }
    let asked = host.session.polkit.asked();
    let asked = asked.iter().find(|asked| asked.action == "org.gpuward.assign").expect("asked");
    assert!(asked.name.starts_with(':') && !asked.interactive, "{asked:?}");
    assert_eq!(asked.details["object"], GPU);
}

#[test]
fn busctl_assigns_a_device_and_reads_its_state() {
    let host = start();
    let busctl = |arguments: &[&str]| {
        let mut command = host.session.command("busctl");
        command.arg(format!("--address={}", host.session.address())).args(arguments);
        Operated::output(&mut command).expect("busctl ends well")
    };
    let device = path_of(GPU);
    let found = busctl(&["call", "org.gpuward1", "/org/gpuward1", "org.gpuward1.Manager", "GetDevice", "s", GPU]);
    assert_eq!(found.trim_end(), format!("o \"{device}\""));
    let job = busctl(&["call", "org.gpuward1", &device, "org.gpuward1.Device", "Assign", "a{sv}", "0"]);
    let job = job.trim_end().trim_start_matches("o ").trim_matches('"');
    let ended = busctl(&["call", "org.gpuward1", job, "org.gpuward1.Job", "Wait", "a{sv}", "0"]);
    assert!(ended.contains("\"state\" s \"done\""), "{ended}");
    assert_eq!(busctl(&["get-property", "org.gpuward1", &device, "org.gpuward1.Device", "State"]).trim_end(), "s \"free\"");
}

#[test]
fn a_python_client_applies_the_plan_that_it_looked_at() {
    let host = start();
    let mut command = host.session.command("/usr/bin/python3");
    command.args([client("control_plane.py").as_str(), host.session.address(), GPU]);
    let said = Operated::output(&mut command).expect("it ends well");
    assert_eq!(said, "assign done free\nthe same request is the same job\nrelease done host\n");
}

#[test]
fn told_to_end_it_leaves_the_machine_running_and_the_next_one_adopts_it() {
    let mut host = start();
    let machine = host.start_machine(GPU).expect("started");
    let leader = host.objects().expect("listed")[&machine]["Machine"].number("Leader");
    assert!(host.session.stop_daemon().expect("waited for").expect("ran").success());
    host.session.start_daemon().expect("comes up");
    until(&host, |host| host.objects().is_ok_and(|objects| objects[&machine]["Machine"].text("State") == "running"));
    let objects = host.objects().expect("listed");
    assert_eq!(objects[&machine]["Machine"].number("Leader"), leader);
    assert_eq!(objects[&path_of(GPU)]["Device"].text("State"), "running");
}

#[test]
fn a_second_daemon_does_not_take_over() {
    let host = start();
    let root = tests::simhost::SimRoot::temporary("workstation").expect("laid");
    for dir in ["var/lib/gpuward", "run/gpuward", "run/libvirt/qemu"] {
        std::fs::create_dir_all(root.path().join(dir)).expect("made");
    }
    let mut second = host.session.command(env!("CARGO_BIN_EXE_gpuward-sim"));
    second.arg(tests::session::DAEMON_WORD).arg(root.path()).arg(host.session.address());
    let ended = second.output().expect("it runs");
    assert!(!ended.status.success());
    host.call(MANAGER, "GetDevice", &(GPU,)).expect("the first one answers");
}

/// Whether the host takes changes, and why not.
fn host_state(host: &Operated) -> String {
    let proxy = zbus::fdo::PropertiesProxy::builder(host.client.bus()).destination("org.gpuward1").path("/org/gpuward1");
    let entry = host.client.wait(async { proxy.build().await?.get_all("org.gpuward1.Manager".try_into()?).await.map_err(Into::into) });
    let entry = Record(entry.expect("read"));
    format!("{} {}", entry.text("HostState"), entry.text("HostStateReason"))
}

#[test]
fn a_ledger_that_is_torn_is_named_on_the_bus_and_nothing_is_stored() {
    let mut host = start();
    host.finish((&path_of(GPU), "Device"), "Assign", &(Options::new(),)).expect("admitted");
    host.finish(MANAGER, "Claim", &(wanted("manual"), Options::new())).expect("admitted");
    host.session.kill_daemon().expect("killed");
    let file = |name: &str| host.session.root().join(name);
    let (ledger, owned) = (file("var/lib/gpuward/ledger.json"), file("run/gpuward/owned.json"));
    let good = std::fs::read(&ledger).expect("there");
    let torn = &good[..good.len() / 2];
    std::fs::write(&ledger, torn).expect("written");
    let in_force = std::fs::read(&owned).expect("there");
    host.session.start_daemon().expect("started");
    let state = host_state(&host);
    assert!(state.starts_with("degraded ") && state.contains("var/lib/gpuward/ledger.json is damaged"), "{state}");
    let refused = host.refused(MANAGER, "Claim", &(wanted("manual"), Options::new()));
    assert_eq!((refused.kind, refused.why.concat().contains("ledger.json")), (ErrorKind::HostNotReady, true), "{refused}");
    assert!(host.objects().expect("listed").contains_key(&path_of(GPU)), "reads are answered");
    host.session.stop_daemon().expect("ended");
    assert_eq!(std::fs::read(&ledger).expect("there"), torn);
    assert_eq!(std::fs::read(&owned).expect("there"), in_force, "the last word to libvirt's hook holds");
}

#[test]
fn p66_a_shutdown_that_logind_or_systemd_tells_of_takes_no_changes() {
    let host = start();
    let device = path_of(GPU);
    let (logind, systemd) =
        (("org.freedesktop.login1", "/org/freedesktop/login1"), ("org.freedesktop.systemd1", "/org/freedesktop/systemd1"));
    let teller = manager::client::Client::connect(Some(host.session.address())).expect("connected");
    for (name, _) in [logind, systemd] {
        teller.wait(teller.bus().request_name(name)).expect("taken");
    }
    let tell = |(name, path): (&str, &str), member: &str, body: zbus::wire::Structure<'_>| {
        let interface = format!("{name}.Manager");
        teller.wait(teller.bus().emit_signal(None::<&str>, path, interface.as_str(), member, &body)).expect("told");
    };
    let takes_changes =
        |host: &Operated| !matches!(host.submit((&device, "Device"), "Release", &(Options::new(),)), Err(CallError::Answered(_)));
    let job = OwnedObjectPath::try_from("/org/freedesktop/systemd1/job/7").expect("a path");
    tell(logind, "PrepareForShutdown", (true,).into());
    until(&host, |host| !takes_changes(host));
    let refused = host.refused((&device, "Device"), "Assign", &(Options::new(),));
    assert_eq!((refused.kind, refused.message.as_str()), (ErrorKind::HostNotReady, "the host shuts down"));
    tell(logind, "PrepareForShutdown", (false,).into());
    until(&host, takes_changes);
    tell(systemd, "JobNew", (7_u32, job.clone(), "other.target").into());
    tell(systemd, "JobNew", (8_u32, job.clone(), "shutdown.target").into());
    until(&host, |host| !takes_changes(host));
    tell(systemd, "JobRemoved", (8_u32, job, "shutdown.target", "canceled").into());
    until(&host, takes_changes);
}

#[test]
fn a_configuration_with_a_fault_stops_changes_until_it_is_mended() {
    let host = start();
    let file = host.session.root().join("etc/gpuward/gpuward.toml");
    let good = std::fs::read_to_string(&file).expect("there");
    let reload = || {
        let pid = host.session.daemon_pid().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed())).expect("it runs");
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).expect("told");
    };
    let state = || host_state(&host);
    std::fs::write(&file, format!("{good}\n[limitz]\n")).expect("written");
    reload();
    until(&host, |_| state().starts_with("degraded") && state().contains("limitz"));
    let refused = host.refused((&path_of(GPU), "Device"), "Assign", &(Options::new(),));
    assert_eq!(refused.kind, ErrorKind::HostNotReady);
    std::fs::write(&file, good).expect("written");
    reload();
    until(&host, |_| state() == "ready ");
}

fn until(host: &Operated, holds: impl Fn(&Operated) -> bool) {
    let started = Instant::now();
    while !holds(host) {
        assert!(started.elapsed() < Duration::from_secs(20), "what was waited for did not come");
        std::thread::sleep(Duration::from_millis(20));
    }
}
