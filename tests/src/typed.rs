//! The command as a person types it at a session's host.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::polkit::Who;
use crate::program;
use crate::session::Session;
use crate::simhost::SimRoot;

/// The described host `name`, whose daemon obeys whoever runs the test. `simulator` is the program `gpuward-sim`.
///
/// # Panics
/// It cannot be laid or started.
pub fn session(name: &str, simulator: &str) -> Session {
    program::gpuward();
    let root = SimRoot::temporary(name).unwrap_or_else(|error| panic!("{name} is not laid: {error}"));
    let session = Session::start(root, Path::new(simulator)).unwrap_or_else(|error| panic!("{name} is not started: {error}"));
    session.polkit.allow("*", Who::Uid(rustix::process::getuid().as_raw()));
    session
}

/// What comes of `gpuward` with these arguments.
///
/// # Panics
/// It cannot be run.
pub fn run(session: &Session, arguments: &[&str]) -> Output {
    session.command("gpuward").args(arguments).output().unwrap_or_else(|error| panic!("gpuward does not run: {error}"))
}

/// What a command prints that must do what it was told.
///
/// # Panics
/// It did not.
pub fn done(session: &Session, arguments: &[&str]) -> String {
    let output = run(session, arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(output.stderr));
    text(output.stdout)
}

/// How a command that does not do what it was told ends, and what it says.
pub fn ended(session: &Session, arguments: &[&str]) -> (Option<i32>, String) {
    let output = run(session, arguments);
    (output.status.code(), text(output.stderr))
}

/// What a command that must do what it was told prints with `--json`.
///
/// # Panics
/// It did not, or that is no JSON.
pub fn json(session: &Session, arguments: &[&str]) -> Value {
    let printed = done(session, &[arguments, &["--json"]].concat());
    serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{arguments:?} prints no JSON: {error}"))
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| panic!("no UTF-8: {error}"))
}
