use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Child, Command, Stdio};

use super::*;

const NAME: &str = "gpuward-00000001";

fn uuid() -> Uuid {
    Uuid::from_u128(1)
}

fn host(pid: u32) -> (tempfile::TempDir, Host) {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("run/libvirt/qemu");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join(format!("{NAME}.pid")), format!("{pid}\n")).unwrap();
    symlink("/proc", root.path().join("proc")).unwrap();
    let host = Host::captured(root.path());
    (root, host)
}

fn stand_in(uuid: Uuid) -> Child {
    let child = Command::new("sh").args(["-c", "read end", "qemu", "-uuid", &uuid.to_string()]).stdin(Stdio::piped()).spawn().unwrap();
    // Until the child has become a shell its command line is ours.
    while !fs::read(format!("/proc/{}/cmdline", child.id())).unwrap().starts_with(b"sh") {
        std::thread::yield_now();
    }
    child
}

#[test]
fn a_process_is_found_and_its_end_is_seen() {
    let mut child = stand_in(uuid());
    let (_root, host) = host(child.id());
    let process = Process::find(&host, NAME, uuid()).unwrap().expect("found");
    assert_eq!((process.pid, process.is_dead()), (child.id(), false));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(process.is_dead());
    assert!(Process::find(&host, NAME, uuid()).unwrap().is_none());
}

#[test]
fn a_process_of_another_machine_is_not_it() {
    let mut child = stand_in(Uuid::from_u128(2));
    let (_root, host) = host(child.id());
    assert!(Process::find(&host, NAME, uuid()).unwrap().is_none());
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn without_a_pid_file_there_is_no_process() {
    let root = tempfile::tempdir().unwrap();
    assert!(Process::find(&Host::captured(root.path()), NAME, uuid()).unwrap().is_none());
}

#[test]
fn the_uuid_must_follow_its_option() {
    let uuid = uuid().to_string();
    assert!(names_uuid(format!("qemu\0-name\0a\0-uuid\0{uuid}\0").as_bytes(), Uuid::from_u128(1)));
    assert!(!names_uuid(format!("qemu\0-name\0{uuid}\0-uuid\0").as_bytes(), Uuid::from_u128(1)));
    assert!(!names_uuid(b"", Uuid::from_u128(1)));
}
