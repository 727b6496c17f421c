//! The pre-flight on simulated hosts: asked over the bus and by the command, and at each start.
#![allow(clippy::expect_used)]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use manager::client::{CallError, Dict, Options, Record};
use manager::failure::ErrorKind;
use tests::operated::{MANAGER, Operated, path_of};
use tests::person::Person;
use tests::polkit::Who;
use tests::simhost::{SimHost, SimRoot};
use tests::typed::{self, done, json};
use zbus::Variant;

const GPU: &str = "0000:1b:00.0";
const FAR: &str = "0000:9d:00.0";
// A user that every Debian has: dbus-daemon admits nobody whom it cannot look up.
const ALICE: u32 = 1;

fn options<const N: usize>(entries: [(&'static str, Variant<'static>); N]) -> Options<'static> {
    Options::from(entries)
}

fn spec(volume: &'static str, count: u32) -> Options<'static> {
    let wish = options([("kind", "gpu".into()), ("count", count.into())]);
    options([
        ("format", 1_u32.into()),
        ("name", "train".into()),
        ("vcpus", 2_u32.into()),
        ("memory", (1_u64 << 30).into()),
        ("disk", vec![options([("volume", volume.into())])].into()),
        ("device", vec![wish].into()),
    ])
}

fn of_spec(spec: Options<'static>) -> Options<'static> {
    options([("spec", spec.into())])
}

/// A host with a daemon whose caller may do everything.
struct Host(Operated);

impl Host {
    /// With these GPUs in the pool.
    fn with(gpus: &[&str]) -> Self {
        let host = Self(Operated::start("dgx-h100", Path::new(env!("CARGO_BIN_EXE_gpuward-sim"))).expect("the daemon comes up"));
        for gpu in gpus {
            host.ends("done", (&path_of(gpu), "Device"), "Assign", &(Options::new(),));
        }
        host
    }

    fn ends<B: serde::Serialize + zbus::wire::DynamicType>(&self, state: &str, at: (&str, &str), member: &str, body: &B) -> Record {
        let ended = self.0.finish(at, member, body).expect("admitted");
        assert_eq!(ended.text("state"), state, "{member}: {ended:?}");
        ended
    }

    /// A machine with a GPU, off; its path.
    fn machine(&self) -> String {
        let made = self.ends("done", MANAGER, "CreateMachine", &(spec("tank/train-1", 1), Options::new()));
        made.record("result").text("machine").to_owned()
    }

    fn asked(&self, request: Options<'static>) -> Result<Vec<Record>, CallError> {
        let told: Vec<Dict> = self.0.call(MANAGER, "Preflight", &(request,))?.body().deserialize()?;
        Ok(told.into_iter().map(Record).collect())
    }

    fn findings(&self, request: Options<'static>) -> BTreeMap<String, (String, String)> {
        self.asked(request).expect("answered").iter().map(told).collect()
    }

    fn set(&self, file: &str, text: &str) {
        SimHost::at(SimRoot::Kept(self.0.session.root().to_owned())).set(file, text).expect("laid");
    }

    /// What the kernel shows of devices.
    fn sysfs(&self) -> Vec<(PathBuf, String)> {
        let files = SimHost::at(SimRoot::Kept(self.0.session.root().to_owned())).snapshot();
        files.into_iter().filter(|(path, _)| path.starts_with("sys/bus") || path.starts_with("sys/devices/pci")).collect()
    }

    fn claims(&self) -> usize {
        self.0.objects().expect("seen").keys().filter(|path| path.contains("/claim/")).count()
    }
}

fn told(record: &Record) -> (String, (String, String)) {
    let text = |key| record.text(key).to_owned();
    (text("code"), (text("severity"), text("message")))
}

fn errors(findings: &BTreeMap<String, (String, String)>) -> Vec<&str> {
    findings.iter().filter(|(_, (severity, _))| severity == "error").map(|(code, _)| code.as_str()).collect()
}

const LITTLE_MEMORY: &str = "MemTotal: 2147483648 kB\nMemAvailable: 524288 kB";
const ENOUGH_MEMORY: &str = "MemTotal: 2147483648 kB\nMemAvailable: 1932735283 kB";

#[test]
fn p14_a_start_that_would_take_the_host_down_is_refused_before_anything_is_changed() {
    let host = Host::with(&[GPU]);
    let machine = host.machine();
    let before = host.sysfs();
    host.set("proc/meminfo", LITTLE_MEMORY);
    let findings = host.asked(options([("machine", "train".into())])).expect("answered");
    assert_eq!(findings[0].text("code"), "free-memory", "the gravest is the first");
    assert_eq!(findings[0].texts("evidence"), ["/proc/meminfo: MemAvailable is 512 MiB"]);

    let failed = host.ends("failed", (&machine, "Machine"), "Start", &(Options::new(),));
    assert_eq!(failed.text("error"), "PreflightFailed");
    assert_eq!(
        failed.text("message"),
        "the pre-flight refuses the start: its 1 GiB of memory are pinned when it starts, and the host has less"
    );
    assert!(failed.texts("why").contains(&"/proc/meminfo: MemAvailable is 512 MiB".to_owned()), "{failed:?}");
    assert!(!failed.text("remedy").is_empty());
    assert_eq!((host.claims(), host.sysfs() == before), (0, true), "its claim is given up, and nothing was touched");

    host.set("proc/meminfo", ENOUGH_MEMORY);
    host.ends("done", (&machine, "Machine"), "Start", &(Options::new(),));
    let failure = host.0.refused(MANAGER, "Preflight", &(options([("machine", "train".into())]),));
    assert_eq!((failure.kind, failure.message.as_str()), (ErrorKind::Conflict, "machine train is running"));
}

#[test]
fn nothing_is_changed_by_asking_and_what_cannot_be_observed_is_said() {
    let host = Host::with(&[GPU]);
    host.machine();
    let before = (host.sysfs(), host.claims());
    let findings = host.findings(options([("machine", "train".into())]));
    assert_eq!(errors(&findings), [] as [&str; 0], "{findings:?}");
    for code in ["hypervisor", "iommu-width", "dma-entry-limit", "locked-memory", "mmio-window", "no-migration", "numa-placement"] {
        assert_eq!(findings.get(code).map(|(severity, _)| severity.as_str()), Some("info"), "{code}: {findings:?}");
    }
    assert_eq!(findings["huge-bars"].0, "warning", "the host's kernel is 6.12");
    assert_eq!((host.sysfs(), host.claims()), before);
    // What is there is judged.
    host.set("sys/module/vfio_iommu_type1/parameters/dma_entry_limit", "10");
    host.set("sys/devices/system/node/node0/meminfo", "Node 0 MemFree: 1024 kB");
    fs::remove_file(host.0.session.root().join("dev/vfio/31")).expect("there");
    let findings = host.findings(options([("machine", "train".into())]));
    assert_eq!(errors(&findings), ["dma-entry-limit", "vfio-node"], "{findings:?}");
    assert_eq!(findings["numa-memory"].0, "warning");
}

#[test]
fn a_machine_that_is_only_thought_of_gets_what_it_would_get_or_the_reason() {
    let host = Host::with(&[GPU, FAR]);
    assert_eq!(errors(&host.findings(of_spec(spec("tank/train-1", 1)))), [] as [&str; 0]);
    let apart = host.findings(of_spec(spec("tank/train-1", 2)));
    assert_eq!(errors(&apart), ["admission"]);
    assert_eq!(apart["admission"].1, "device[0] wishes for 2 GPUs on one NUMA node; 2 are free");
    let absent = host.findings(of_spec(spec("tank/nowhere", 1)));
    assert_eq!((errors(&absent), absent["storage"].1.as_str()), (vec!["storage"], "disk[0].volume tank/nowhere is not there"));
    let mut wide = spec("tank/train-1", 0);
    wide.remove("device");
    wide.insert("vcpus", 100_000_u32.into());
    assert!(host.findings(of_spec(wide))["admission"].1.starts_with("vcpus is 100000; the host has "));
    assert!(host.0.objects().expect("seen").keys().all(|path| !path.contains("/machine/")));
}

#[test]
fn what_is_wrong_with_a_request_is_said_by_name() {
    let host = Host::with(&[]);
    let cases = [
        (Options::new(), ErrorKind::InvalidSpec, "a pre-flight takes either machine or spec"),
        (options([("machine", 7_u32.into())]), ErrorKind::InvalidSpec, "option \"machine\" is not a string (s)"),
        (options([("spec", "a".into())]), ErrorKind::InvalidSpec, "option \"spec\" is not a specification (a{sv})"),
        (options([("machine", "a".into()), ("colour", "red".into())]), ErrorKind::UnknownOption, "there is no option \"colour\" here"),
        (options([("machine", "a".into()), ("tenant", 1_u32.into())]), ErrorKind::InvalidSpec, "option \"tenant\" is not a string (s)"),
        (options([("machine", "a".into())]), ErrorKind::NoSuchMachine, "tenant default has no machine \"a\""),
        (options([("machine", "a".into()), ("tenant", "b".into())]), ErrorKind::NoSuchTenant, "there is no tenant \"b\""),
        (of_spec(Options::new()), ErrorKind::InvalidSpec, "format is missing"),
    ];
    for (request, kind, message) in cases {
        let failure = host.0.refused(MANAGER, "Preflight", &(request,));
        assert_eq!((failure.kind, failure.message.as_str()), (kind, message));
    }
}

#[test]
#[cfg_attr(unprivileged, ignore = "only root can be somebody else")]
fn an_owner_is_answered_for_their_own_tenant_and_learns_nothing_of_others() {
    let host = Host::with(&[GPU]);
    host.0.session.polkit.allow("org.gpuward.use-own", Who::Anybody);
    let users: HashMap<String, Variant<'static>> = HashMap::from([("users".into(), vec![ALICE].into())]);
    let quota = [("gpus", 1_u32.into()), ("machines", 1_u32.into()), ("vcpus", 4_u32.into()), ("memory", (4_u64 << 30).into())];
    let quota: HashMap<String, Variant<'static>> = quota.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    let tenant = options([
        ("format", 1_u32.into()),
        ("name", "acme".into()),
        ("owners", users.into()),
        ("pools", vec!["tank".to_owned()].into()),
        ("quota", quota.into()),
    ]);
    host.ends("done", MANAGER, "CreateTenant", &(tenant, Options::new()));
    let machine = host.machine();
    host.ends("done", (&machine, "Machine"), "Start", &(Options::new(),));
    let answers = Person::alone(ALICE).with_client(host.0.session.address(), |client| {
        let ask = |tenant: &'static str, mut request: Options<'static>| {
            request.insert("tenant", tenant.into());
            let body = (request,);
            let call = client.bus().call_method(Some("org.gpuward1"), "/org/gpuward1", Some("org.gpuward1.Manager"), "Preflight", &body);
            match client.wait(call) {
                Ok(message) => Ok(message.body().deserialize::<Vec<Dict>>().expect("findings").into_iter().map(Record).collect::<Vec<_>>()),
                Err(CallError::Answered(failure)) => Err(*failure),
                Err(error) => panic!("{error:?}"),
            }
        };
        let machine = || options([("machine", "train".into())]);
        let path = options([("path", "/etc/shadow".into())]);
        let mut administrators = spec("tank/train-1", 1);
        administrators.insert("disk", vec![path].into());
        [
            ask("acme", of_spec(spec("tank/train-1", 1))),
            ask("default", machine()),
            ask("nobody", machine()),
            ask("acme", of_spec(administrators)),
            ask("acme", of_spec(spec("rival/a", 1))),
            ask("acme", of_spec(spec("tank/train-1", 2))),
        ]
    });
    let [own, foreign, absent, path, pool, quota] = answers.expect("root can be them");
    let own = own.expect("answered");
    assert_eq!(told(&own[0]), ("admission".into(), ("error".into(), "device[0] wishes for 1 GPU; 0 are free".into())));
    assert!(own[0].texts("evidence").contains(&format!("{GPU} belongs to another tenant")), "{:?}", own[0]);
    assert!(!format!("{own:?}").contains("train"), "{own:?}");
    let (foreign, absent) = (foreign.expect_err("not theirs"), absent.expect_err("nobody's"));
    assert_eq!((foreign.kind, &foreign), (ErrorKind::NotAuthorized, &absent));
    assert_eq!(path.expect_err("the administrator's").kind, ErrorKind::NotAuthorized);
    assert_eq!(pool.expect_err("not the tenant's").kind, ErrorKind::NotAuthorized);
    assert_eq!(told(&quota.expect("answered")[0]).1.1, "tenant acme may not have so much");
}

#[test]
fn the_command_says_what_speaks_against_a_start_and_ends_with_3() {
    let session = typed::session("dgx-h100", env!("CARGO_BIN_EXE_gpuward-sim"));
    done(&session, &["assign", GPU]);
    let file = session.root().join("train.toml");
    fs::write(&file, "format = 1\nvcpus = 2\nmemory = '1GiB'\n[[disk]]\nvolume = 'tank/train-1'\n[[device]]\nkind = 'gpu'\n")
        .expect("written");
    let file = file.to_str().expect("UTF-8");
    let said = done(&session, &["preflight", "train", "-f", file]);
    assert!(said.ends_with("a start of default/train would be tried; nothing was changed\n"), "{said}");
    done(&session, &["machine", "create", "train", "-f", file]);
    let findings = json(&session, &["preflight", "train"]);
    assert!(findings["findings"].as_array().is_some_and(|found| found.iter().all(|finding| finding["severity"] != "error")), "{findings}");
    SimHost::at(SimRoot::Kept(session.root().to_owned())).set("proc/meminfo", LITTLE_MEMORY).expect("laid");
    let output = typed::run(&session, &["preflight", "train"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(3), "{said}");
    let expected = "error    its 1 GiB of memory are pinned when it starts, and the host has less (free-memory)\n  \
                    why    /proc/meminfo: MemAvailable is 512 MiB\n  remedy stop other machines, or give it less memory\n";
    assert!(said.starts_with(expected) && said.ends_with("a start of default/train would be refused\n"), "{said}");
}
