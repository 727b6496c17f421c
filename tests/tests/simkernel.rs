//! Each rule of the simulated kernel, and the faults a test may order.
#![allow(clippy::expect_used)]

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use tests::simhost::{Death, Errno, SimHost, survives};
use vfio::StoreError;

const GPU: &str = "0000:1b:00.0";
const HELD: &str = "0000:52:00.0";

fn dgx() -> SimHost {
    SimHost::build("dgx-h100").expect("the host is described")
}

/// Late enough for a busy machine.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// For stores that are meant to get stuck.
fn at_once() -> Instant {
    Instant::now() + Duration::from_millis(200)
}

/// Stores and gives the errno, 0 for success.
fn store(sim: &SimHost, attribute: &str, value: &str) -> i32 {
    match sim.host().store(attribute, value, soon()) {
        Ok(()) => 0,
        Err(error) => error.errno().expect("it answered"),
    }
}

fn device(file: &str) -> String {
    format!("sys/bus/pci/devices/{GPU}/{file}")
}

fn read(sim: &SimHost, file: &str) -> Option<String> {
    sim.host().read(file).expect("readable")
}

fn driver(sim: &SimHost) -> Option<String> {
    sim.host().link_name(device("driver")).expect("readable")
}

fn assign(sim: &SimHost) {
    assert_eq!(store(sim, &device("driver_override"), "vfio-pci"), 0);
    assert_eq!(store(sim, &device("driver/unbind"), GPU), 0);
    assert_eq!(store(sim, "sys/bus/pci/drivers_probe", GPU), 0);
}

#[test]
fn a_function_moves_to_vfio_and_back() {
    let sim = dgx();
    let before = sim.snapshot();
    assign(&sim);
    assert_eq!(driver(&sim).as_deref(), Some("vfio-pci"));
    assert!(sim.host().exists("dev/vfio/31"));
    assert!(sim.host().exists(device("vfio-dev/vfio0")));
    assert_eq!(store(&sim, &device("driver_override"), "\n"), 0);
    assert_eq!(store(&sim, &device("driver/unbind"), GPU), 0);
    assert_eq!(store(&sim, "sys/bus/pci/drivers_probe", GPU), 0);
    assert_eq!(sim.snapshot(), before);
}

#[test]
fn bind_answers_as_the_kernel_does() {
    let sim = dgx();
    let cases = [
        ("nvidia", "0000:99:1f.7", Errno::NODEV),
        ("nvidia", "rubbish", Errno::NODEV),
        ("mlx5_core", GPU, Errno::NODEV),
        ("vfio-pci", GPU, Errno::NODEV),
        ("nvidia", GPU, Errno::BUSY),
    ];
    for (driver, address, errno) in cases {
        assert_eq!(store(&sim, &format!("sys/bus/pci/drivers/{driver}/bind"), address), errno.raw_os_error(), "{driver} {address}");
    }
}

#[test]
fn the_old_driver_is_refused_while_the_override_names_another() {
    let sim = dgx();
    assign(&sim);
    assert_eq!(store(&sim, &device("driver/unbind"), GPU), 0);
    assert_eq!(store(&sim, "sys/bus/pci/drivers/nvidia/bind", GPU), Errno::NODEV.raw_os_error());
}

#[test]
fn unbind_wants_the_driver_that_has_the_function() {
    let sim = dgx();
    assert_eq!(store(&sim, "sys/bus/pci/drivers/vfio-pci/unbind", GPU), Errno::NODEV.raw_os_error());
    assert_eq!(store(&sim, "sys/bus/pci/drivers/nvidia/unbind", "0000:99:1f.7"), Errno::NODEV.raw_os_error());
}

#[test]
fn a_probe_succeeds_where_no_driver_takes_the_function() {
    let sim = dgx();
    assert_eq!(store(&sim, &device("driver_override"), "none"), 0);
    assert_eq!(store(&sim, &device("driver/unbind"), GPU), 0);
    assert_eq!(store(&sim, "sys/bus/pci/drivers_probe", GPU), 0);
    assert_eq!(driver(&sim), None);
    assert_eq!(store(&sim, "sys/bus/pci/drivers_probe", "0000:99:1f.7"), Errno::NODEV.raw_os_error());
}

#[test]
fn an_override_takes_any_name_and_is_cleared_only_by_a_newline() {
    let sim = dgx();
    assert_eq!(read(&sim, &device("driver_override")).as_deref(), Some("(null)"));
    for (value, shown) in [("nonsense", "nonsense"), ("", "nonsense"), ("vfio-pci\nrest", "vfio-pci"), ("\n", "(null)")] {
        assert_eq!(store(&sim, &device("driver_override"), value), 0);
        assert_eq!(read(&sim, &device("driver_override")).as_deref(), Some(shown), "after {value:?}");
    }
    assert_eq!(store(&sim, &device("driver_override"), &"x".repeat(4095)), Errno::INVAL.raw_os_error());
}

#[test]
fn a_file_that_is_not_there_or_takes_no_stores_is_told_apart() {
    let sim = dgx();
    assert_eq!(store(&sim, &device("no_such_file"), "1"), Errno::NOENT.raw_os_error());
    assert_eq!(store(&sim, "sys/bus/pci/drivers/no-driver/bind", GPU), Errno::NOENT.raw_os_error());
    assert_eq!(store(&sim, &device("vendor"), "1"), Errno::ACCESS.raw_os_error());
}

#[test]
fn values_are_validated_as_the_kernel_does() {
    let sim = dgx();
    let cases = [
        ("power/control", "auto", 0),
        ("power/control", "on\n", 0),
        ("power/control", "off", Errno::INVAL.raw_os_error()),
        ("d3cold_allowed", "0", 0),
        ("d3cold_allowed", "no", Errno::INVAL.raw_os_error()),
        ("reset", "1", 0),
        ("reset", "0", Errno::INVAL.raw_os_error()),
        ("reset_method", "bus", 0),
        ("reset_method", "acpi", Errno::INVAL.raw_os_error()),
        ("reset_method", "\n", 0),
        ("reset", "1", Errno::NOTTY.raw_os_error()),
        ("reset_method", "default", 0),
    ];
    for (file, value, errno) in cases {
        assert_eq!(store(&sim, &device(file), value), errno, "{file} {value:?}");
    }
    assert_eq!(read(&sim, &device("reset_method")).as_deref(), Some("flr bus"));
}

#[test]
fn vfio_lets_a_function_sleep_and_on_keeps_it_awake() {
    let sim = dgx();
    assign(&sim);
    assert_eq!(read(&sim, &device("power/control")).as_deref(), Some("auto"));
    assert_eq!(read(&sim, &device("power_state")).as_deref(), Some("D3hot"));
    assert_eq!(store(&sim, &device("power/control"), "on"), 0);
    assert_eq!(read(&sim, &device("power_state")).as_deref(), Some("D0"));
}

#[test]
fn unbind_waits_for_who_holds_the_function() {
    let sim = dgx();
    let unbind = format!("sys/bus/pci/devices/{HELD}/driver/unbind");
    let error = sim.host().store(&unbind, HELD, at_once()).expect_err("nvidia-persistenced has it open");
    assert!(matches!(error, StoreError::Stuck { .. }), "{error}");
    sim.end_process(812).expect("it ends");
    let link = format!("sys/bus/pci/devices/{HELD}/driver");
    let deadline = Instant::now() + Duration::from_secs(5);
    while sim.host().exists(&link) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!sim.host().exists(&link), "the effect comes late");
}

#[test]
fn a_host_driver_may_not_join_a_group_that_is_in_use() {
    let sim = dgx();
    assign(&sim);
    assert_eq!(store(&sim, &device("driver_override"), "\n"), 0);
    assert_eq!(store(&sim, &device("driver/unbind"), GPU), 0);
    sim.hold(9000, "qemu", "/dev/vfio/31").expect("laid");
    assert_eq!(store(&sim, "sys/bus/pci/drivers/nvidia/bind", GPU), Errno::BUSY.raw_os_error());
}

#[test]
fn a_store_fails_where_it_is_told_to() {
    let sim = dgx();
    sim.kernel.fail_at(2, Errno::IO);
    assert_eq!(store(&sim, &device("power/control"), "on"), 0);
    assert_eq!(store(&sim, &device("power/control"), "on"), Errno::IO.raw_os_error());
    assert_eq!(store(&sim, &device("power/control"), "on"), 0);
    sim.kernel.fail_on("d3cold_allowed", Errno::PERM);
    assert_eq!(store(&sim, &device("d3cold_allowed"), "0"), Errno::PERM.raw_os_error());
    assert_eq!(sim.kernel.stored().last(), Some(&(Path::new(&device("d3cold_allowed")).to_owned(), "0".to_owned())));
}

#[test]
fn a_store_that_hangs_is_stuck_and_locks_its_function_until_it_goes_on() {
    let sim = dgx();
    sim.kernel.hang_at(1);
    let host = sim.host();
    let stuck = |value| matches!(host.store(device("driver_override"), value, at_once()), Err(StoreError::Stuck { .. }));
    assert!(stuck("vfio-pci"));
    assert!(stuck("other"), "the function's lock is taken");
    sim.kernel.let_go();
    assert_ne!(read(&sim, &device("driver_override")).as_deref(), Some("(null)"));
}

#[test]
fn a_process_dies_before_or_after_a_store_and_starts_anew() {
    for (death, expected) in [(Death::Before, "(null)"), (Death::After, "vfio-pci")] {
        let sim = dgx();
        sim.kernel.die_at(1, death);
        let host = sim.host();
        let result = survives(|| host.store(device("driver_override"), "vfio-pci", soon()));
        assert!(result.is_none(), "it died");
        assert!(survives(|| host.store(device("power/control"), "on", soon())).is_none(), "the dead store nothing");
        let sim = sim.restart();
        assert_eq!(read(&sim, &device("driver_override")).as_deref(), Some(expected));
        assert_eq!(store(&sim, &device("power/control"), "on"), 0);
    }
}

#[test]
fn a_failed_store_names_its_errno() {
    let sim = dgx();
    let error = sim.host().store(device("power/control"), "off", soon()).expect_err("refused");
    let StoreError::Refused { source, .. } = error else { panic!("it answered") };
    assert_eq!(source.kind(), io::ErrorKind::InvalidInput);
}
