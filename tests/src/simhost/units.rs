//! The service manager of a simulated host: a unit is active while a process in its cgroup lives.

use std::fs;
use std::io;
use std::path::Path;

use vfio::UnitAsk;

use super::rules;
use super::tree::{PRIVATE, Tree};

/// There while the host shuts down.
pub const SHUTTING_DOWN: &str = ".sim/shutting-down";

/// Whether a process of `unit` lives.
pub fn is_active(tree: &Tree, unit: &str) -> bool {
    !processes(tree, unit).is_empty()
}

/// What is asked as a word, and what does it.
pub fn work(tree: &Tree, ask: &UnitAsk) -> (&'static str, Box<dyn FnOnce() -> io::Result<()>>) {
    let (tree, unit) = (tree.clone(), ask.unit().to_owned());
    match ask {
        UnitAsk::Stop(_) => ("stop", Box::new(move || stop(&tree, &unit))),
        UnitAsk::Start(_) => ("start", Box::new(move || start(&tree, &unit))),
        UnitAsk::Run { command, .. } => {
            let command = command.clone();
            ("run", Box::new(move || run(&tree, &command)))
        }
    }
}

fn run(tree: &Tree, command: &[String]) -> io::Result<()> {
    let program = command.first().map(|program| program.trim_start_matches('/')).unwrap_or_default();
    match command {
        [_, word, device] if program.ends_with("nvidia/sriov-manage") && tree.exists(program) => {
            rules::sriov_manage(tree, device, word == "-e").map_err(io::Error::from)
        }
        _ => Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no {program}"))),
    }
}

fn processes(tree: &Tree, unit: &str) -> Vec<String> {
    let of_unit = |pid: &String| tree.read(format!("proc/{pid}/cgroup")).ends_with(&format!("/{unit}"));
    let is_pid = |name: &String| name.bytes().all(|byte| byte.is_ascii_digit());
    tree.entries("proc").into_iter().filter(is_pid).filter(of_unit).collect()
}

fn aside(unit: &str) -> String {
    format!("{PRIVATE}/units/{unit}")
}

fn stop(tree: &Tree, unit: &str) -> io::Result<()> {
    tree.make_dir(aside(unit))?;
    processes(tree, unit).into_iter().try_for_each(|pid| tree.rename(format!("proc/{pid}"), format!("{}/{pid}", aside(unit))))
}

// The same processes again, each with those of its nodes that there are now.
fn start(tree: &Tree, unit: &str) -> io::Result<()> {
    for pid in tree.entries(aside(unit)) {
        tree.rename(format!("{}/{pid}", aside(unit)), format!("proc/{pid}"))?;
        for fd in tree.entries(format!("proc/{pid}/fd")) {
            let file = format!("proc/{pid}/fd/{fd}");
            let target = fs::read_link(tree.root().join(&file))?;
            if !tree.exists(target.strip_prefix(Path::new("/")).unwrap_or(&target)) {
                tree.remove(file)?;
            }
        }
    }
    Ok(())
}
