//! What becomes of claims when the host goes down and comes up.

use super::*;

/// The driver and the override of the GPU.
fn driver(managed: &Managed) -> String {
    vfio::Binding::read(&managed.sim.host(), gpu()).unwrap().unwrap().driver.unwrap_or_default()
}

#[test]
fn p66_after_a_reboot_a_claim_stays_and_its_gpu_is_bound_again_before_libvirt_starts() {
    let (managed, daemon) = dgx();
    let id = claim(&daemon, "");
    let before = view(&daemon, id);
    daemon.stop();
    let managed = managed.reboot(gpu()).unwrap();
    assert_eq!(driver(&managed), "nvidia");
    manager::restore::run(managed.options()).unwrap();
    assert_eq!(driver(&managed), "vfio-pci");
    assert!(may_start(&managed, DOMAIN) && !may_start(&managed, OTHER_DOMAIN));
    let stores = managed.sim.kernel.stored().len();
    let daemon = start(&managed);
    assert_eq!(view(&daemon, id), before, "with the epoch that its manager knows");
    assert_eq!(managed.sim.kernel.stored().len(), stores, "nothing is left for the daemon");
    assert_eq!(daemon.view().devices[&gpu()].state, DeviceState::Claimed);
    end(&daemon, id).unwrap();
    until_free(&daemon);
}

#[test]
fn p66_a_claim_whose_gpu_cannot_be_bound_again_stays_and_the_next_start_tries_once_more() {
    let (managed, daemon) = dgx();
    let id = claim(&daemon, "");
    daemon.stop();
    let managed = managed.reboot(gpu()).unwrap();
    managed.sim.kernel.fail_on("driver/unbind", Errno::IO);
    let daemon = start(&managed);
    daemon.until(|view| view.jobs.values().any(|job| job.kind == "claim-restore" && job.state == JobState::Failed));
    assert_eq!((view(&daemon, id).state, daemon.view().devices[&gpu()].state), (ClaimState::Active, DeviceState::Drifted));
    daemon.stop();
    let managed = managed.restart();
    let daemon = start(&managed);
    daemon.until(|view| view.devices[&gpu()].state == DeviceState::Claimed);
    assert_eq!(driver(&managed), "vfio-pci");
}

#[test]
fn a_claim_that_ends_by_itself_ends_after_a_reboot_and_its_gpu_is_reset_before_it_is_free() {
    let (managed, daemon) = dgx();
    claim(&daemon, "ttl = 1");
    daemon.stop();
    let managed = managed.reboot(gpu()).unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    let daemon = start(&managed);
    until_free(&daemon);
    bound_then_reset(&managed);
}

/// What was stored binds the GPU to its VFIO driver and resets it there.
fn bound_then_reset(managed: &Managed) {
    let stored = managed.sim.kernel.stored();
    let place = |end: &str| stored.iter().position(|(path, _)| path.ends_with(end)).unwrap_or_else(|| panic!("no {end} in {stored:?}"));
    assert!(place("drivers_probe") < place("reset"), "{stored:?}");
}

/// A machine runs, and the host loses power.
fn cut_off(hold: &str, on_demand: bool) -> (Managed, MachineId) {
    let managed = Managed::new("dgx-h100", &if on_demand { POOL.replace("pool", "on-demand") } else { POOL.into() }).unwrap();
    let (managed, daemon, _libvirt) = with_libvirt(managed);
    if !on_demand {
        daemon.apply(&[assign(gpu())]).unwrap();
    }
    let machine = running_machine(&daemon, hold);
    daemon.stop();
    standin::end_all(managed.sim.root());
    (managed.reboot(gpu()).unwrap(), machine)
}

#[test]
fn a_machine_that_the_host_took_down_with_it_is_closed_unclean_and_its_gpu_reset_before_it_is_free() {
    let (managed, machine) = cut_off("running", false);
    manager::restore::run(managed.options()).unwrap();
    bound_then_reset(&managed);
    let ledger = managed.ledger().unwrap();
    assert!(ledger.claims.is_empty() && ledger.quarantines.is_empty());
    let record = &ledger.machines[&machine];
    assert_eq!((record.state, record.reason.as_str()), (MachineState::Off, "the host was restarted while it ran"));
    let identity = managed.start().unwrap().ready().inventory.devices[&gpu()].identity.clone();
    let history = manager::history::read(&managed.files().join("state"), &identity, Page { limit: 100, before: None }).unwrap();
    let closed = history.iter().filter_map(|entry| entry.details.get("closed")).collect::<Vec<_>>();
    assert_eq!(closed, ["unclean"]);
}

#[test]
fn while_the_host_shuts_down_nothing_is_stored_and_claims_stay_for_the_next_boot() {
    let (managed, daemon, libvirt) = with_libvirt(Managed::new("dgx-h100", POOL).unwrap());
    daemon.apply(&[assign(gpu()), assign("0000:43:00.0".parse().unwrap())]).unwrap();
    let machine = running_machine(&daemon, "running");
    claim(&daemon, "release = 'domain-stopped'\nttl = 1");
    managed.sim.kernel.calm();
    daemon.engine().host_stops(true);
    // As libvirt-guests does.
    for domain in libvirt.list_all_domains(virt::sys::VIR_CONNECT_LIST_DOMAINS_ACTIVE).unwrap() {
        domain.destroy().unwrap();
    }
    std::thread::sleep(Duration::from_millis(1500));
    assert!(managed.sim.kernel.stored().is_empty(), "{:?}", managed.sim.kernel.stored());
    assert_eq!(daemon.view().claims.len(), 2);
    assert_eq!(daemon.submit(request("")).unwrap_err().message, "the host shuts down");
    // Somebody thought better of it.
    daemon.engine().host_stops(false);
    daemon.until(|view| view.machines[&machine].state == MachineState::Off && view.claims.is_empty());
    assert_eq!(managed.sim.kernel.stored().iter().filter(|(path, _)| path.ends_with("reset")).count(), 2);
    standin::end_all(managed.sim.root());
}

#[test]
fn a_gpu_that_cannot_be_reset_after_the_host_took_its_machine_down_is_in_quarantine() {
    let (managed, _) = cut_off("running", false);
    managed.sim.kernel.fail_on("reset", Errno::IO);
    let daemon = start(&managed);
    daemon.until(|view| view.devices[&gpu()].state == DeviceState::Quarantined);
    assert!(daemon.view().claims.is_empty());
}

#[test]
fn a_gpu_on_demand_of_a_machine_that_the_host_took_down_is_the_hosts_again() {
    let (managed, machine) = cut_off("running", true);
    let daemon = start(&managed);
    daemon.until(|view| view.machines[&machine].state == MachineState::Off && view.devices[&gpu()].state == DeviceState::Host);
    assert!(managed.sim.kernel.stored().iter().all(|(path, _)| !path.ends_with("bind")), "it is with its own driver already");
}

#[test]
fn a_machine_that_holds_its_gpu_while_it_is_defined_has_it_again_after_a_reboot() {
    let (managed, machine) = cut_off("defined", false);
    let daemon = start(&managed);
    daemon.until(|view| view.machines[&machine].state == MachineState::Off && view.devices[&gpu()].state == DeviceState::Claimed);
    assert_eq!((driver(&managed).as_str(), daemon.view().claims.len()), ("vfio-pci", 1));
}

#[test]
fn a_gpu_that_cannot_be_bound_again_to_be_reset_is_in_quarantine() {
    let (managed, machine) = cut_off("running", false);
    managed.sim.kernel.fail_on("driver/unbind", Errno::IO);
    let daemon = start(&managed);
    daemon.until(|view| view.machines[&machine].state == MachineState::Off && view.jobs.values().all(|job| job.state.is_over()));
    let shown = daemon.view().devices[&gpu()].clone();
    let reason = "0000:1b:00.0 is bound to nvidia, so it could not be reset after its claim";
    assert_eq!((shown.state, shown.reason.as_str(), shown.claim), (DeviceState::Quarantined, reason, None));
}

/// A network card with virtual functions.
const CARD: &str = "0000:05:00.0";

#[test]
fn p42_a_claimed_virtual_function_is_made_again_and_bound_after_a_reboot_before_its_claim_may_end() {
    let rules = format!(
        "{POOL}[[devices]]\nmatch = {{ address = '{CARD}' }}\nuse = 'pool'\n[[devices]]\nmatch = {{ kind = 'virtual-function' }}\nuse = 'pool'\n"
    );
    let managed = Managed::new("workstation", &rules).unwrap();
    let store = |managed: &Managed, file: &str, text: &str| {
        let soon = std::time::Instant::now() + Duration::from_secs(5);
        managed.sim.host().store(format!("sys/bus/pci/devices/{CARD}/{file}"), text, soon).unwrap();
    };
    store(&managed, "sriov_numvfs", "0");
    let daemon = start(&managed);
    let card: PciAddress = CARD.parse().unwrap();
    daemon.apply(&[Goal::Vfs { device: card, count: 2 }]).unwrap();
    let vf = daemon.view().inventory.devices[&card].sriov.as_ref().unwrap().functions[1];
    assert_eq!(daemon.apply(&[assign(vf)]).unwrap().state, JobState::Done);
    let wish = |end: &str| {
        let text = format!("domain-uuid = '{DOMAIN}'\n{end}\ndevices = [{{ kind = 'vf', identity = '{vf}' }}]");
        Request::Claim {
            tenant: TenantId::BUILT_IN,
            spec: ClaimSpec::parse(Node::from_toml(&text).unwrap()).unwrap(),
            client: String::new(),
        }
    };
    let mut managed = managed;
    let mut daemon = daemon;
    for (end, state) in [("release = 'manual'", DeviceState::Claimed), ("ttl = 1", DeviceState::Free)] {
        let id = done(&daemon, wish(end)).claims[0];
        daemon.stop();
        store(&managed, "sriov_numvfs", "0");
        store(&managed, "sriov_drivers_autoprobe", "1");
        managed.sim.set("proc/sys/kernel/random/boot_id", &Uuid::new_v4().to_string()).unwrap();
        managed = managed.restart();
        std::thread::sleep(Duration::from_millis(1100));
        daemon = start(&managed);
        daemon.until(|view| {
            view.devices.get(&vf).is_some_and(|device| device.state == state) && view.jobs.values().all(|job| job.state.is_over())
        });
        assert!(managed.ledger().unwrap().quarantines.is_empty());
        if daemon.view().claims.contains_key(&id) {
            assert_eq!(super::end(&daemon, id).unwrap().state, JobState::Done);
        }
    }
}
