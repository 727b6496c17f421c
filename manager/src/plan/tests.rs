//! A host of four cards, made by hand: what a plan says needs no kernel.

use vfio::{AcsCapability, Group, GroupId, Hold, Identity, Ids, Iommu, Kind, Member, PortAcs, Power, Sriov, VgpuInterface};

use super::*;
use crate::config::{Match, Rule, Use};
use crate::failure::{ErrorKind, Failure};
use crate::id::{ClaimId, MachineId, TenantId};
use crate::ledger::{ClaimRecord, Isolation, Quarantine, Standing};

pub(crate) fn at(address: &str) -> PciAddress {
    address.parse().unwrap()
}

/// An H100, or another function of that address.
pub(crate) fn function(address: &str, kind: Kind) -> Function {
    let address = at(address);
    let ids = Ids { vendor: 0x10de, device: 0x2330, subsystem_vendor: 0x10de, subsystem_device: 0x16c1 };
    Function {
        address,
        kind,
        ids,
        class: 0x030200,
        revision: 0xa1,
        vendor_name: None,
        model_name: None,
        identity: Identity { slot: format!("pci0000:00/{address}"), ids, serial: None },
        bars: Vec::new(),
        link: None,
        numa_node: None,
        driver: Some("nvidia".into()),
        driver_override: None,
        locked: false,
        group: Some(GroupId(u32::from(address.bus()))),
        reset_methods: vec!["flr".into()],
        on_same_bus: Vec::new(),
        bus_reset_at: None,
        power: Power { state: Some("D0".into()), control: Some("auto".into()), d3cold_allowed: Some(true) },
        sriov: None,
        physical_function: None,
        vgpu: None,
        boot_vga: false,
        bar_claimants: Vec::new(),
        vfio_device: None,
        vfio_driver: "vfio-pci".into(),
        unreadable: Vec::new(),
    }
}

struct Case {
    inventory: Inventory,
    config: Config,
    ledger: Ledger,
    surroundings: Surroundings,
}

const GPU: &str = "0000:41:00.0";
const AUDIO: &str = "0000:41:00.1";

impl Case {
    /// A GPU with its audio function at 41, a second GPU at 42; both may be taken.
    fn new() -> Self {
        let mut audio = function(AUDIO, Kind::Companion);
        audio.driver = Some("snd_hda_intel".into());
        let devices = [function(GPU, Kind::Gpu), audio, function("0000:42:00.0", Kind::Gpu)];
        let inventory =
            Inventory { devices: devices.map(|function| (function.address, function)).into(), iommu: Iommu::On, ..Inventory::default() };
        let gpus = Match { kind: Some(Kind::Gpu), ..Match::default() };
        let config = Config { devices: vec![Rule { matches: gpus, use_: Use::Pool }], ..Config::default() };
        let surroundings = Surroundings { drivers: ["vfio-pci".to_owned()].into(), ..Surroundings::default() };
        Self { inventory, config, ledger: Ledger::default(), surroundings }
    }

    fn gpu(&mut self) -> &mut Function {
        self.inventory.devices.get_mut(&at(GPU)).unwrap()
    }

    fn plan(&self, goals: &[Goal]) -> Result<Plan, Vec<Refusal>> {
        let Self { inventory, config, ledger, surroundings } = self;
        plan(&Situation { inventory, config, ledger, surroundings }, goals)
    }

    fn assign(&self, force: bool) -> Result<Plan, Vec<Refusal>> {
        self.plan(&[Goal::Assign { device: at(GPU), force }])
    }

    fn refusal(&self) -> Failure {
        let mut refusals = self.assign(false).unwrap_err();
        assert_eq!(refusals.len(), 1, "{refusals:?}");
        refusals.remove(0).into()
    }

    /// What the kernel would show once `plan` was carried out.
    fn carry_out(&mut self, plan: &Plan) {
        self.ledger.begin_moves(&plan.moves, &self.inventory);
        for change in plan.changes() {
            let function = self.inventory.devices.get_mut(&change.device()).unwrap();
            match change {
                Change::Binding { to, .. } => (function.driver, function.driver_override) = (to.driver.clone(), to.driver_override.clone()),
                Change::PowerControl { to, .. } => function.power.control = Some(to.clone()),
                Change::D3cold { to, .. } => function.power.d3cold_allowed = Some(*to),
                Change::VfCount { .. } | Change::VfAutoprobe { .. } => unreachable!("no virtual functions here"),
                Change::ResetMethod { to, .. } => function.reset_methods = to.split_whitespace().map(str::to_owned).collect(),
            }
        }
        self.ledger.finish_moves(&plan.moves);
    }
}

fn steps(plan: &Plan) -> Vec<String> {
    plan.steps().iter().map(|step| format!("{} {} {} {} {}", step.stage, step.device, step.knob, step.from, step.to)).collect()
}

fn release() -> Goal {
    Goal::Release { device: at(GPU) }
}

#[test]
fn p7_p22_p30_all_are_kept_awake_companions_bind_first_and_the_gpu_last() {
    let plan = Case::new().assign(false).unwrap();
    assert_eq!(
        steps(&plan),
        [
            "1 0000:41:00.1 d3cold_allowed 1 0",
            "2 0000:41:00.1 power/control auto on",
            "3 0000:41:00.0 d3cold_allowed 1 0",
            "4 0000:41:00.0 power/control auto on",
            "5 0000:41:00.1 driver snd_hda_intel vfio-pci",
            "6 0000:41:00.0 driver nvidia vfio-pci",
        ]
    );
}

#[test]
fn p20_release_is_the_reverse_and_gives_each_function_its_own_driver() {
    let mut case = Case::new();
    case.carry_out(&case.assign(false).unwrap());
    let plan = case.plan(&[release()]).unwrap();
    assert_eq!(
        steps(&plan),
        [
            "1 0000:41:00.0 driver vfio-pci nvidia",
            "2 0000:41:00.1 driver vfio-pci snd_hda_intel",
            "3 0000:41:00.0 power/control on auto",
            "4 0000:41:00.0 d3cold_allowed 0 1",
            "5 0000:41:00.1 power/control on auto",
            "6 0000:41:00.1 d3cold_allowed 0 1",
        ]
    );
    let before = Case::new().inventory;
    case.carry_out(&plan);
    assert_eq!((case.inventory, case.ledger.devices.len()), (before, 0));
}

#[test]
fn planning_twice_gives_an_empty_plan() {
    let mut case = Case::new();
    case.carry_out(&case.assign(false).unwrap());
    assert!(case.assign(false).unwrap().is_empty());
    case.carry_out(&case.plan(&[release()]).unwrap());
    assert!(case.plan(&[release()]).unwrap().is_empty());
}

#[test]
fn bundles_of_one_stage_are_different_ones() {
    let case = Case::new();
    let other = Goal::Assign { device: at("0000:42:00.0"), force: false };
    let plan = case.plan(&[Goal::Assign { device: at(GPU), force: false }, other.clone(), other]).unwrap();
    assert_eq!(plan.moves.len(), 2, "a bundle asked for twice moves once");
    assert_eq!(plan.stages.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2, 2, 1, 1, 1]);
}

#[test]
fn the_digest_names_the_plan_and_nothing_else() {
    let mut case = Case::new();
    let digest = case.assign(false).unwrap().digest();
    assert_eq!(digest.len(), 64);
    assert_eq!(case.assign(true).unwrap().digest(), digest);
    case.gpu().power.d3cold_allowed = Some(false);
    assert_ne!(case.assign(false).unwrap().digest(), digest);
}

#[test]
fn p75_a_device_bound_to_vfio_by_somebody_else_is_not_released() {
    let mut case = Case::new();
    case.gpu().driver = Some("vfio-pci".into());
    assert!(case.plan(&[release()]).unwrap().is_empty());
}

#[test]
fn a_record_of_another_device_at_that_address_is_not_obeyed() {
    let mut case = Case::new();
    case.carry_out(&case.assign(false).unwrap());
    case.gpu().identity.slot = "pci0000:80/01.0/00.0".into();
    assert_eq!(case.plan(&[release()]).unwrap().changes().filter(|change| change.device() == at(GPU)).count(), 0);
}

#[test]
fn a_vf_moves_alone_and_a_variant_driver_is_taken_where_one_fits() {
    let mut case = Case::new();
    let gpu = case.gpu();
    gpu.vfio_driver = "nvgrace-gpu-vfio-pci".into();
    case.surroundings.drivers.insert("nvgrace-gpu-vfio-pci".into());
    let plan = case.assign(false).unwrap();
    assert!(steps(&plan).contains(&"6 0000:41:00.0 driver nvidia nvgrace-gpu-vfio-pci".to_owned()));
}

#[test]
fn what_the_configuration_does_not_allow_is_refused() {
    let mut case = Case::new();
    case.config.devices.clear();
    let refusals: Vec<Failure> = case.assign(false).unwrap_err().into_iter().map(Failure::from).collect();
    assert_eq!(refusals.len(), 2, "the companion goes with its GPU");
    assert_eq!(refusals[1].message, "0000:41:00.0 may only be observed");
    case = Case::new();
    case.config.devices[0].use_ = Use::Lend { to: "nova".into() };
    assert!(!case.assign(false).unwrap().is_empty(), "what is lent is bound for its owner");
}

#[test]
fn p28_a_foreign_function_in_the_group_is_named_with_the_port_and_a_better_one() {
    let mut case = Case::new();
    let nvme = Member {
        address: at("0000:41:02.0"),
        kind: Kind::Other,
        description: "Non-Volatile memory controller".into(),
        ids: Ids::default(),
        driver: Some("nvme".into()),
    };
    let bad =
        PortAcs { port: at("0000:40:01.0"), capability: AcsCapability::Present, missing: vec!["source validation", "request redirect"] };
    let good = PortAcs { port: at("0000:40:1d.0"), capability: AcsCapability::Present, missing: Vec::new() };
    let id = GroupId(0x41);
    let mut group = Group { id, members: vec![nvme.clone()], acs: vec![bad.clone()], reserved_direct: false };
    case.inventory.groups.insert(id, group.clone());
    case.inventory.ports = vec![bad, good];
    let refusal = case.refusal();
    assert_eq!(refusal.kind, ErrorKind::GroupShared);
    assert_eq!(
        refusal.to_string(),
        "0000:41:00.0 shares IOMMU group 65 with 0000:41:02.0 (Non-Volatile memory controller, driver nvme), which is not part of its bundle\n  \
         why    0000:40:01.0 (PCIe port) lacks ACS source validation and request redirect, so the kernel cannot separate the two\n  \
         remedy move 0000:41:02.0 to another slot, or use a port with ACS (0000:40:1d.0 has it)"
    );
    group.members[0].driver = None;
    case.inventory.groups.insert(id, group);
    assert!(case.assign(false).is_ok(), "as the kernel counts, a member without a driver is not in the way");
}

#[test]
fn p21_the_display_the_host_booted_on_is_refused_unless_forced() {
    let mut case = Case::new();
    case.gpu().boot_vga = true;
    case.gpu().bar_claimants = vec!["efifb".into()];
    let refusal = case.refusal();
    assert_eq!(refusal.message, "0000:41:00.0 shows the host's console");
    assert_eq!(refusal.why.len(), 2);
    assert!(case.assign(true).is_ok());
}

#[test]
fn p3_holders_are_named_with_their_units() {
    let mut case = Case::new();
    case.config.policy.pause_units = vec!["nvidia-persistenced.service".into()];
    let holder = Holder {
        device: at(GPU),
        pid: 812,
        command: "nvidia-persiste".into(),
        unit: Some("nvidia-persistenced.service".into()),
        node: "dev/nvidia0".into(),
        how: Hold::Open,
    };
    case.surroundings.holders.insert(at(GPU), vec![holder.clone()]);
    let plan = case.assign(false).unwrap();
    assert_eq!(plan.pauses.keys().collect::<Vec<_>>(), ["nvidia-persistenced.service"], "nobody else is in the way");
    let other = Holder { pid: 900, command: "nvtop".into(), unit: None, ..holder.clone() };
    case.surroundings.holders.insert(at(GPU), vec![holder, other]);
    assert_eq!(
        case.refusal().to_string(),
        "0000:41:00.0 is held by nvidia-persiste[812], nvtop[900]\n  \
         why    nvidia-persiste[812] has open /dev/nvidia0, unit nvidia-persistenced.service (policy.pause-units lets it be paused)\n  \
         why    nvtop[900] has open /dev/nvidia0\n  \
         remedy systemctl stop nvidia-persistenced.service"
    );
}

#[test]
fn every_other_obstacle_is_a_refusal_of_its_own() {
    type Spoil = fn(&mut Case);
    let cases: [(Spoil, ErrorKind, &str); 12] = [
        (|case| case.inventory.iommu = Iommu::Off, ErrorKind::NotViable, "without an IOMMU"),
        (|case| case.surroundings.unsafe_noiommu = true, ErrorKind::NotViable, "unsafe no-IOMMU mode"),
        (|case| case.gpu().group = None, ErrorKind::NotViable, "in no IOMMU group"),
        (reserve, ErrorKind::NotViable, "the firmware uses its DMA"),
        (live_functions, ErrorKind::Held, "has 2 virtual functions"),
        (vendor_vfio, ErrorKind::NotSupported, "stays on nvidia"),
        (|case| case.surroundings.drivers.clear(), ErrorKind::NotViable, "needs the driver vfio-pci, which is not loaded"),
        (claim, ErrorKind::AlreadyClaimed, "belongs to machine"),
        (foreign_domain, ErrorKind::Held, "belongs to the libvirt domain desktop, which is not gpuward's"),
        (quarantine, ErrorKind::Quarantined, "is in quarantine"),
        (busy, ErrorKind::Busy, "is busy: job 3 (release) is not over"),
        (|case| drop(case.inventory.devices.remove(&at(GPU))), ErrorKind::NoSuchDevice, "there is no device 0000:41:00.0"),
    ];
    for (spoil, kind, text) in cases {
        let mut case = Case::new();
        spoil(&mut case);
        let refusals = case.assign(false).expect_err(text);
        let failures: Vec<_> = refusals.into_iter().map(Failure::from).collect();
        let found = failures.iter().find(|failure| failure.message.contains(text)).unwrap_or_else(|| panic!("{text}: {failures:?}"));
        assert_eq!(found.kind, kind);
        assert!(!found.remedy.is_empty(), "{text}");
    }
    let case = Case::new();
    let both = case.plan(&[Goal::Assign { device: at(GPU), force: false }, release()]).unwrap_err();
    assert_eq!(both, [Refusal::BothWays { device: at(GPU) }]);
}

fn reserve(case: &mut Case) {
    let id = GroupId(0x41);
    case.inventory.groups.insert(id, Group { id, members: Vec::new(), acs: Vec::new(), reserved_direct: true });
}

fn live_functions(case: &mut Case) {
    let functions = vec![at("0000:41:00.4"), at("0000:41:00.5")];
    case.gpu().sriov = Some(Sriov { total: 8, enabled: 2, autoprobe: false, functions });
}

#[test]
fn p51_a_physical_function_that_a_vfio_driver_gave_virtual_ones_is_not_released() {
    let mut case = Case::new();
    let plan = case.assign(false).unwrap();
    case.carry_out(&plan);
    live_functions(&mut case);
    let refusals = case.plan(&[release()]).unwrap_err();
    assert!(matches!(refusals[..], [Refusal::LiveFunctions { count: 2, .. }]), "{refusals:?}");
}

fn vendor_vfio(case: &mut Case) {
    case.gpu().vgpu = Some(VgpuInterface::VendorVfio);
    case.gpu().physical_function = Some(at("0000:41:00.7"));
}

fn claim(case: &mut Case) {
    let record = ClaimRecord {
        standing: Standing::Active,
        tenant: TenantId::BUILT_IN,
        machine: Some(MachineId::random()),
        domain: uuid::Uuid::nil(),
        devices: vec![at(AUDIO), at(GPU)],
        isolation: Isolation::WholeGpu,
        since: 0,
        epoch: 1,
        on_demand: false,
        boot: String::new(),
        terms: None,
    };
    case.ledger.claims.insert(ClaimId::random(), record);
}

fn foreign_domain(case: &mut Case) {
    case.surroundings.domains.insert(at(GPU), "desktop".into());
}

fn quarantine(case: &mut Case) {
    let identity = case.gpu().identity.clone();
    let quarantine = Quarantine { identity, reason: "reset failed".into(), since: 0, stuck: false };
    case.ledger.quarantines.insert(at(GPU), quarantine);
}

fn busy(case: &mut Case) {
    case.surroundings.busy.insert(at(GPU), (JobId(3), "release"));
}
