//! The command, as it is typed: what it prints, and how it ends.
//!
//! What it prints for each described host lies in `golden/cli`; `UPDATE_GOLDEN=1` writes it anew.

#![allow(clippy::expect_used)]

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::{env, fs};

use tests::program;
use tests::simhost::SimHost;

fn gpuward(arguments: &[&str]) -> Output {
    let mut command = Command::new(program::gpuward());
    command.args(arguments).env("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nonexistent/bus").env_remove("NO_COLOR");
    command.output().expect("gpuward runs")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

fn compare(name: &str, found: &str) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/cli").join(name);
    if env::var_os("UPDATE_GOLDEN").is_some() {
        fs::create_dir_all(golden.parent().expect("has one")).expect("made");
        fs::write(&golden, found).expect("written");
    }
    let expected = fs::read_to_string(&golden).unwrap_or_default();
    assert_eq!(found, expected, "{name}; UPDATE_GOLDEN=1 writes it anew");
}

fn on(host: &str, arguments: &[&str]) -> (SimHost, Output) {
    let sim = SimHost::build(host).expect("the host is described");
    let root = sim.root().to_str().expect("UTF-8").to_owned();
    let output = gpuward(&[arguments, &["--root", &root]].concat());
    (sim, output)
}

#[test]
fn each_described_host_is_listed_as_its_golden_file_says() {
    for host in tests::simhost::names() {
        let (_sim, output) = on(host, &["list"]);
        assert_eq!(output.status.code(), Some(0), "{host}: {}", stderr(&output));
        compare(&format!("list-{host}.txt"), &stdout(&output));
    }
}

#[test]
fn processes_that_have_a_device_open_are_listed_on_demand() {
    let (_sim, output) = on("dgx-h100", &["list", "--holders"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    compare("list-holders-dgx-h100.txt", &stdout(&output));
}

#[test]
fn a_device_is_shown_as_its_golden_file_says() {
    for (host, device) in [("dgx-h100", "52:00.0"), ("crowded-group", "pci_0000_01_00_0"), ("no-iommu", "0000:01:00.0")] {
        let (_sim, output) = on(host, &["show", device]);
        assert_eq!(output.status.code(), Some(0), "{host}: {}", stderr(&output));
        compare(&format!("show-{host}.txt"), &stdout(&output));
    }
}

#[test]
fn columns_in_a_pipe_are_two_spaces_apart_without_tabs_or_colour() {
    let (_sim, output) = on("workstation", &["list"]);
    let text = stdout(&output);
    assert!(!text.contains(['\t', '\u{1b}']), "{text}");
    for line in text.lines() {
        let columns = line.split("  ").filter(|column| !column.is_empty()).count();
        assert_eq!(columns, 6, "{line:?}");
        assert_eq!(line, line.trim_end());
    }
}

#[test]
fn json_of_a_list_has_the_keys_that_are_documented() {
    let (_sim, output) = on("dgx-h100", &["list", "--json"]);
    let listing: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let documented = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/cli.md")).expect("there");
    let devices = listing["devices"].as_array().expect("an array");
    assert!(!devices.is_empty());
    for key in devices.iter().flat_map(|device| device.as_object().expect("an object").keys()) {
        assert!(documented.contains(&format!("| `{key}` |")), "docs/cli.md does not tell of {key}");
    }
}

#[test]
fn each_way_to_end_has_its_exit_status() {
    let (_sim, unknown) = on("dgx-h100", &["show", "0000:ff:00.0"]);
    assert_eq!(unknown.status.code(), Some(3));
    assert_eq!(stderr(&unknown), "refused: there is no device 0000:ff:00.0\n  remedy `gpuward list` names those there are\n");

    let no_address = gpuward(&["show", "gpu0"]);
    assert_eq!(no_address.status.code(), Some(2));
    assert!(stderr(&no_address).contains("\"gpu0\" is no PCI address"), "{}", stderr(&no_address));

    assert_eq!(gpuward(&["lst"]).status.code(), Some(2));
    assert_eq!(gpuward(&["list", "--root", "/nonexistent"]).status.code(), Some(2));

    let absent = gpuward(&["list"]);
    assert_eq!(absent.status.code(), Some(5));
    assert!(stderr(&absent).contains("systemctl start gpuwardd"), "{}", stderr(&absent));
}

#[test]
fn a_failure_in_json_is_an_object_too() {
    let (_sim, output) = on("dgx-h100", &["show", "0000:ff:00.0", "--json"]);
    let failure: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(failure["error"]["kind"], "NoSuchDevice");
    assert_eq!(failure["exit-status"], 3);
}

#[test]
fn a_captured_tree_cannot_write_to_the_terminal() {
    let sim = SimHost::build("dgx-h100").expect("described");
    fs::remove_file(sim.root().join("sys/bus/pci/devices/0000:43:00.0/driver")).expect("it is a link");
    let evil = "\u{1b}[2Jnvidia";
    std::os::unix::fs::symlink(format!("../{evil}"), sim.root().join("sys/bus/pci/devices/0000:43:00.0/driver")).expect("made");
    let output = gpuward(&["list", "--root", sim.root().to_str().expect("UTF-8")]);
    assert!(stdout(&output).contains("\\u{1b}[2Jnvidia"), "{}", stdout(&output));
    assert!(!stdout(&output).contains('\u{1b}'));
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let sim = SimHost::build("dgx-h100").expect("described");
    let mut child = Command::new(program::gpuward())
        .args(["list", "--root", sim.root().to_str().expect("UTF-8")])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("runs");
    drop(child.stdout.take());
    let mut said = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut said).expect("UTF-8");
    assert_eq!(child.wait().expect("ends").code(), Some(0), "{said}");
    assert_eq!(said, "");
}

#[test]
fn completions_and_manual_pages_come_from_the_same_definitions() {
    let script = stdout(&gpuward(&["completions", "bash"]));
    assert!(script.contains("_gpuward") && script.contains("--root"), "{script}");
    let dir = tempfile::tempdir().expect("made");
    let made = gpuward(&["man", dir.path().to_str().expect("UTF-8")]);
    assert_eq!(made.status.code(), Some(0), "{}", stderr(&made));
    let page = fs::read_to_string(dir.path().join("gpuward-list.1")).expect("there");
    assert!(page.contains("such as a captured one"), "{page}");
    assert!(dir.path().join("gpuward.1").exists());
}

#[test]
fn a_capture_reads_like_the_host_it_is_of_without_its_serial_numbers() {
    for host in tests::simhost::names() {
        let sim = SimHost::build(host).expect("described");
        let root = sim.root().to_str().expect("UTF-8");
        let dir = tempfile::tempdir().expect("made");
        let tree = dir.path().join("tree");
        let tree = tree.to_str().expect("UTF-8");
        let captured = gpuward(&["capture", tree, "--root", root]);
        assert_eq!(captured.status.code(), Some(0), "{}", stderr(&captured));
        assert_eq!(stderr(&captured), "");

        let mut theirs = vfio::Inventory::observe(&sim.host(), 0);
        let ours = vfio::Inventory::observe(&vfio::Host::captured(tree), 0);
        theirs.devices.values_mut().for_each(|device| device.identity.serial = None);
        assert_eq!(ours, theirs, "{host}");

        let again = gpuward(&["capture", tree, "--root", root]);
        assert_eq!(again.status.code(), Some(1));
        assert!(stderr(&again).contains("File exists"), "{}", stderr(&again));
    }
}

#[test]
fn the_hook_lets_a_domain_without_devices_start_and_refuses_one_with_a_device_of_the_pool() {
    let dir = tempfile::tempdir().expect("made");
    let owned = dir.path().join("owned.json");
    fs::write(&owned, r#"{"0000:41:00.0": "00000000-0000-0000-0000-000000000000"}"#).expect("written");
    let hostdev =
        "<hostdev mode='subsystem' type='pci'><source><address domain='0x0000' bus='0x41' slot='0x00' function='0x0'/></source></hostdev>";
    for (devices, status) in [("", 0), (hostdev, 1)] {
        let mut hook = Command::new(program::gpuward())
            .args(["libvirt-hook", "guest", "prepare", "begin", "-", "--owned"])
            .arg(&owned)
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("runs");
        let xml = format!("<domain><uuid>4dea22b3-1d52-d8f3-2516-782e98ab3fa0</uuid><devices>{devices}</devices></domain>");
        hook.stdin.take().expect("piped").write_all(xml.as_bytes()).expect("read");
        let ended = hook.wait_with_output().expect("ends");
        assert_eq!(ended.status.code(), Some(status), "{}", stderr(&ended));
    }
}
