//! The simulated kernel is asked what `tests/rig/cases/sim-rules.py` asks a real one, rule by rule, and gives the same answers.
#![allow(clippy::expect_used)]

use std::thread;
use std::time::{Duration, Instant};

use tests::simhost::SimHost;

/// The physical function of a network adapter: the rig has the same.
const NIC: &str = "0000:05:00.0";

/// The port above it.
const PORT: &str = "0000:00:1c.0";

/// What is asked of a real kernel: "the simulated kernel may only answer as a real one was seen to".
const RIG: &str = include_str!("../rig/cases/sim-rules.py");

/// Asks a simulated host and collects what did not come out as on the real one.
struct Asker {
    sim: SimHost,
    wrong: Vec<String>,
}

impl Asker {
    fn new() -> Self {
        let sim = SimHost::build("workstation").expect("the host is described");
        let asker = Self { sim, wrong: Vec::new() };
        assert_eq!(asker.numvfs("0"), "ok", "the real one starts without virtual functions");
        asker
    }

    /// Every answer to a rule's questions is as expected, and the rig asks a real kernel the same.
    fn observed(&mut self, rule: &'static str, expected: &[&str], answers: &[String]) {
        if !RIG.contains(&format!("\"{rule}\"")) {
            self.wrong.push(format!("{rule}: no real kernel is asked"));
        }
        if answers != expected {
            self.wrong.push(format!("{rule}: {answers:?}, a real kernel answers {expected:?}"));
        }
    }

    fn store(&self, attribute: &str, value: &str) -> String {
        let soon = Instant::now() + Duration::from_secs(5);
        match self.sim.host().store(attribute, value, soon) {
            Ok(()) => "ok".into(),
            Err(error) => name(error.errno().expect("it answered")).into(),
        }
    }

    fn store_in(&self, address: &str, file: &str, value: &str) -> String {
        self.store(&format!("sys/bus/pci/devices/{address}/{file}"), value)
    }

    fn read(&self, file: &str) -> String {
        self.sim.host().read(format!("sys/bus/pci/devices/{NIC}/{file}")).expect("readable").unwrap_or_default()
    }

    fn link(&self, address: &str, file: &str) -> String {
        let link = self.sim.host().link_name(format!("sys/bus/pci/devices/{address}/{file}")).expect("readable");
        link.unwrap_or_else(|| "none".into())
    }

    /// Whether configuration space begins with the ids, and its region registers have what `resource` says.
    fn registers_are_in_place(&self) -> String {
        let config = self.sim.host().read_bytes(format!("sys/bus/pci/devices/{NIC}/config"), 64).expect("readable").expect("there");
        let hex = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).expect("a number");
        if u64::from(u16::from_le_bytes([config[0], config[1]])) != hex(&self.read("vendor")) {
            return format!("begins with {:02x?}", &config[..4]);
        }
        for (index, line) in self.read("resource").lines().take(6).enumerate() {
            let numbers: Vec<_> = line.split(' ').map(hex).collect();
            let at = 0x10 + 4 * index;
            let register =
                u32::from_le_bytes(config[at..at + 4].try_into().expect("four")) & if numbers[2] & 0x100 != 0 { !3 } else { !15 };
            if numbers[0] != 0 && u64::from(register) != numbers[0] & 0xffff_ffff {
                return format!("region {index} is at {register:#x}, not {:#x}", numbers[0]);
            }
        }
        "True".into()
    }

    fn driver(&self) -> String {
        self.link(NIC, "driver")
    }

    fn set_override(&self, name: &str) -> String {
        self.store_in(NIC, "driver_override", &format!("{name}\n"))
    }

    fn bind(&self, driver: &str, address: &str) -> String {
        self.store(&format!("sys/bus/pci/drivers/{driver}/bind"), address)
    }

    fn unbind(&self, driver: &str, address: &str) -> String {
        self.store(&format!("sys/bus/pci/drivers/{driver}/unbind"), address)
    }

    fn probe(&self, address: &str) -> String {
        self.store("sys/bus/pci/drivers_probe", address)
    }

    fn numvfs(&self, count: &str) -> String {
        self.store_in(NIC, "sriov_numvfs", count)
    }

    fn end(self) {
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
    }
}

/// The name of an errno, as Python's `errno.errorcode` has it.
fn name(errno: i32) -> &'static str {
    let names = [(2, "ENOENT"), (5, "EIO"), (13, "EACCES"), (16, "EBUSY"), (19, "ENODEV"), (22, "EINVAL"), (25, "ENOTTY"), (34, "ERANGE")];
    names.into_iter().find(|(number, _)| *number == errno).map_or("unknown", |(_, name)| name)
}

#[test]
fn binding_answers_as_on_a_real_kernel() {
    let mut ask = Asker::new();
    let unset = ask.read("driver_override");
    ask.observed("driver_override_reads_null_when_unset", &["(null)"], &[unset]);
    let answers = [ask.set_override("vfio-pci"), ask.driver()];
    ask.observed("driver_override_does_not_unbind", &["ok", "igb"], &answers);
    let answers = [ask.bind("vfio-pci", NIC), ask.driver()];
    ask.observed("bind_of_a_bound_device_is_ebusy", &["EBUSY", "igb"], &answers);
    let answers = [ask.probe(NIC), ask.driver()];
    ask.observed("drivers_probe_of_a_bound_device_changes_nothing", &["ok", "igb"], &answers);
    let answers = [ask.unbind("vfio-pci", NIC), ask.driver()];
    ask.observed("unbind_from_another_driver_is_enodev", &["ENODEV", "igb"], &answers);
    let answers = [ask.unbind("igb", NIC), ask.driver()];
    ask.observed("unbind_takes_the_driver_away", &["ok", "none"], &answers);
    let answers = [ask.unbind("igb", NIC)];
    ask.observed("unbind_of_an_unbound_device_is_enodev", &["ENODEV"], &answers);
    let answers = [ask.bind("igb", NIC), ask.driver()];
    ask.observed("bind_against_the_override_is_enodev", &["ENODEV", "none"], &answers);
    let answers = [ask.probe(NIC), ask.driver()];
    ask.observed("drivers_probe_binds_what_the_override_names", &["ok", "vfio-pci"], &answers);
    let answers = [ask.unbind("vfio-pci", NIC), ask.driver()];
    ask.observed("unbind_from_vfio_pci", &["ok", "none"], &answers);
    let answers = [ask.set_override("no-such-driver"), ask.read("driver_override")];
    ask.observed("an_override_of_no_driver_is_stored", &["ok", "no-such-driver"], &answers);
    let answers = [ask.probe(NIC), ask.driver()];
    ask.observed("drivers_probe_succeeds_though_nothing_bound", &["ok", "none"], &answers);
    let answers = [ask.set_override(""), ask.read("driver_override")];
    ask.observed("an_empty_override_clears_it", &["ok", "(null)"], &answers);
    let answers = [ask.bind("vfio-pci", NIC), ask.driver()];
    ask.observed("bind_without_a_match_is_enodev", &["ENODEV", "none"], &answers);
    let answers = [ask.bind("igb", NIC), ask.driver()];
    ask.observed("bind_takes_a_matching_device", &["ok", "igb"], &answers);
    ask.end();
}

#[test]
fn addresses_that_are_not_there_are_answered_as_on_a_real_kernel() {
    let mut ask = Asker::new();
    let answers = [ask.bind("igb", "0000:7f:00.0")];
    ask.observed("bind_of_an_unknown_device_is_enodev", &["ENODEV"], &answers);
    let answers = [ask.unbind("igb", "0000:7f:00.0")];
    ask.observed("unbind_of_an_unknown_device_is_enodev", &["ENODEV"], &answers);
    let answers = [ask.probe("0000:7f:00.0")];
    ask.observed("drivers_probe_of_an_unknown_device_is_enodev", &["ENODEV"], &answers);
    let answers = [ask.probe("junk")];
    ask.observed("drivers_probe_of_junk_is_enodev", &["ENODEV"], &answers);
    ask.end();
}

#[test]
fn overrides_have_the_length_of_a_real_kernel() {
    let mut ask = Asker::new();
    let long = "x".repeat(4095);
    let answers = [ask.store_in(NIC, "driver_override", &long)];
    ask.observed("driver_override_of_a_page_less_one_is_einval", &["EINVAL"], &answers);
    let answers = [ask.set_override("vfio-pci"), ask.store_in(NIC, "driver_override", &long), ask.read("driver_override")];
    ask.observed("a_refused_override_leaves_the_last", &["ok", "EINVAL", "vfio-pci"], &answers);
    let answers = [ask.set_override("igb\nvfio-pci"), ask.read("driver_override")];
    ask.observed("driver_override_ends_at_the_first_newline", &["ok", "igb"], &answers);
    ask.end();
}

#[test]
fn attributes_answer_as_on_a_real_kernel() {
    let mut ask = Asker::new();
    let answers = [ask.store_in(NIC, "power/control", "junk"), ask.read("power/control")];
    ask.observed("power_control_refuses_junk", &["EINVAL", "on"], &answers);
    let auto = [ask.store_in(NIC, "power/control", "auto"), ask.read("power/control")];
    let on = [ask.store_in(NIC, "power/control", "on"), ask.read("power/control")];
    ask.observed("power_control_takes_auto_and_on", &["ok", "auto", "ok", "on"], &[auto, on].concat());
    let answers = [ask.store_in(NIC, "d3cold_allowed", "junk"), ask.read("d3cold_allowed")];
    ask.observed("d3cold_allowed_refuses_junk", &["EINVAL", "1"], &answers);
    let answers = [ask.store_in(NIC, "reset", "0"), ask.store_in(NIC, "reset", "junk")];
    ask.observed("reset_refuses_other_than_1", &["EINVAL", "EINVAL"], &answers);
    let methods = ask.read("reset_method");
    let answers = [ask.store_in(NIC, "reset_method", "junk"), ask.read("reset_method")];
    ask.observed("reset_method_refuses_an_unknown_name", &["EINVAL", &methods], &answers);
    let answers = [ask.store_in(NIC, "reset_method", "\n"), ask.read("reset_method"), ask.store_in(NIC, "reset", "1")];
    ask.observed("an_empty_reset_method_disables_reset", &["ok", "", "ENOTTY"], &answers);
    let answers = [ask.store_in(NIC, "reset_method", "default"), ask.read("reset_method")];
    ask.observed("reset_method_default_restores", &["ok", &methods], &answers);
    let answers = [ask.store_in(NIC, "no_such_attribute", "1")];
    ask.observed("a_missing_attribute_is_enoent_at_open", &["ENOENT"], &answers);
    let answers = [ask.store_in(NIC, "vendor", "1")];
    ask.observed("a_read_only_attribute_is_eacces_at_open", &["EACCES"], &answers);
    ask.end();
}

#[test]
fn functions_sleep_and_wake_as_on_a_real_kernel() {
    let mut ask = Asker::new();
    assert_eq!(ask.set_override("vfio-pci"), "ok");
    let answers = [ask.unbind("igb", NIC), ask.read("power_state")];
    ask.observed("unbind_leaves_a_function_awake", &["ok", "D0"], &answers);
    let answers = [ask.read("power/control"), ask.probe(NIC), ask.read("power/control")];
    ask.observed("a_power_control_set_before_vfio_pci_is_lost", &["on", "ok", "auto"], &answers);
    let answers = [ask.read("power/control"), ask.read("power_state")];
    ask.observed("vfio_pci_lets_an_idle_function_sleep", &["auto", "D3hot"], &answers);
    let answers = [ask.store_in(NIC, "power/control", "on"), ask.read("power_state")];
    ask.observed("power_control_on_wakes_a_function_of_vfio_pci", &["ok", "D0"], &answers);
    let answers = [ask.store_in(NIC, "power/control", "auto"), ask.read("power_state")];
    ask.observed("power_control_auto_lets_it_sleep_again", &["ok", "D3hot"], &answers);
    let answers = [ask.unbind("vfio-pci", NIC), ask.read("power/control"), ask.read("power_state")];
    ask.observed("unbind_from_vfio_pci_wakes_a_function_and_keeps_it_awake", &["ok", "on", "D0"], &answers);
    assert_eq!((ask.set_override(""), ask.probe(NIC)), ("ok".into(), "ok".into()));
    let answers = [ask.driver(), ask.read("power_state")];
    ask.observed("a_host_driver_leaves_its_function_awake", &["igb", "D0"], &answers);
    ask.end();
}

#[test]
fn a_device_in_use_is_answered_as_on_a_real_kernel() {
    let (card, audio) = ("0000:02:00.0", "0000:02:00.1");
    let mut ask = Asker::new();
    let to_vfio = [ask.store_in(card, "driver_override", "vfio-pci"), ask.unbind("nvidia", card), ask.probe(card)];
    assert_eq!(to_vfio, ["ok", "ok", "ok"]);
    let answers = [ask.unbind("snd_hda_intel", audio), ask.link(audio, "driver")];
    ask.observed("unbind_of_the_neighbour", &["ok", "none"], &answers);
    ask.sim.hold(4711, "qemu-system-x86", "/dev/vfio/16").expect("laid");
    let answers = [ask.bind("snd_hda_intel", audio), ask.link(audio, "driver")];
    ask.observed("a_host_driver_is_refused_in_a_group_in_use", &["EBUSY", "none"], &answers);
    let (host, unbind) = (ask.sim.host(), "sys/bus/pci/drivers/vfio-pci/unbind");
    let in_a_while = Instant::now() + Duration::from_secs(20);
    let writer = thread::spawn(move || host.store(unbind, card, in_a_while).is_ok());
    thread::sleep(Duration::from_millis(300));
    let waits = if writer.is_finished() { "returned" } else { "waits" };
    ask.observed("unbind_waits_for_who_has_the_device_open", &["waits"], &[waits.into()]);
    ask.sim.end_process(4711).expect("ended");
    let answers = [writer.join().expect("it returns").to_string(), ask.link(card, "driver")];
    ask.observed("unbind_returns_when_the_device_is_closed", &["true", "none"], &answers);
    let answers = [ask.bind("snd_hda_intel", audio), ask.link(audio, "driver")];
    ask.observed("the_neighbour_can_be_bound_again", &["ok", "snd_hda_intel"], &answers);
    ask.end();
}

#[test]
fn functions_are_reset_as_on_a_real_kernel() {
    let mut ask = Asker::new();
    assert_eq!((ask.set_override("vfio-pci"), ask.unbind("igb", NIC), ask.probe(NIC)), ("ok".into(), "ok".into(), "ok".into()));
    let answers = [ask.store_in(NIC, "reset", "1"), ask.registers_are_in_place()];
    ask.observed("a_reset_leaves_ids_and_registers_in_place", &["ok", "True"], &answers);
    let answers = [ask.store_in(PORT, "reset_subordinate", "junk")];
    ask.observed("reset_subordinate_refuses_junk", &["EINVAL"], &answers);
    let answers = [ask.store_in(PORT, "reset_subordinate", "0")];
    ask.observed("reset_subordinate_of_0_is_no_change", &["ok"], &answers);
    let answers = [ask.store_in(PORT, "reset_subordinate", "1"), ask.registers_are_in_place()];
    ask.observed("reset_subordinate_leaves_what_is_below_in_place", &["ok", "True"], &answers);
    let answers = [ask.store_in(NIC, "reset_subordinate", "1")];
    ask.observed("only_bridges_have_reset_subordinate", &["ENOENT"], &answers);
    assert_eq!(ask.sim.resets(NIC), 2, "by itself and with its bus");
    ask.end();
}

#[test]
fn functions_leave_and_are_found_again_as_on_a_real_kernel() {
    let mut ask = Asker::new();
    let (group, methods) = (ask.link(NIC, "iommu_group"), ask.read("reset_method"));
    let answers = [ask.store_in(NIC, "remove", "junk")];
    ask.observed("remove_refuses_junk", &["EINVAL"], &answers);
    let answers = [ask.store_in(NIC, "remove", "0"), ask.driver()];
    ask.observed("remove_of_0_is_no_change", &["ok", "igb"], &answers);
    let answers = [ask.store("sys/bus/pci/rescan", "junk")];
    ask.observed("rescan_refuses_junk", &["EINVAL"], &answers);
    let answers = [ask.store("sys/bus/pci/rescan", "1"), ask.driver()];
    ask.observed("rescan_changes_nothing_that_is_there", &["ok", "igb"], &answers);
    let answers = [ask.set_override("vfio-pci"), ask.store_in(NIC, "d3cold_allowed", "0"), ask.store_in(NIC, "reset_method", "flr")];
    ask.observed("a_function_is_told_what_it_will_forget", &["ok", "ok", "ok"], &answers);
    let is_there = |ask: &Asker| if ask.sim.host().exists(format!("sys/bus/pci/devices/{NIC}")) { "True" } else { "False" }.to_owned();
    let answers = [ask.store_in(NIC, "remove", "1"), is_there(&ask)];
    ask.observed("remove_takes_a_function_off_the_bus", &["ok", "False"], &answers);
    let answers = [ask.store("sys/bus/pci/rescan", "1"), is_there(&ask)];
    ask.observed("rescan_finds_what_was_removed", &["ok", "True"], &answers);
    let answers = [ask.read("driver_override"), ask.driver()];
    ask.observed("what_is_found_again_is_offered_to_drivers", &["(null)", "igb"], &answers);
    let answers = [ask.read("d3cold_allowed"), ask.read("reset_method")];
    ask.observed("what_is_found_again_has_forgotten_its_knobs", &["1", &methods], &answers);
    let answers = [ask.link(NIC, "iommu_group")];
    ask.observed("what_is_found_again_is_in_a_group_of_the_same_number", &[&group], &answers);
    ask.end();
}

#[test]
fn virtual_functions_come_and_go_as_on_a_real_kernel() {
    let mut ask = Asker::new();
    let answers = [ask.numvfs("junk")];
    ask.observed("sriov_numvfs_refuses_junk", &["EINVAL"], &answers);
    let answers = [ask.numvfs("8"), ask.read("sriov_numvfs")];
    ask.observed("sriov_numvfs_refuses_more_than_total", &["ERANGE", "0"], &answers);
    let answers = [ask.numvfs("0"), ask.read("sriov_numvfs")];
    ask.observed("sriov_numvfs_of_the_same_count_is_no_change", &["ok", "0"], &answers);
    assert_eq!(ask.store_in(NIC, "sriov_drivers_autoprobe", "0"), "ok");
    let answers = [ask.numvfs("2"), ask.read("sriov_numvfs"), ask.link(NIC, "virtfn1")];
    ask.observed("sriov_numvfs_makes_functions", &["ok", "2", "0000:05:10.2"], &answers);
    let vf = ask.link(NIC, "virtfn0");
    let answers = [ask.link(&vf, "driver")];
    ask.observed("vfs_stay_without_driver_with_autoprobe_off", &["none"], &answers);
    let answers = [ask.probe(&vf), ask.link(&vf, "driver")];
    ask.observed("drivers_probe_of_a_vf_with_autoprobe_off_binds_nothing", &["ok", "none"], &answers);
    let answers = [ask.bind("igbvf", &vf), ask.link(&vf, "driver")];
    ask.observed("bind_of_a_vf_with_autoprobe_off_is_enodev", &["ENODEV", "none"], &answers);
    let answers = [ask.store_in(&vf, "driver_override", "vfio-pci"), ask.probe(&vf), ask.link(&vf, "driver")];
    ask.observed("an_override_binds_a_vf_with_autoprobe_off", &["ok", "ok", "vfio-pci"], &answers);
    let node = format!("dev/vfio/{}", ask.link(&vf, "iommu_group"));
    let answers = [ask.sim.host().exists(&node).to_string()];
    ask.observed("a_bound_group_has_its_vfio_node", &["true"], &answers);
    let answers = [ask.numvfs("2"), ask.read("sriov_numvfs")];
    ask.observed("sriov_numvfs_again_is_no_change", &["ok", "2"], &answers);
    let answers = [ask.numvfs("1"), ask.read("sriov_numvfs")];
    ask.observed("sriov_numvfs_of_another_count_is_ebusy", &["EBUSY", "2"], &answers);
    let answers = [ask.store_in(&vf, "remove", "1")];
    ask.observed("a_vf_has_no_remove", &["ENOENT"], &answers);
    let answers = [ask.numvfs("0"), ask.sim.host().exists(format!("sys/bus/pci/devices/{vf}")).to_string()];
    ask.observed("sriov_numvfs_of_0_removes_functions", &["ok", "false"], &answers);
    let answers = [ask.sim.host().exists(&node).to_string()];
    ask.observed("a_group_without_device_loses_its_vfio_node", &["false"], &answers);
    ask.end();
}

#[test]
fn virtual_functions_need_a_driver_as_on_a_real_kernel() {
    let mut ask = Asker::new();
    assert_eq!(ask.unbind("igb", NIC), "ok");
    let answers = [ask.numvfs("1")];
    ask.observed("sriov_numvfs_without_driver_is_enoent", &["ENOENT"], &answers);
    assert_eq!((ask.set_override("vfio-pci"), ask.probe(NIC)), ("ok".into(), "ok".into()));
    let answers = [ask.numvfs("1"), ask.driver()];
    ask.observed("sriov_numvfs_of_vfio_pci_is_enoent", &["ENOENT", "vfio-pci"], &answers);
    ask.end();
}
