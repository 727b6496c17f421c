//! The command and the real daemon, on a simulated host: what a person types, and what comes back.
#![allow(clippy::expect_used)]

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};

use serde_json::Value;
use tests::program;
use tests::session::Session;
use tests::typed::{self, done, ended, json};

const GPU: &str = "0000:1b:00.0";
const OTHER: &str = "0000:43:00.0";
const IN_USE: &str = "0000:52:00.0";

/// A DGX whose daemon obeys whoever runs the test.
fn dgx() -> Session {
    typed::session("dgx-h100", env!("CARGO_BIN_EXE_gpuward-sim"))
}

/// The line of a device in `gpuward list`.
fn line_of(session: &Session, device: &str) -> String {
    let list = done(session, &["list"]);
    list.lines().find(|line| line.starts_with(device)).unwrap_or_default().to_owned()
}

fn spec(session: &Session, text: &str) -> String {
    let file = session.root().join("machine.toml");
    fs::write(&file, text).expect("written");
    file.to_str().expect("UTF-8").to_owned()
}

const TRAIN: &str = r#"
format = 1
vcpus = 2
memory = "1GiB"
labels = { job = "4711" }
[[disk]]
path = "/var/lib/images/train-1.img"
[[device]]
kind = "gpu"
count = 2
"#;

#[test]
fn a_device_goes_into_the_pool_and_back() {
    let session = dgx();
    let plan = done(&session, &["plan", "assign", GPU]);
    assert!(plan.contains("driver          nvidia → vfio-pci"), "{plan}");
    assert!(plan.ends_with("nothing was changed; `gpuward assign 0000:1b:00.0` applies this\n"), "{plan}");
    assert!(line_of(&session, GPU).ends_with("host   nvidia"), "{}", line_of(&session, GPU));

    assert_eq!(done(&session, &["assign", "1b:00.0"]), "0000:1b:00.0 is in the pool (job 2)\n");
    assert!(line_of(&session, GPU).ends_with("free   –"), "{}", line_of(&session, GPU));
    assert_eq!(done(&session, &["plan", "assign", GPU]), "nothing to do: 0000:1b:00.0 as wished already\n");

    assert_eq!(done(&session, &["release", "pci_0000_1b_00_0"]), "0000:1b:00.0 is the host's again (job 3)\n");
    assert!(line_of(&session, GPU).ends_with("host   nvidia"), "{}", line_of(&session, GPU));
}

#[test]
fn the_service_and_the_tree_it_watches_tell_the_same_of_a_device() {
    let session = dgx();
    let told = json(&session, &["show", IN_USE]);
    let mut read = json(&session, &["show", IN_USE, "--root", session.root().to_str().expect("UTF-8")]);
    assert_eq!(told["use"], "pool");
    read["use"] = told["use"].clone();
    assert_eq!(told, read);
}

#[test]
fn a_device_in_use_is_refused_with_who_uses_it() {
    let session = dgx();
    let (status, said) = ended(&session, &["assign", IN_USE]);
    assert_eq!(status, Some(3));
    assert!(said.starts_with("refused: 0000:52:00.0 is held by nvidia-persistenced[812]\n  why    "), "{said}");
    assert!(said.ends_with("  remedy systemctl stop nvidia-persistenced.service\n"), "{said}");

    let (status, planned) = ended(&session, &["plan", "assign", IN_USE]);
    assert_eq!((status, planned), (Some(3), said));
}

#[test]
fn whoever_polkit_does_not_allow_is_not_authorised() {
    let session = dgx();
    session.polkit.forbid_all();
    let (status, said) = as_ordinary_user(&session, &["assign", GPU]);
    assert_eq!(status, Some(4), "{said}");
    assert!(said.starts_with("not authorised: "), "{said}");
}

/// Runs the command as somebody who is not root: root needs no polkit.
fn as_ordinary_user(session: &Session, arguments: &[&str]) -> (Option<i32>, String) {
    const NOBODY: u32 = 65534;
    let mut command = session.command("gpuward");
    if rustix::process::getuid().is_root() {
        // Neither the socket's directory nor the build's need be open to everybody.
        let program = session.root().join("run/gpuward-for-all");
        fs::copy(program::gpuward(), &program).expect("copied");
        fs::set_permissions(session.root(), Permissions::from_mode(0o755)).expect("opened");
        command = session.command(program.to_str().expect("UTF-8"));
        command.uid(NOBODY).gid(NOBODY);
    }
    let output = command.args(arguments).output().expect("runs");
    (output.status.code(), String::from_utf8(output.stderr).expect("UTF-8"))
}

#[test]
fn a_machine_is_made_started_killed_and_forgotten() {
    let session = dgx();
    done(&session, &["assign", GPU, OTHER]);
    let file = spec(&session, TRAIN);
    assert!(done(&session, &["machine", "create", "train-1", "-f", &file]).starts_with("machine default/train-1 is made, and off"));
    assert!(done(&session, &["machine", "start", "train-1"]).starts_with("machine default/train-1 is running"));
    assert!(line_of(&session, GPU).ends_with("running  default/train-1"), "{}", line_of(&session, GPU));

    let machine = json(&session, &["machine", "show", "default/train-1"]);
    assert_eq!((&machine["state"], &machine["isolation-level"]), (&"running".into(), &"whole-gpu".into()));
    assert_eq!(machine["devices"].as_array().map(Vec::len), Some(2));
    documented(&machine);
    assert_eq!(json(&session, &["machine", "list"])["machines"][0], machine);

    assert!(done(&session, &["machine", "reboot", "train-1"]).starts_with("machine default/train-1 was asked to reboot"));
    let explained = json(&session, &["machine", "explain", "train-1"]);
    assert_eq!((&explained["state"], &explained["guest-state"]), (&"running".into(), &"started".into()));
    documented(&explained);
    let mut console = session.command("gpuward");
    console.args(["machine", "console", "train-1"]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut console = Monitor(console.spawn().expect("runs"));
    let mut greeting = String::new();
    BufReader::new(console.0.stdout.take().expect("piped")).read_line(&mut greeting).expect("read");
    assert_eq!(greeting, tests::standin::GREETING);
    assert_eq!(ended(&session, &["machine", "console", "train-1"]).0, Some(3), "it is open already");
    drop(console);

    let (status, said) = ended(&session, &["release", GPU]);
    assert_eq!(status, Some(3), "{said}");
    assert!(done(&session, &["machine", "kill", "train-1"]).starts_with("machine default/train-1 is off"));
    assert!(line_of(&session, GPU).contains("free"), "{}", line_of(&session, GPU));
    done(&session, &["machine", "remove", "train-1"]);
    assert_eq!(ended(&session, &["machine", "show", "train-1"]).0, Some(3));

    let jobs = json(&session, &["job", "list"]);
    let kinds: Vec<_> = jobs["jobs"].as_array().expect("an array").iter().map(|job| job["kind"].as_str().expect("text")).collect();
    assert_eq!(kinds, ["recover", "assign", "machine-create", "machine-start", "machine-reboot", "machine-kill", "machine-remove"]);
    documented(&jobs["jobs"][1]);
    assert_eq!(json(&session, &["job", "show", "2"]), jobs["jobs"][1]);
    assert_eq!(done(&session, &["job", "watch", "2"]), "done (job 2)\n");
}

#[test]
fn devices_are_claimed_for_a_domain_of_others_listed_and_released() {
    const DOMAIN: &str = "6b2f5c1e-2f6a-4d55-9f0e-5c7f3f3f0001";
    let session = dgx();
    done(&session, &["assign", GPU, OTHER]);
    let made = done(&session, &["claim", "make", "--device", "43:00.0", "--domain", DOMAIN, "--ttl", "3600"]);
    let listed = json(&session, &["claims"]);
    let claim = &listed["claims"][0];
    documented(claim);
    let id = claim["claim"].as_str().expect("text").to_owned();
    assert_eq!(made, format!("claimed: {id} (job 3)\n"));
    let told = ["state", "domain-uuid", "release-on", "machine"].map(|key| claim[key].as_str().unwrap_or_default());
    assert_eq!((told, &claim["devices"][0]), (["active", DOMAIN, "manual", ""], &OTHER.into()));
    assert!(done(&session, &["claims"]).contains(&format!("{id}  active  {OTHER}  domain {DOMAIN}  manual or 20")));
    assert!(line_of(&session, OTHER).ends_with(&format!("claimed  claim {id}")), "{}", line_of(&session, OTHER));
    assert!(done(&session, &["claim", "xml", &id]).contains("<hostdev mode='subsystem' type='pci' managed='no'>"));

    let (status, said) = ended(&session, &["claim", "make", "--gpu", "2", "--domain", DOMAIN]);
    assert_eq!((status, said.starts_with("refused: devices[0] wishes for 2 GPUs")), (Some(3), true), "{said}");
    let (status, said) = ended(&session, &["claim", "release", &id, "--epoch", "99"]);
    assert_eq!((status, said.starts_with(&format!("refused: claim {id} has epoch 1, not 99"))), (Some(3), true), "{said}");
    assert_eq!(done(&session, &["claim", "release", &id]), format!("claim {id} is released (job 4)\n"));
    for verb in ["release", "xml"] {
        let (status, said) = ended(&session, &["claim", verb, &id]);
        assert_eq!((status, said.starts_with(&format!("refused: there is no claim {id}"))), (Some(3), true), "{said}");
    }
    assert_eq!(done(&session, &["claims"]), "CLAIM  STATE  DEVICES  HELD BY  ENDS ON  EPOCH  REASON\n");
}

#[test]
fn a_bad_specification_is_refused_by_the_path_of_its_key() {
    let session = dgx();
    let cases = [
        ("format = 1\nvcpus = 0\nmemory = \"1GiB\"\n", "vcpus"),
        ("format = 1\nvcpus = 1\nmemory = \"lots\"\n", "memory"),
        ("format = 1\nvcpus = 1\nmemory = \"1GiB\"\n[[disk]]\nvolume = \"a/b\"\n[[device]]\nkindd = \"gpu\"\n", "device[0]"),
    ];
    for (text, key) in cases {
        let file = spec(&session, text);
        let (status, said) = ended(&session, &["machine", "create", "train-1", "-f", &file]);
        assert_eq!(status, Some(3), "{said}");
        assert!(said.starts_with(&format!("refused: {key}")), "{said}");
    }
    let file = spec(&session, TRAIN);
    for name in ["a<b", "a/b/c", "other/train-1", "-"] {
        let (status, said) = ended(&session, &["machine", "create", name, "-f", &file]);
        assert_eq!(status, Some(3), "{name}: {said}");
    }
    assert_eq!(done(&session, &["machine", "list"]), "MACHINE  STATE  ISOLATION  DEVICES  REASON\n");
}

/// `gpuward monitor`, ended when dropped.
struct Monitor(Child);

impl Drop for Monitor {
    fn drop(&mut self) {
        self.0.kill().and_then(|()| self.0.wait()).map(drop).expect("ended");
    }
}

#[test]
fn the_monitor_tells_of_changes_and_of_the_service_going_and_coming() {
    let mut session = dgx();
    let mut command = session.command("gpuward");
    let mut monitor = Monitor(command.args(["monitor", "--json"]).stdout(Stdio::piped()).spawn().expect("runs"));
    let mut lines = BufReader::new(monitor.0.stdout.take().expect("piped")).lines();
    // It has subscribed when it tells of something.
    let mut next = |what: &str, subject: &str| {
        let told = lines.by_ref().map(|line| serde_json::from_str::<Value>(&line.expect("read")).expect("JSON"));
        let mut told = told.filter(|line| line["what"] == what && line["subject"] == subject);
        told.next().unwrap_or_default()
    };
    std::thread::sleep(std::time::Duration::from_millis(500));
    done(&session, &["assign", GPU]);
    assert_eq!(next("changed", GPU)["detail"]["state"], "assigning");
    assert_eq!(next("job-removed", "job 2")["detail"]["result"], "done");
    session.kill_daemon().expect("killed");
    assert_eq!(next("service-gone", "org.gpuward1")["what"], "service-gone");
    session.start_daemon().expect("started");
    assert_eq!(next("service-there", "org.gpuward1")["what"], "service-there");
}

/// Every key of an object is in `docs/cli.md`.
fn documented(object: &Value) {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/cli.md")).expect("there");
    for key in object.as_object().expect("an object").keys() {
        assert!(page.contains(&format!("`{key}`")), "docs/cli.md does not tell of {key}");
    }
}
