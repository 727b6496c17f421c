//! Stores and reads through real children: this program is also the child, so it has no test harness.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use std::io::ErrorKind;
use std::sync::{Arc, mpsc};

use vfio::{Kernel, LateStore, Linux, READ_ARGUMENT, STORE_ARGUMENT, StoreError, StuckStore, run_read_child, run_store_child};

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

/// A pipe that nobody reads blocks its writer as a driver would, and one that nobody writes its reader.
fn pipe(path: &Path) {
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, rustix::fs::Mode::from(0o600), 0).unwrap();
}

fn shortly() -> Instant {
    Instant::now() + Duration::from_millis(300)
}

fn told(kernel: &Linux) -> mpsc::Receiver<LateStore> {
    let (tell, told) = mpsc::channel();
    kernel.on_late_store(Arc::new(move |late| tell.send(late).unwrap()));
    told
}

// P1, P2
fn a_store_that_hangs_costs_one_child(root: &Path) {
    pipe(&root.join("reset"));
    let kernel = kernel(root);
    let told = told(&kernel);
    let error = kernel.store(Path::new("reset"), "1", shortly()).unwrap_err();
    assert!(matches!(error, StoreError::Stuck { .. }), "{error}");
    let stuck = kernel.stuck_stores();
    assert_eq!((stuck.len(), &stuck[0].attribute, stuck[0].value.as_str()), (1, &"reset".into(), "1"));
    fs::write(root.join("bind"), "").unwrap();
    kernel.store(Path::new("bind"), "x", soon()).unwrap();
    let mut late = String::new();
    fs::File::open(root.join("reset")).unwrap().read_to_string(&mut late).unwrap();
    assert_eq!(late, "1", "the child lived on and its effect came late");
    let late = told.recv_timeout(Duration::from_secs(20)).unwrap();
    assert_eq!((&late.store, late.errno), (&stuck[0], Some(0)));
    assert_eq!(kernel.stuck_stores(), []);
}

fn a_daemon_that_starts_anew_hears_of_the_end_of_its_forerunners_stores(root: &Path) {
    pipe(&root.join("reset"));
    kernel(root).store(Path::new("reset"), "1", shortly()).unwrap_err();
    let next = kernel(root);
    let told = told(&next);
    let stuck: Vec<StuckStore> = next.stuck_stores();
    assert_eq!(stuck.len(), 1);
    assert!(told.recv_timeout(Duration::from_millis(100)).is_err(), "it is stuck yet");
    fs::File::open(root.join("reset")).unwrap().read_to_string(&mut String::new()).unwrap();
    let late = told.recv_timeout(Duration::from_secs(20)).unwrap();
    assert_eq!((&late.store, late.errno), (&stuck[0], None), "what the kernel answered went to its forerunner");
}

fn a_read_that_hangs_costs_one_child_and_answers_when_it_can(root: &Path) {
    let kernel = kernel(root);
    let [stuck, free, missing] = ["driver_override", "sriov_numvfs", "none"].map(|name| root.join(name));
    pipe(&stuck);
    fs::write(&free, "4\n").unwrap();
    for _ in 0..3 {
        let started = Instant::now();
        assert_eq!(kernel.read_locked(&stuck, shortly()).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(started.elapsed() < Duration::from_secs(10));
        assert_eq!(kernel.read_locked(&free, soon()).unwrap(), b"4\n");
        assert_eq!(kernel.read_locked(&missing, soon()).unwrap_err().kind(), ErrorKind::NotFound);
    }
    fs::write(&stuck, "vfio-pci\n").unwrap();
    let until = soon();
    let answer = std::iter::repeat_with(|| kernel.read_locked(&stuck, soon())).find(|read| read.is_ok() || Instant::now() > until);
    assert_eq!(answer.unwrap().unwrap(), b"vfio-pci\n");
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
    if std::env::args().any(|argument| argument == READ_ARGUMENT) {
        return run_read_child();
    }
    let cases: [(&str, Case); 6] = [
        ("a_store_that_can_block_is_made_by_a_child", a_store_that_can_block_is_made_by_a_child),
        ("a_missing_attribute_is_not_made", a_missing_attribute_is_not_made),
        ("a_store_that_hangs_costs_one_child", a_store_that_hangs_costs_one_child),
        (
            "a_daemon_that_starts_anew_hears_of_the_end_of_its_forerunners_stores",
            a_daemon_that_starts_anew_hears_of_the_end_of_its_forerunners_stores,
        ),
        ("a_read_that_hangs_costs_one_child_and_answers_when_it_can", a_read_that_hangs_costs_one_child_and_answers_when_it_can),
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
