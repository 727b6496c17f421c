//! Boots: what the script keeps before a host's driver comes, what is restored before libvirt starts, and what is refused.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use manager::history::Kind;
use manager::request::Request;
use manager::restore::{self, RestoreFailed};
use manager::view::{DeviceState, JobState, Restored, View};
use tests::engine::{Daemon, Managed, assign, release};
use tests::simhost::{Death, Description, Left, SimHost};
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
    restore::run(managed.options()).unwrap();
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
    restore::run(managed.options()).unwrap();
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

/// The host after a boot in which nothing was kept.
fn unpinned() -> Managed {
    boot(both_in_the_pool(), lay(&text("01", "02", "")), false)
}

fn told(view: &View, bus: &str) -> (&'static str, String) {
    let restored = &view.restored[&at(bus)];
    (restored.word(), restored.text())
}

fn restored(daemon: &Daemon, devices: usize) -> std::sync::Arc<View> {
    daemon.until(|view| view.restored.len() == devices)
}

fn at_boot(managed: &Managed) -> Vec<String> {
    let of = |bus| managed.history(at(bus)).into_iter().find(|entry| entry.kind == Kind::Restored).map(|entry| entry.text);
    ["01", "02"].into_iter().filter_map(of).collect()
}

#[test]
fn p46_each_device_has_its_result() {
    let managed = unpinned();
    let daemon = start(&managed);
    let view = restored(&daemon, 2);
    assert_eq!([&view.restored[&at("01")], &view.restored[&at("02")]], [&Restored::Again, &Restored::Again]);
    assert_eq!(at_boot(&managed), ["after a boot: restored", "after a boot: restored"]);
    daemon.stop();
    // Somebody bound the second one elsewhere already, and a process has the first one open.
    let managed = boot(managed, lay(&text("01", "02", "")), true);
    let group = Inventory::observe(&managed.sim.host(), 0).devices[&at("01")].vfio_group_node().unwrap();
    managed.sim.hold(4711, "qemu-system-x86", &format!("/{group}")).unwrap();
    let daemon = start(&managed);
    let view = restored(&daemon, 2);
    let held = "already there".to_owned();
    assert_eq!((told(&view, "01").0, told(&view, "02").0.to_owned()), ("already there", held));
    assert!(
        !managed.sim.kernel.stored().iter().any(|(path, _)| path.to_string_lossy().contains("0000:01")),
        "P8: what is open is left alone"
    );
}

#[test]
fn a_bundle_that_somebody_holds_is_skipped_and_says_by_whom() {
    let managed = unpinned();
    managed.sim.hold(812, "nvidia-persiste", "/dev/nvidia0").unwrap();
    let failed = restore::run(managed.options()).unwrap_err();
    assert_eq!(failed.to_string(), "1 of 2 devices are not as they were before the boot");
    let daemon = start(&managed);
    let view = restored(&daemon, 1);
    let (word, text) = told(&view, "01");
    assert!(word == "in use" && text.contains("nvidia-persiste[812]"), "{word}{text}");
    assert_eq!(view.devices[&at("01")].state, DeviceState::Drifted);
    assert!(view.devices[&at("01")].reason.contains("after the boot: 0000:01:00.0 is held by nvidia-persiste[812]"));
    daemon.stop();
    // It stays on record: the next start of the daemon takes it.
    managed.sim.end_process(812).unwrap();
    let managed = managed.restart();
    let daemon = start(&managed);
    daemon.until(|view| view.devices[&at("01")].state == DeviceState::Free);
}

#[test]
fn p66_what_could_not_be_bound_stays_on_record_and_is_tried_again() {
    let managed = unpinned();
    managed.sim.kernel.fail_on("0000:01:00.0/driver/unbind", tests::simhost::Errno::IO);
    match restore::run(managed.options()) {
        Err(RestoreFailed::Devices { count: 1, total: 2 }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(managed.ledger().unwrap().devices.len(), 2);
    let managed = managed.restart();
    let daemon = start(&managed);
    daemon.until(|view| view.devices[&at("01")].state == DeviceState::Free);
    // A daemon that dies half-way leaves it on record too.
    daemon.stop();
    let managed = boot(managed, lay(&text("01", "02", "")), false);
    managed.sim.kernel.die_at(4, Death::After);
    let daemon = managed.start().unwrap();
    daemon.until(|view| view.jobs.values().any(|job| job.kind == "restore" && job.state != JobState::Queued));
    std::thread::sleep(Duration::from_millis(300));
    daemon.stop();
    let managed = managed.restart();
    let daemon = start(&managed);
    daemon.until(|view| ["01", "02"].into_iter().all(|bus| view.devices[&at(bus)].state == DeviceState::Free));
}

#[test]
fn p26_another_card_in_the_slot_is_refused_with_what_was_there_and_what_is() {
    let other = text("01", "02", "").replace("serial = 2", "serial = 3");
    let managed = boot(both_in_the_pool(), lay(&other), false);
    let failed = restore::run(managed.options()).unwrap_err();
    assert_eq!(failed.to_string(), "1 of 2 devices are not as they were before the boot");
    let daemon = start(&managed);
    let was = "pci0000:00/02.0/00.0/10de:26b9:10de:1851/0000000000000002";
    let is = "pci0000:00/02.0/00.0/10de:26b9:10de:1851/0000000000000003";
    let view = restored(&daemon, 1);
    assert_eq!(told(&view, "02"), ("left the host", format!(": in its slot is {is} now, at 0000:02:00.0; {was} has left the host")));
    let device = &view.devices[&at("02")];
    assert!(device.state == DeviceState::Host && device.reason.starts_with("not gpuward's: in its slot is"), "{}", device.reason);
    let refused = daemon.apply(&[assign(at("02"))]).unwrap_err();
    assert_eq!(refused.why, [format!("it was {was}"), format!("it is {is}")]);
    assert_eq!(driver(&managed, at("02")), nvidia());
    // Forgotten, the new one may be taken.
    daemon.apply(&[release(at("02"))]).unwrap();
    assert_eq!(daemon.apply(&[assign(at("02"))]).unwrap().state, JobState::Done);
}

#[test]
fn p73_a_card_that_was_pulled_out_is_gone_and_can_be_forgotten() {
    let only_one = text("01", "02", "").replace("model = \"l40s\"\nserial = 2", "model = \"port\"");
    let managed = boot(both_in_the_pool(), lay(&only_one), true);
    let daemon = start(&managed);
    let view = restored(&daemon, 2);
    assert_eq!(told(&view, "02").0, "left the host");
    assert_eq!(view.devices[&at("02")].state, DeviceState::Gone);
    let forgotten = daemon.apply(&[release(at("02"))]).unwrap();
    assert_eq!((forgotten.state, forgotten.error), (JobState::Done, None));
    assert!(!daemon.view().devices.contains_key(&at("02")) && managed.ledger().unwrap().devices.len() == 1);
}

#[test]
fn p27_no_file_of_gpuwards_has_a_group_number() {
    let managed = both_in_the_pool();
    for file in ["state/ledger.json", "state/pins", "run/owned.json"] {
        let text = fs::read_to_string(managed.files().join(file)).unwrap();
        // Tenants have owners by group, which is another matter.
        assert!(!text.replace("\"groups\": []", "").contains("group"), "{file}: {text}");
    }
}

#[test]
fn more_bundles_than_one_caller_may_queue_are_restored() {
    let port = |number: usize| format!("[[function]]\npath = \"pci0000:00/0000:00:{number:02x}.1\"\nmodel = \"port\"\n");
    let card = |number: usize| {
        format!("[[function]]\npath = \"pci0000:00/0000:00:{number:02x}.1/0000:{:02x}:00.0\"\nmodel = \"l4\"\n", number + 16)
    };
    let many: String = (3..21).map(|number| port(number) + &card(number)).collect();
    let host = text("01", "02", &many);
    let managed = Managed::new("no-iommu", POOL).unwrap().on(lay(&host));
    let daemon = start(&managed);
    let all: Vec<_> = gpus(&managed.sim.host()).into_iter().map(assign).collect();
    assert_eq!(daemon.apply(&all).unwrap().state, JobState::Done);
    daemon.stop();
    let managed = boot(managed, lay(&host), false);
    restore::run(managed.options()).unwrap();
    assert!(gpus(&managed.sim.host()).into_iter().all(|gpu| driver(&managed, gpu) == vfio()));
}

#[test]
fn p64_the_unit_is_bounded_required_by_nobody_and_cannot_reach_libvirt() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manager/data");
    let lines = |file: &str| fs::read_to_string(data.join(file)).unwrap().lines().map(str::to_owned).collect::<Vec<_>>();
    let unit = lines("gpuward-restore.service");
    for wanted in ["Before=gpuwardd.service libvirtd.service virtqemud.service", "Type=oneshot", "TimeoutStartSec=90", "PrivateNetwork=yes"]
    {
        assert!(unit.iter().any(|line| line == wanted), "{wanted}");
    }
    for file in ["gpuward-restore.service", "gpuwardd.service", "boot/gpuward-pin.service"] {
        let unit = lines(file);
        assert!(!unit.iter().any(|line| line.starts_with("Requires=") || line.starts_with("RequiredBy=") || line.starts_with("BindsTo=")));
    }
}

#[test]
fn what_is_in_quarantine_or_shows_the_console_is_not_kept() {
    let managed = both_in_the_pool();
    let daemon = start(&managed);
    managed.sim.after_reset("0000:01:00.0", Left::Dead).unwrap();
    daemon.finish(daemon.submit(Request::Reset(at("01"))).unwrap());
    assert_eq!(daemon.view().devices[&at("01")].state, DeviceState::Quarantined);
    assert!(pins(&managed).starts_with("pci0000:00/02.0/") && pins(&managed).lines().count() == 1);
    managed.sim.set("sys/bus/pci/devices/0000:02:00.0/boot_vga", "1").unwrap();
    daemon.finish(daemon.submit(Request::Rescan).unwrap());
    assert_eq!(pins(&managed), "");
}
