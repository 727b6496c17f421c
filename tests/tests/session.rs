//! The real daemon on a simulated host, driven by the real command: machines outlive it, and it finds them again.
#![allow(clippy::expect_used)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tests::polkit::Who;
use tests::program;
use tests::session::Session;
use tests::simhost::SimRoot;

const MACHINE: &str = r#"
format = 1
name = "train-1"
vcpus = 4
memory = "4GiB"

[[disk]]
volume = "tank/train-1"

[[device]]
kind = "gpu"
count = 2
"#;

const GPUS: [&str; 2] = ["0000:1b:00.0", "0000:43:00.0"];

fn session(host: &str) -> Session {
    program::gpuward();
    let root = SimRoot::temporary(host).expect("the host is described");
    let session = Session::start(root, Path::new(env!("CARGO_BIN_EXE_gpuward-sim"))).expect("the daemon comes up");
    session.polkit.allow("*", Who::Anybody);
    session
}

fn gpuward(session: &Session, arguments: &[&str]) -> Output {
    session.command("gpuward").args(arguments).output().expect("gpuward runs")
}

fn done(session: &Session, arguments: &[&str]) -> String {
    let output = gpuward(session, arguments);
    assert!(output.status.success(), "{arguments:?}: {}{}", String::from_utf8_lossy(&output.stderr), log(session));
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn json(session: &Session, arguments: &[&str]) -> Value {
    serde_json::from_str(&done(session, &[&["--json"], arguments].concat())).expect("JSON")
}

fn log(session: &Session) -> String {
    fs::read_to_string(session.root().join("run/gpuwardd.log")).unwrap_or_default()
}

/// A running machine with two GPUs.
fn machine(session: &Session) {
    let spec = session.root().join("train-1.toml");
    fs::write(&spec, MACHINE).expect("written");
    done(session, &["assign", GPUS[0], GPUS[1]]);
    done(session, &["machine", "create", "train-1", "-f", spec.to_str().expect("UTF-8")]);
    done(session, &["machine", "start", "train-1"]);
}

fn state(session: &Session) -> String {
    json(session, &["machine", "show", "train-1"])["state"].as_str().expect("a word").to_owned()
}

fn leader(session: &Session) -> Pid {
    let leader = json(session, &["machine", "show", "train-1"])["leader"].as_u64().expect("a number");
    i32::try_from(leader).ok().and_then(Pid::from_raw).expect("a process")
}

fn device_states(session: &Session) -> Vec<String> {
    let show = |device: &&str| json(session, &["show", device])["state"].as_str().expect("a word").to_owned();
    GPUS.iter().map(show).collect()
}

fn until(session: &Session, wanted: &str) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while state(session) != wanted {
        assert!(Instant::now() < deadline, "the machine is {}, not {wanted}\n{}", state(session), log(session));
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_machine_outlives_the_daemon_and_is_adopted() {
    let mut session = session("dgx-h100");
    machine(&session);
    let before = leader(&session);
    session.kill_daemon().expect("killed");
    session.start_daemon().expect("it comes up again");
    until(&session, "running");
    assert_eq!(leader(&session), before);
    assert_eq!(device_states(&session), ["running", "running"]);
    done(&session, &["machine", "kill", "train-1"]);
    assert_eq!(device_states(&session), ["free", "free"]);
}

#[test]
fn p68_a_machine_that_ended_while_the_daemon_was_away_gives_its_devices_back() {
    let mut session = session("dgx-h100");
    machine(&session);
    let leader = leader(&session);
    session.kill_daemon().expect("killed");
    kill_process(leader, Signal::KILL).expect("killed");
    session.start_daemon().expect("it comes up again");
    until(&session, "off");
    assert_eq!(device_states(&session), ["free", "free"]);
}

#[test]
fn killing_the_hypervisor_frees_the_devices() {
    let session = session("dgx-h100");
    machine(&session);
    kill_process(leader(&session), Signal::KILL).expect("killed");
    until(&session, "off");
    assert_eq!(device_states(&session), ["free", "free"]);
}

#[test]
fn a_daemon_that_is_told_to_end_leaves_the_machine_running() {
    let mut session = session("dgx-h100");
    machine(&session);
    let before = leader(&session);
    let status = session.stop_daemon().expect("it ends").expect("it ran");
    assert!(status.success(), "{status}");
    session.start_daemon().expect("it comes up again");
    until(&session, "running");
    assert_eq!(leader(&session), before);
}

#[test]
fn the_tour_of_make_demo_runs_to_its_end() {
    program::gpuward();
    let tour = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo.sh");
    let mut sim = Command::new(env!("CARGO_BIN_EXE_gpuward-sim"));
    sim.args(["dgx-h100", "--"]).arg(tour).env("GPUWARD_DEMO_PAUSE", "0");
    let output = sim.output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("That was the tour"), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for seen in ["held by nvidia-persistenced[812]", "shares IOMMU group 1", "running  default/train-1", "claim-released"] {
        assert!(text.contains(seen), "{seen:?} is not in\n{text}");
    }
}
