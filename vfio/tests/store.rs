//! Stores through a real child: this program is also the child, so it has no test harness.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use vfio::{Kernel, Linux, STORE_ARGUMENT, StoreError, run_store_child};

fn kernel(root: &Path) -> Linux {
    fs::create_dir_all(root.join("notes")).unwrap();
    Linux::new(root, std::env::current_exe().unwrap(), root.join("notes"))
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn a_store_that_can_block_is_made_by_a_child(root: &Path) {
    fs::write(root.join("bind"), "").unwrap();
    kernel(root).store(Path::new("bind"), "0000:41:00.0", soon()).unwrap();
    assert_eq!(fs::read_to_string(root.join("bind")).unwrap(), "0000:41:00.0");
    assert_eq!(fs::read_dir(root.join("notes")).unwrap().count(), 0, "the note is gone");
}

fn a_missing_attribute_is_not_made(root: &Path) {
    for attribute in ["unbind", "driver_override"] {
        let error = kernel(root).store(Path::new(attribute), "x", soon()).unwrap_err();
        assert_eq!(error.errno(), Some(2), "{attribute}: ENOENT");
        assert!(!root.join(attribute).exists());
    }
}

// P1, P2: a pipe that nobody reads blocks its writer as a driver would.
fn a_store_that_hangs_costs_one_child(root: &Path) {
    let pipe = root.join("reset");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::from(0o600), 0).unwrap();
    let kernel = kernel(root);
    let error = kernel.store(Path::new("reset"), "1", Instant::now() + Duration::from_millis(300)).unwrap_err();
    assert!(matches!(error, StoreError::Stuck { .. }), "{error}");
    let notes: Vec<_> = fs::read_dir(root.join("notes")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(fs::read_to_string(&notes[0]).unwrap().contains("value=1"), "the stuck child says what it does");
    fs::write(root.join("bind"), "").unwrap();
    kernel.store(Path::new("bind"), "x", soon()).unwrap();
    let mut late = String::new();
    fs::File::open(&pipe).unwrap().read_to_string(&mut late).unwrap();
    assert_eq!(late, "1", "the child lived on and its effect came late");
}

fn a_program_that_is_no_child_is_an_error(root: &Path) {
    fs::write(root.join("bind"), "").unwrap();
    let error = Linux::new(root, "/bin/true", root).store(Path::new("bind"), "x", soon()).unwrap_err();
    assert!(matches!(error, StoreError::Refused { .. }), "{error}");
}

type Case = fn(&Path);

fn main() -> ExitCode {
    if std::env::args().any(|argument| argument == STORE_ARGUMENT) {
        return run_store_child();
    }
    let cases: [(&str, Case); 4] = [
        ("a_store_that_can_block_is_made_by_a_child", a_store_that_can_block_is_made_by_a_child),
        ("a_missing_attribute_is_not_made", a_missing_attribute_is_not_made),
        ("a_store_that_hangs_costs_one_child", a_store_that_hangs_costs_one_child),
        ("a_program_that_is_no_child_is_an_error", a_program_that_is_no_child_is_an_error),
    ];
    for (name, case) in &cases {
        let root = tempfile::tempdir().unwrap();
        case(root.path());
        println!("test {name} ... ok");
    }
    println!("\nstore: {} passed, 0 failed", cases.len());
    ExitCode::SUCCESS
}
