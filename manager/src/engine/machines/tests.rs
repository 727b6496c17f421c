//! What hints make of a machine, without threads: an engine that was not started.

use std::sync::mpsc;

use uuid::Uuid;
use vfio::{Deadlines, Host};

use super::*;
use crate::engine::Options as EngineOptions;
use crate::id::TenantId;
use crate::ledger::{Isolation, MachineRecord, store};
use crate::libvirt::{Domain, DomainType};
use crate::spec::{MachineSpec, Node};

const FACTS: HostFacts = HostFacts { domain_type: DomainType::Kvm, cpus: 4, memory: 8 << 30, libvirt: 9_000_000, address_bits: 46 };
const EPOCH: u64 = 7;
const HOSTDEV: &str = "<hostdev type='pci'><source><address domain='0' bus='0x41' slot='0' function='0'/></source></hostdev>";

struct Case {
    engine: Engine,
    machine: MachineId,
    claim: ClaimId,
    // Hints of looks that were started: nobody handles them.
    _messages: mpsc::Receiver<Message>,
    _folder: tempfile::TempDir,
}

impl Case {
    /// A machine that the ledger has as running, with a claim.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let options = EngineOptions {
            host: Host::captured(folder.path()),
            config: folder.path().join("gpuward.toml"),
            state_dir: folder.path().join("state"),
            run_dir: folder.path().join("run"),
            deadlines: Deadlines::default(),
            machines: Options::default(),
        };
        let lock = store::lock(&options.run_dir).unwrap();
        let (inbox, messages) = mpsc::channel();
        let mut engine = Engine::new(options, Box::new(|_| {}), inbox, lock);
        let spec = Node::from_toml("format = 1\nname = \"a\"\nvcpus = 1\nmemory = \"1GiB\"\n[[disk]]\nvolume = \"a/b\"\n").unwrap();
        let spec = MachineSpec::parse(spec).unwrap();
        let (machine, claim) = (MachineId(spec.uuid), ClaimId::random());
        let record = MachineRecord { spec, tenant: TenantId::BUILT_IN, state: MachineState::Running, reason: String::new() };
        engine.ledger.machines.insert(machine, record);
        engine.ledger.claims.insert(claim, claim_of(machine));
        Self { engine, machine, claim, _messages: messages, _folder: folder }
    }

    fn state(&self) -> (MachineState, String) {
        let view = views(&self.engine).remove(&self.machine).unwrap();
        (view.state, view.reason)
    }

    fn hint(&mut self, of: Hint) -> (MachineState, String) {
        hint(&mut self.engine, of);
        self.state()
    }

    fn runs_with(&self, epoch: u64) -> Hint {
        let xml = format!(
            "<domain><metadata><g:machine xmlns:g='{}' uuid='{}' tenant='{}' request-id=''><g:claim id='{}' epoch='{epoch}'/></g:machine>
             </metadata><devices>{HOSTDEV}</devices></domain>",
            xml_templates::NAMESPACE,
            self.machine.0,
            TenantId::BUILT_IN,
            self.claim
        );
        self.looked(Look::Running(Running {
            domain: Domain { uuid: self.machine.0, name: "a".into(), paused: false, asleep: false, xml },
            process: None,
        }))
    }

    fn looked(&self, look: Look) -> Hint {
        Hint::Looked(self.machine, Box::new(look))
    }
}

fn claim_of(machine: MachineId) -> ClaimRecord {
    ClaimRecord {
        standing: Standing::Active,
        tenant: TenantId::BUILT_IN,
        machine: Some(machine),
        domain: machine.0,
        devices: vec!["0000:41:00.0".parse().unwrap()],
        isolation: Isolation::WholeGpu,
        since: 0,
        epoch: EPOCH,
        on_demand: false,
        boot: String::new(),
        terms: None,
    }
}

#[test]
fn a_machine_is_unknown_until_it_was_looked_at_and_while_libvirt_is_away() {
    let mut case = Case::new();
    let lost = |case: &mut Case| case.hint(Hint::Libvirt(Notice::Lost { reason: "stopped".into() }));
    assert_eq!(lost(&mut case), (MachineState::Unknown, "libvirt cannot be asked: stopped".into()));
    let connected = case.hint(Hint::Libvirt(Notice::Connected(FACTS)));
    assert_eq!(connected, (MachineState::Unknown, "it has not been looked at yet".into()));
    let seen = case.runs_with(EPOCH);
    assert_eq!(case.hint(seen), (MachineState::Running, String::new()));
    assert_eq!(lost(&mut case), (MachineState::Unknown, "libvirt cannot be asked: stopped".into()));
    assert_eq!(case.engine.ledger.claims.len(), 1, "its claim stays");
}

#[test]
fn a_domain_with_other_epochs_is_not_adopted() {
    let mut case = Case::new();
    case.hint(Hint::Libvirt(Notice::Connected(FACTS)));
    let seen = case.runs_with(EPOCH - 1);
    let (state, reason) = case.hint(seen);
    assert_eq!(state, MachineState::Unknown);
    assert_eq!(reason, "its domain runs with claims that gpuward does not have any more");
    assert_eq!(case.engine.ledger.claims.len(), 1);
}

#[test]
fn a_domain_without_our_metadata_is_not_adopted() {
    let mut case = Case::new();
    case.hint(Hint::Libvirt(Notice::Connected(FACTS)));
    let domain = Domain { uuid: case.machine.0, name: "a".into(), paused: false, asleep: false, xml: "<domain/>".into() };
    let seen = case.looked(Look::Running(Running { domain, process: None }));
    assert_eq!(case.hint(seen), (MachineState::Unknown, "a domain with its UUID runs that gpuward did not start".into()));
}

#[test]
fn a_start_that_was_cut_off_is_adopted_where_its_domain_runs() {
    let mut case = Case::new();
    case.engine.ledger.machines.get_mut(&case.machine).unwrap().state = MachineState::Starting;
    case.hint(Hint::Libvirt(Notice::Connected(FACTS)));
    let seen = case.runs_with(EPOCH);
    assert_eq!(case.hint(seen).0, MachineState::Running);
    assert_eq!(case.engine.ledger.machines[&case.machine].state, MachineState::Running);
}

#[test]
fn what_is_left_of_a_machine_keeps_it_from_being_off() {
    let mut case = Case::new();
    case.hint(Hint::Libvirt(Notice::Connected(FACTS)));
    let seen = case.looked(Look::Ending { why: "its QEMU, process 7, has not ended".into() });
    assert_eq!(case.hint(seen), (MachineState::Stopping, "its QEMU, process 7, has not ended".into()));
    assert_eq!(case.engine.ledger.claims.len(), 1);
}

#[test]
fn a_change_of_a_domain_that_is_not_ours_leads_to_no_look() {
    let mut case = Case::new();
    case.hint(Hint::Libvirt(Notice::Connected(FACTS)));
    case.hint(Hint::Libvirt(Notice::Changed(Uuid::from_u128(1))));
    assert!(case.engine.machines.looking.is_empty());
}

#[test]
fn a_device_that_was_taken_out_of_a_domain_or_put_into_it_is_said() {
    let mut case = Case::new();
    case.hint(Hint::Libvirt(Notice::Connected(FACTS)));
    let seen = |case: &Case, devices: &str| {
        let Hint::Looked(machine, look) = case.runs_with(EPOCH) else { panic!("a look") };
        let Look::Running(Running { domain, process }) = *look else { panic!("it runs") };
        let domain = Domain { xml: domain.xml.replace(HOSTDEV, devices), ..domain };
        Hint::Looked(machine, Box::new(Look::Running(Running { domain, process })))
    };
    let without = seen(&case, "");
    assert_eq!(case.hint(without), (MachineState::Running, "0000:41:00.0 was taken out of its domain".into()));
    let with = seen(&case, &format!("{HOSTDEV}{}", HOSTDEV.replace("0x41", "0x42")));
    assert_eq!(case.hint(with), (MachineState::Running, "0000:42:00.0 was put into its domain without a claim".into()));
    let again = seen(&case, HOSTDEV);
    assert_eq!(case.hint(again), (MachineState::Running, String::new()));
}

#[test]
fn an_agent_that_was_heard_is_missed_until_the_guest_reboots() {
    let mut case = Case::new();
    case.hint(Hint::Libvirt(Notice::Connected(FACTS)));
    let guest = |case: &mut Case, state: &str| {
        let Hint::Looked(machine, look) = case.runs_with(EPOCH) else { panic!("a look") };
        let Look::Running(Running { domain, process }) = *look else { panic!("it runs") };
        let channel = format!("<channel><target type='virtio' name='org.qemu.guest_agent.0' state='{state}'/></channel></devices>");
        let domain = Domain { xml: domain.xml.replace("</devices>", &channel), ..domain };
        case.hint(Hint::Looked(machine, Box::new(Look::Running(Running { domain, process }))));
        let view = views(&case.engine).remove(&case.machine).unwrap();
        (view.guest_state, view.reboots)
    };
    assert_eq!(guest(&mut case, "disconnected"), ("started", 0));
    assert_eq!(guest(&mut case, "connected"), ("agent-connected", 0));
    assert_eq!(guest(&mut case, "disconnected"), ("agent-lost", 0));
    case.hint(Hint::Libvirt(Notice::Rebooted(case.machine.0)));
    assert_eq!(guest(&mut case, "disconnected"), ("started", 1));
}
