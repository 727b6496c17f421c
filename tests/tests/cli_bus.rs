//! How the command takes the answers of a service, the bad ones above all: against a service that answers what a case wants.
//!
//! What the real service answers is tested with it; here are the failures that it cannot be made to give at will.

#![allow(clippy::expect_used)]

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;
use tests::bus::PrivateBus;
use tests::program;
use tokio::runtime::Runtime;
use zbus::message::{Header, Message};
use zbus::names::ErrorName;
use zbus::{Connection, DBusError, ObjectPath, OwnedVariant, Variant, fdo, interface};

type Dict = HashMap<String, OwnedVariant>;

/// A failure as the service sends it.
#[derive(Clone, Debug)]
struct Bad(&'static str, &'static str);

impl DBusError for Bad {
    fn create_reply(&self, call: &Header<'_>) -> zbus::Result<Message> {
        let detail = HashMap::from([("why", Variant::from(vec!["a fact"])), ("remedy", Variant::from("a remedy"))]);
        Message::error(call, self.name()).build(&(self.1, detail))
    }

    fn name(&self) -> ErrorName<'_> {
        ErrorName::from_str_unchecked(self.0)
    }

    fn description(&self) -> Option<&str> {
        Some(self.1)
    }
}

fn owned(value: impl Into<Variant<'static>>) -> OwnedVariant {
    value.into().try_to_owned().expect("no file descriptor")
}

/// Answers `apply` with a failure, or with a job that ends so.
struct Manager(Result<(), Bad>);

#[interface(name = "org.gpuward1.Manager")]
impl Manager {
    fn apply(&self, _goals: Vec<Dict>, _options: Dict) -> Result<ObjectPath<'static>, Bad> {
        self.0.clone()?;
        Ok(ObjectPath::from_static_str_unchecked("/org/gpuward1/job/7"))
    }
}

/// A job whose `Wait` answers `.0`.
struct Job(Vec<(&'static str, Variant<'static>)>);

#[interface(name = "org.gpuward1.Job")]
impl Job {
    fn wait(&self, _options: Dict) -> Dict {
        self.0.iter().map(|(key, value)| ((*key).to_owned(), owned(value.try_clone().expect("no file descriptor")))).collect()
    }
}

/// The `result` of a job that made a claim.
fn claims() -> Variant<'static> {
    HashMap::from([("claims".to_owned(), Variant::from(vec!["c1"]))]).into()
}

struct Service {
    _connection: Connection,
    _runtime: Runtime,
    bus: PrivateBus,
    _dir: TempDir,
}

fn serve(answer: Result<(), Bad>, job: Vec<(&'static str, Variant<'static>)>) -> Service {
    let dir = TempDir::new().expect("made");
    let bus = PrivateBus::start(dir.path()).expect("starts");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("made");
    let connection = runtime.block_on(async {
        let builder = zbus::connection::Builder::address(bus.address());
        let builder = builder.serve_at("/org/gpuward1", Manager(answer)).serve_at("/org/gpuward1", fdo::ObjectManager);
        builder.serve_at("/org/gpuward1/job/7", Job(job)).name("org.gpuward1").build().await
    });
    Service { _connection: connection.expect("connects"), _runtime: runtime, bus, _dir: dir }
}

fn gpuward(address: &str, arguments: &[&str]) -> Output {
    Command::new(program::gpuward()).args(["--bus", address]).args(arguments).output().expect("runs")
}

fn ended(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

const ASSIGN: [&str; 2] = ["assign", "41:00.0"];

#[test]
fn a_named_failure_is_said_with_its_evidence_and_its_exit_status() {
    let cases = [
        ("org.gpuward1.Error.GroupShared", 3, "refused"),
        ("org.gpuward1.Error.NotAuthorized", 4, "not authorised"),
        ("org.gpuward1.Error.Stuck", 1, "failed"),
        ("org.gpuward1.Error.FromTheFuture", 1, "failed"),
    ];
    for (name, status, word) in cases {
        let service = serve(Err(Bad(name, "it cannot be")), Vec::new());
        let expected = format!("{word}: it cannot be\n  why    a fact\n  remedy a remedy\n");
        assert_eq!(ended(&gpuward(service.bus.address(), &ASSIGN)), (Some(status), expected), "{name}");
    }
}

#[test]
fn what_the_bus_itself_denies_is_not_authorised() {
    let service = serve(Err(Bad("org.freedesktop.DBus.Error.AccessDenied", "rejected")), Vec::new());
    let (status, said) = ended(&gpuward(service.bus.address(), &ASSIGN));
    assert_eq!(status, Some(4));
    assert!(said.contains("group gpuward"), "{said}");
}

#[test]
fn a_bus_without_the_service_is_said_with_the_remedy() {
    let dir = TempDir::new().expect("made");
    let bus = PrivateBus::start(dir.path()).expect("starts");
    for arguments in [&["list"][..], &ASSIGN, &["monitor"], &["job", "watch", "7"], &["machine", "show", "train-1"]] {
        let (status, said) = ended(&gpuward(bus.address(), arguments));
        assert_eq!(status, Some(5), "{arguments:?}: {said}");
        assert!(said.contains("systemctl start gpuwardd"), "{said}");
    }
}

#[test]
fn a_job_ends_the_command_as_it_ended() {
    let failure = [("error", Variant::from("Stuck")), ("message", Variant::from("the driver hangs"))];
    let cases = [
        (vec![("state", Variant::from("done")), ("result", claims())], 0, ""),
        (vec![("state", Variant::from("canceled"))], 1, "failed: job 7 was canceled\n"),
        ([("state", Variant::from("failed"))].into_iter().chain(failure).collect(), 1, "failed: the driver hangs\n"),
        (Vec::new(), 1, "failed: job 7 ended as \"\" without a reason\n"),
    ];
    for (job, status, said) in cases {
        let service = serve(Ok(()), job);
        assert_eq!(ended(&gpuward(service.bus.address(), &ASSIGN)), (Some(status), said.to_owned()));
    }
}

#[test]
fn a_job_that_is_not_there_is_said() {
    let service = serve(Ok(()), Vec::new());
    for verb in ["show", "watch", "cancel"] {
        let (status, said) = ended(&gpuward(service.bus.address(), &["job", verb, "99"]));
        assert_eq!(status, Some(3), "{verb}: {said}");
        assert!(said.starts_with("refused: there is no job 99"), "{verb}: {said}");
    }
}

#[test]
fn what_came_of_a_job_is_said_in_text_and_in_json() {
    let service = serve(Ok(()), vec![("state", Variant::from("done")), ("result", claims())]);
    let said = |arguments: &[&str]| String::from_utf8(gpuward(service.bus.address(), arguments).stdout).expect("UTF-8");
    assert_eq!(said(&ASSIGN), "0000:41:00.0 is in the pool (job 7)\n");
    assert_eq!(said(&["assign", "41:00.0", "--no-wait"]), "job 7\n");
    assert_eq!(said(&["assign", "41:00.0", "--json"]), "{\"job\":7,\"state\":\"done\",\"result\":{\"claims\":[\"c1\"]}}\n");
    assert_eq!(said(&["assign", "41:00.0", "--json", "--no-wait"]), "{\"job\":7,\"state\":null,\"result\":null}\n");
}

#[test]
fn a_specification_with_a_typo_of_toml_is_said_with_file_and_line() {
    let dir = TempDir::new().expect("made");
    let file = Path::new(dir.path()).join("train.toml");
    fs::write(&file, "format = 1\nvcpus = = 2\n").expect("written");
    let file = file.to_str().expect("UTF-8");
    let (status, said) = ended(&gpuward("unix:path=/nonexistent", &["machine", "create", "train-1", "-f", file]));
    assert_eq!(status, Some(2));
    assert!(said.starts_with(&format!("gpuward: {file}:2: ")), "{said}");
}
