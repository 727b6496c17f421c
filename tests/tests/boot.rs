//! Boots: what the script keeps before a host's driver comes, what is restored before libvirt starts, and what is refused.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use manager::history::Kind;
use manager::view::{DeviceState, JobState};
use tests::engine::{Daemon, Managed, assign, release};
use tests::simhost::{Description, SimHost};
use vfio::{Binding, Host, Inventory, PciAddress};

const POOL: &str = "[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'\n";

/// Two cards of one model; `{0}` and `{1}` are their buses, `{more}` what else is plugged in.
const HOST: &str = r#"
summary = "Two cards of one model, each below a port of its own."
[model.port]
id = "8086:352a"
class = "060400"
port = "root"
acs = "SV RR CR UF"
driver = "pcieport"
[model.l40s]
id = "10de:26b9"
subsystem = "10de:1851"
class = "030200"
bars = ["0 16MiB mem64"]
driver = "nvidia"
reset = "flr bus"
[model.l4]
id = "10de:27b8"
subsystem = "10de:16ee"
class = "030200"
bars = ["0 16MiB mem64"]
driver = "nvidia"
reset = "flr bus"
[[function]]
path = "pci0000:00/0000:00:01.0"
model = "port"
[[function]]
path = "pci0000:00/0000:00:01.0/0000:{0}:00.0"
model = "l40s"
serial = 1
[[function]]
path = "pci0000:00/0000:00:02.0"
model = "port"
[[function]]
path = "pci0000:00/0000:00:02.0/0000:{1}:00.0"
model = "l40s"
serial = 2
{more}
"#;

/// A card more, in a port which is numbered first.
const NEW_CARD: &str = r#"
[[function]]
path = "pci0000:00/0000:00:00.1"
model = "port"
[[function]]
path = "pci0000:00/0000:00:00.1/0000:01:00.0"
model = "l4"
"#;

fn text(first: &str, second: &str, more: &str) -> String {
    HOST.replace("{0}", first).replace("{1}", second).replace("{more}", more)
}

fn lay(text: &str) -> SimHost {
    SimHost::lay(&Description::parse(text).unwrap()).unwrap()
}

fn at(bus: &str) -> PciAddress {
    format!("0000:{bus}:00.0").parse().unwrap()
}

/// The host with both cards in the pool, and its daemon stopped.
fn both_in_the_pool() -> Managed {
    let managed = Managed::new("no-iommu", POOL).unwrap().on(lay(&text("01", "02", "")));
    let daemon = managed.start().unwrap();
    daemon.ready();
    assert_eq!(daemon.apply(&[assign(at("01")), assign(at("02"))]).unwrap().state, JobState::Done);
    daemon.stop();
    managed
}

/// Runs the script that `make install` lays down, on the tree of a host.
fn pin(shell: &[&str], root: &Path, argument: Option<&str>) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manager/data/boot/pin");
    let mut command = Command::new(shell[0]);
    command.args(&shell[1..]).arg(script).args(argument).env_clear().env("GPUWARD_ROOT", root);
    // Of programs it may need mkdir only.
    command.env("PATH", "/nowhere");
    assert!(command.status().unwrap().success());
}

fn gpus(host: &Host) -> Vec<PciAddress> {
    Inventory::observe(host, 0).devices.into_keys().collect()
}

/// Boots `sim` with the files of `managed`: without a driver first, then with the pins of the last boot where `pinned`, then with whatever
/// driver the kernel finds for each card.
fn boot(managed: Managed, sim: SimHost, pinned: bool) -> Managed {
    let managed = managed.on(sim);
    let (host, root) = (managed.sim.host(), managed.sim.root().to_owned());
    let store = |attribute: &str, value: &str| host.store(Path::new(attribute), value, Instant::now() + Duration::from_secs(5)).unwrap();
    managed.sim.set("proc/sys/kernel/random/boot_id", &uuid::Uuid::new_v4().to_string()).unwrap();
    for gpu in gpus(&host) {
        store(&format!("sys/bus/pci/devices/{gpu}/driver/unbind"), &gpu.to_string());
    }
    if pinned {
        let pins = fs::read_to_string(managed.files().join("state/pins")).unwrap();
        // As in an initramfs.
        fs::create_dir_all(root.join("etc/gpuward")).unwrap();
        fs::create_dir_all(root.join("run/gpuward")).unwrap();
        fs::write(root.join("etc/gpuward/pins"), pins).unwrap();
        pin(&["/bin/sh"], &root, None);
        let note = fs::read(root.join("run/gpuward/pinned")).unwrap_or_default();
        fs::write(managed.files().join("run/pinned"), note).unwrap();
    }
    gpus(&host).iter().for_each(|gpu| store("sys/bus/pci/drivers_probe", &gpu.to_string()));
    managed.restart()
}

fn driver(managed: &Managed, device: PciAddress) -> Option<String> {
    Binding::read(&managed.sim.host(), device).unwrap().unwrap().driver
}

fn vfio() -> Option<String> {
    Some("vfio-pci".into())
}

fn nvidia() -> Option<String> {
    Some("nvidia".into())
}

fn start(managed: &Managed) -> Daemon {
    let daemon = managed.start().unwrap();
    daemon.ready();
    daemon
}

fn pins(managed: &Managed) -> String {
    fs::read_to_string(managed.files().join("state/pins")).unwrap()
}

#[test]
fn pins_are_what_the_ledger_owns_and_may_use_and_are_written_when_that_changes() {
    let managed = both_in_the_pool();
    let both = "pci0000:00/01.0/00.0 10de:26b9:10de:1851 vfio-pci\npci0000:00/02.0/00.0 10de:26b9:10de:1851 vfio-pci\n";
    assert_eq!(pins(&managed), both);
    let written = || fs::metadata(managed.files().join("state/pins")).unwrap().modified().unwrap();
    let first = written();
    let daemon = start(&managed);
    assert_eq!((pins(&managed), written()), (both.into(), first), "a restart writes nothing");
    daemon.apply(&[release(at("01"))]).unwrap();
    assert_eq!(pins(&managed).lines().count(), 1);
    managed.configure("[[devices]]\nmatch = { knd = 'gpu' }\nuse = 'pool'").unwrap();
    daemon.engine().reload();
    daemon.until(|view| view.host_state != manager::view::HostState::Ready);
    assert_eq!(pins(&managed).lines().count(), 1, "a configuration that cannot be read takes nothing away");
    managed.configure("").unwrap();
    daemon.engine().reload();
    daemon.ready();
    assert_eq!(pins(&managed), "", "what may only be observed is not kept");
}

#[test]
fn p66_no_driver_of_the_host_gets_what_was_in_the_pool() {
    let managed = boot(both_in_the_pool(), lay(&text("01", "02", "")), true);
    assert_eq!((driver(&managed, at("01")), driver(&managed, at("02"))), (vfio(), vfio()), "before anything of gpuward runs");
    manager::restore::run(managed.options()).unwrap();
    let stored = managed.sim.kernel.stored();
    assert!(!stored.iter().any(|(path, _)| path.ends_with("unbind") || path.ends_with("drivers_probe")), "{stored:?}");
    let daemon = start(&managed);
    assert_eq!(daemon.view().devices[&at("01")].state, DeviceState::Free);
    assert!(!managed.files().join("run/pinned").exists(), "the note was looked at");
}

#[test]
fn p26_cards_that_renumber_are_kept_and_a_new_one_at_their_address_is_not() {
    let managed = boot(both_in_the_pool(), lay(&text("02", "03", NEW_CARD)), true);
    let drivers = ["01", "02", "03"].map(|bus| driver(&managed, at(bus)));
    assert_eq!(drivers, [nvidia(), vfio(), vfio()]);
    manager::restore::run(managed.options()).unwrap();
    let daemon = start(&managed);
    let states = ["01", "02", "03"].map(|bus| daemon.view().devices[&at(bus)].state);
    assert_eq!(states, [DeviceState::Host, DeviceState::Free, DeviceState::Free]);
}

#[test]
fn what_an_old_copy_of_the_pins_kept_goes_back_to_the_host() {
    let managed = both_in_the_pool();
    let old = pins(&managed);
    let daemon = start(&managed);
    daemon.apply(&[release(at("02"))]).unwrap();
    daemon.stop();
    fs::write(managed.files().join("state/pins"), old).unwrap();
    let managed = boot(managed, lay(&text("01", "02", "")), true);
    assert_eq!(driver(&managed, at("02")), vfio());
    let daemon = start(&managed);
    assert_eq!((driver(&managed, at("01")), driver(&managed, at("02"))), (vfio(), nvidia()));
    let told = &managed.history(at("02"))[0];
    assert_eq!((told.kind, told.text.as_str()), (Kind::Released, "given back to nvidia: it was kept at boot by an old copy of the pins"));
    // What somebody else binds after that is not taken from them.
    daemon.stop();
    managed.sim.set("sys/bus/pci/devices/0000:02:00.0/driver_override", "vfio-pci").unwrap();
    let managed = managed.restart();
    start(&managed);
    assert!(managed.sim.kernel.stored().is_empty());
}

#[test]
fn p26_another_card_of_the_same_model_in_the_slot_is_kept_by_the_script_and_given_back() {
    let other = text("01", "02", "").replace("serial = 2", "serial = 3");
    let managed = boot(both_in_the_pool(), lay(&other), true);
    assert_eq!(driver(&managed, at("02")), vfio(), "a script cannot read serial numbers");
    let _daemon = start(&managed);
    assert_eq!(driver(&managed, at("02")), nvidia());
}

#[test]
fn the_script_touches_nothing_that_has_a_driver_or_an_override_of_somebody_else() {
    let managed = both_in_the_pool();
    let sim = lay(&text("01", "02", ""));
    fs::create_dir_all(sim.root().join("var/lib/gpuward")).unwrap();
    fs::write(sim.root().join("var/lib/gpuward/pins"), pins(&managed)).unwrap();
    let before = sim.snapshot();
    pin(&["/bin/sh"], sim.root(), None);
    assert_eq!(sim.snapshot(), before, "both have their driver");
    let unbind = "sys/bus/pci/devices/0000:01:00.0/driver/unbind";
    sim.host().store(Path::new(unbind), "0000:01:00.0", Instant::now() + Duration::from_secs(5)).unwrap();
    sim.set("sys/bus/pci/devices/0000:01:00.0/driver_override", "pci-stub").unwrap();
    let before = sim.snapshot();
    pin(&["/bin/sh"], sim.root(), None);
    assert_eq!(sim.snapshot(), before, "driverctl's, or a person's");
}

#[test]
fn every_shell_of_an_initramfs_runs_the_script_and_udev_names_one_function() {
    let pins = pins(&both_in_the_pool());
    let shells: [&[&str]; 3] = [&["/bin/dash"], &["/bin/bash", "--posix"], &["/bin/busybox", "sh"]];
    for shell in shells.iter().filter(|shell| Path::new(shell[0]).exists()) {
        let sim = lay(&text("01", "02", ""));
        let unbind = |bus: &str| {
            let path = format!("sys/bus/pci/devices/0000:{bus}:00.0/driver/unbind");
            sim.host().store(Path::new(&path), &at(bus).to_string(), Instant::now() + Duration::from_secs(5)).unwrap();
        };
        ["01", "02"].into_iter().for_each(unbind);
        pin(shell, sim.root(), None);
        fs::create_dir_all(sim.root().join("etc/gpuward")).unwrap();
        fs::write(sim.root().join("etc/gpuward/pins"), &pins).unwrap();
        fs::write(sim.root().join("dev/kmsg"), "").unwrap();
        let has = |bus: &str| fs::read_to_string(sim.root().join(format!("sys/bus/pci/devices/{}/driver_override", at(bus)))).unwrap();
        pin(shell, sim.root(), Some("/devices/pci0000:00/0000:00:02.0/0000:02:00.0"));
        assert_eq!([has("01"), has("02")], ["(null)\n", "vfio-pci\n"], "{shell:?}");
        pin(shell, sim.root(), None);
        assert_eq!([has("01"), has("02")], ["vfio-pci\n", "vfio-pci\n"], "{shell:?}");
        let told = fs::read_to_string(sim.root().join("dev/kmsg")).unwrap();
        let line = "<6>gpuward: 0000:01:00.0 (pci0000:00/01.0/00.0, 10de:26b9:10de:1851) is kept for vfio-pci\n";
        assert!(told.ends_with(line), "{shell:?}: {told}");
    }
}
