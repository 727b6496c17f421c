//! Machines in the engine: what their jobs mean for the ledger, and what hints from outside lead to.
//!
//! The ledger's state of a machine is what was decided or seen last. Nothing here asks libvirt: a hint starts a look in a thread of
//! its own, and its result comes back as another hint. A machine that was not looked at since libvirt could be asked is `unknown`.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::Duration;

use vfio::{Function, PciAddress};

use super::jobs::{Concern, Work};
use super::worker::Outcome;
use super::{Engine, Message, external, reboot};
use crate::failure::Failure;
use crate::id::{ClaimId, JobId, MachineId};
use crate::ledger::{ClaimRecord, Standing};
use crate::libvirt::{Given, HostFacts, Libvirt, Notice, Source, agent_is_connected, given, hostdevs};
use crate::machine::{Look, Metadata, Process, Running, Subject, Watch};
use crate::preflight::Case;
use crate::request::{Planned, Request, Submission};
use crate::spec::Hold;
use crate::view::MachineState;

mod admit;
mod console;
mod place;
mod preflight;
mod view;
mod work;

pub(super) use admit::choose;
pub(super) use console::open_console;
pub(super) use view::views;
pub(super) use work::{Finish, finish_of, made};

/// What machines need.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Where libvirt is.
    pub hypervisor: Hypervisor,
}

/// Where libvirt is.
#[derive(Clone, Debug, Default)]
pub enum Hypervisor {
    /// There is none: machines are unknown and cannot be started.
    #[default]
    None,
    /// Where the configuration says.
    Configured,
    /// Here, whatever the configuration says.
    At(Source),
}

/// What the engine keeps of machines beside the ledger.
#[derive(Debug, Default)]
pub struct Machines {
    libvirt: Option<Libvirt>,
    watch: Option<Watch>,
    /// What libvirt said of the host; `None` while it cannot be asked.
    facts: Option<HostFacts>,
    /// Why it cannot be asked.
    lost: String,
    seen: BTreeMap<MachineId, Seen>,
    errors: BTreeMap<MachineId, Failure>,
    /// Looks under way, and whether to look again after them.
    looking: BTreeMap<MachineId, bool>,
    /// Machines that are looked at again by themselves after a while.
    waiting: BTreeSet<MachineId>,
    /// Machines whose console somebody has open.
    consoles: BTreeSet<MachineId>,
    /// Devices that domains of others have, by the domain's name.
    foreign: BTreeMap<PciAddress, String>,
    /// Whether domains are being listed, and whether to list them again after that.
    listing: Option<bool>,
}

/// What was seen of a machine.
#[derive(Debug, Default)]
struct Seen {
    process: Option<Process>,
    xml: String,
    /// Since libvirt could be asked.
    fresh: bool,
    /// Why it is not as it was left, for a person.
    note: String,
    /// The devices that its domain has.
    given: Vec<Given>,
    /// What is not as gpuward made it although it runs, for a person.
    odd: String,
    /// What is known of its guest.
    guest: Guest,
    /// Looks in a row that could not tell.
    tries: u32,
}

/// What is known of a guest from outside.
#[derive(Clone, Debug, Default)]
struct Guest {
    /// Its agent listens.
    agent: bool,
    /// Its agent has listened since it last booted.
    was_heard: bool,
    /// It put itself to sleep.
    asleep: bool,
    /// How often it was reset since this daemon saw it first.
    reboots: u32,
}

/// Something happened to machines: look at them again.
#[derive(Debug)]
pub enum Hint {
    /// From libvirt.
    Libvirt(Notice),
    /// The process of a machine ended.
    Ended(MachineId),
    /// It is time to look at a machine again.
    Due(MachineId),
    /// A job started its domain.
    Started(MachineId, Box<Running>),
    /// The session on a machine's console is over.
    ConsoleClosed(MachineId),
    /// A machine was looked at.
    Looked(MachineId, Box<Look>),
    /// Domains of others were listed.
    Foreign(Option<BTreeMap<PciAddress, String>>),
}

/// Before the next look at a machine that comes or ends slowly.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// Doublings of that time where it cannot be told: four minutes at most.
const MOST_DOUBLINGS: u32 = 7;

/// Starts to listen to libvirt and to processes.
pub(super) fn start(engine: &mut Engine) {
    let source = match &engine.options.machines.hypervisor {
        Hypervisor::None => return,
        Hypervisor::Configured => Source::Uri(engine.config.libvirt.uri.clone()),
        Hypervisor::At(source) => source.clone(),
    };
    let (inbox, ends) = (engine.inbox.clone(), engine.inbox.clone());
    engine.machines.lost = "not connected yet".into();
    engine.machines.libvirt = Some(Libvirt::start(source, std::sync::Arc::new(move |notice| tell(&inbox, Hint::Libvirt(notice)))));
    match Watch::start(Box::new(move |machine| tell(&ends, Hint::Ended(machine)))) {
        Ok(watch) => engine.machines.watch = Some(watch),
        Err(error) => tracing::error!("the end of machines' processes will be noticed late: {error}"),
    }
}

fn tell(inbox: &std::sync::mpsc::Sender<Message>, hint: Hint) {
    if inbox.send(Message::Machines(hint)).is_err() {
        tracing::debug!("a hint came after the engine had stopped");
    }
}

/// Whether a request may become a job, and what that is about.
pub(super) fn admit(engine: &mut Engine, submission: &Submission) -> Result<Concern, Failure> {
    admit::admit(engine, &submission.request)
}

/// Thinks a start through, for a pre-flight.
pub(super) fn case(engine: &mut Engine, planned: Planned) -> Result<Case, Failure> {
    preflight::case(engine, planned)
}

/// Records what is about to happen and gives what is to run.
pub(super) fn begin(engine: &mut Engine, job: JobId, request: Request) -> Result<Work, Failure> {
    work::begin(engine, job, request)
}

/// A job ended, of any kind.
pub(super) fn ended(engine: &mut Engine, job: JobId, outcome: &Outcome) {
    if Some(job) == engine.recovery {
        look_at_all(engine);
        return;
    }
    let Some(machine) = engine.jobs.0.get(&job).and_then(|job| job.view.machine) else { return };
    if let Some(error) = &outcome.error {
        engine.machines.errors.insert(machine, error.clone());
    }
    // Hints that came while the job ran were its business.
    look_at(engine, machine, Duration::ZERO);
}

/// Something happened outside.
pub(super) fn hint(engine: &mut Engine, hint: Hint) {
    match hint {
        Hint::Libvirt(Notice::Connected(facts)) => {
            engine.machines.facts = Some(facts);
            list_foreign(engine);
            look_at_all(engine);
            external::look_at_all(engine);
        }
        Hint::Libvirt(Notice::Lost { reason }) => {
            engine.machines.facts = None;
            engine.machines.lost = reason;
            engine.machines.seen.values_mut().for_each(|seen| seen.fresh = false);
        }
        Hint::Libvirt(Notice::Changed(uuid)) => {
            let machine = MachineId(uuid);
            if engine.ledger.machines.contains_key(&machine) {
                look_at(engine, machine, Duration::ZERO);
            } else {
                list_foreign(engine);
                external::domain_changed(engine, uuid);
            }
        }
        Hint::Libvirt(Notice::Rebooted(uuid)) => note_reboot(engine, MachineId(uuid)),
        Hint::ConsoleClosed(machine) => drop(engine.machines.consoles.remove(&machine)),
        Hint::Ended(machine) => look_at(engine, machine, Duration::ZERO),
        Hint::Due(machine) => {
            engine.machines.waiting.remove(&machine);
            look_at(engine, machine, Duration::ZERO);
        }
        Hint::Started(machine, running) => note_running(engine, machine, *running),
        Hint::Looked(machine, look) => looked(engine, machine, *look),
        Hint::Foreign(found) => note_foreign(engine, found),
    }
    engine.publish();
}

/// Looks at every machine.
pub(super) fn look_at_all(engine: &mut Engine) {
    let machines: Vec<_> = engine.ledger.machines.keys().copied().collect();
    machines.into_iter().for_each(|machine| look_at(engine, machine, Duration::ZERO));
}

// One look at a machine at a time; what is hinted at meanwhile leads to one more.
fn look_at(engine: &mut Engine, machine: MachineId, after: Duration) {
    if engine.machines.facts.is_none() || !engine.recovered || !engine.ledger.machines.contains_key(&machine) {
        return;
    }
    if after > Duration::ZERO {
        return look_later(engine, machine, after);
    }
    if let Some(again) = engine.machines.looking.get_mut(&machine) {
        *again = true;
        return;
    }
    let Some(subject) = subject(engine, machine) else { return };
    let inbox = engine.inbox.clone();
    let look = move || tell(&inbox, Hint::Looked(machine, Box::new(subject.look())));
    match thread::Builder::new().name("look".into()).spawn(look) {
        Ok(_) => drop(engine.machines.looking.insert(machine, false)),
        Err(error) => tracing::error!("cannot look at machine {}: {error}", machine.0),
    }
}

// What is looked at is chosen when the time has come, and a hint until then is not kept waiting.
fn look_later(engine: &mut Engine, machine: MachineId, after: Duration) {
    if !engine.machines.waiting.insert(machine) {
        return;
    }
    let inbox = engine.inbox.clone();
    let wait = move || {
        thread::sleep(after);
        tell(&inbox, Hint::Due(machine));
    };
    if let Err(error) = thread::Builder::new().name("look-later".into()).spawn(wait) {
        engine.machines.waiting.remove(&machine);
        tracing::error!("cannot look at machine {} again: {error}", machine.0);
    }
}

/// What a worker or a look needs to know; `None` without a hypervisor.
fn subject(engine: &Engine, machine: MachineId) -> Option<Subject> {
    let devices = claims_of(engine, machine).flat_map(|(_, claim)| &claim.devices);
    let devices: Vec<Function> = devices.filter_map(|device| engine.inventory.devices.get(device)).cloned().collect();
    Some(Subject {
        host: engine.options.host.clone(),
        libvirt: engine.machines.libvirt.clone()?,
        uuid: machine.0,
        devices,
        process: engine.machines.seen.get(&machine).and_then(|seen| seen.process.clone()),
    })
}

fn claims_of(engine: &Engine, machine: MachineId) -> impl Iterator<Item = (ClaimId, &ClaimRecord)> {
    engine.ledger.claims.iter().filter(move |(_, claim)| claim.machine == Some(machine)).map(|(id, claim)| (*id, claim))
}

fn looked(engine: &mut Engine, machine: MachineId, look: Look) {
    let again = engine.machines.looking.remove(&machine) == Some(true);
    let in_hand = engine.jobs.on_machine(machine).is_some();
    // Something happened since this look began: what it saw may be of an earlier run.
    if again && !in_hand {
        return look_at(engine, machine, Duration::ZERO);
    }
    let after = match look {
        _ if in_hand => None,
        Look::Running(running) => adopt(engine, machine, running),
        Look::Gone => {
            gone(engine, machine);
            None
        }
        Look::Ending { why } => {
            note(engine, machine, true, why);
            Some(LOOK_AGAIN)
        }
        Look::Unknown(failure) => {
            let tries = note(engine, machine, false, failure.message);
            Some(LOOK_AGAIN * (1 << tries.min(MOST_DOUBLINGS)))
        }
    };
    if let Some(after) = after {
        look_at(engine, machine, after);
    }
}

fn note(engine: &mut Engine, machine: MachineId, fresh: bool, text: String) -> u32 {
    let seen = engine.machines.seen.entry(machine).or_default();
    let tries = if fresh { 0 } else { seen.tries };
    seen.fresh = fresh;
    seen.note = text;
    seen.tries = tries + 1;
    tries
}

// A domain is ours by its UUID, and by metadata that names the machine and the very claims that the ledger has.
fn adopt(engine: &mut Engine, machine: MachineId, running: Running) -> Option<Duration> {
    let ours: BTreeMap<ClaimId, u64> = claims_of(engine, machine).map(|(id, claim)| (id, claim.epoch)).collect();
    let theirs = Metadata::read(&running.domain.xml);
    if theirs.as_ref().is_some_and(|theirs| theirs.machine == machine && theirs.claims == ours) {
        // Without its process it is about to come or to go.
        let after = running.process.is_none().then_some(LOOK_AGAIN);
        note_running(engine, machine, running);
        return after;
    }
    let text = match theirs {
        None => "a domain with its UUID runs that gpuward did not start",
        Some(_) => "its domain runs with claims that gpuward does not have any more",
    };
    tracing::error!("machine {}: {text}", machine.0);
    note(engine, machine, false, text.to_owned());
    None
}

fn note_running(engine: &mut Engine, machine: MachineId, running: Running) {
    let Running { domain, process } = running;
    let state = if domain.paused { MachineState::Paused } else { MachineState::Running };
    if let (Some(watch), Some(process)) = (&engine.machines.watch, &process) {
        watch.add(machine, process);
    }
    let before = engine.machines.seen.remove(&machine).unwrap_or_default();
    let agent = agent_is_connected(&domain.xml);
    let guest = Guest { agent, was_heard: agent || before.guest.was_heard, asleep: domain.asleep, ..before.guest };
    let given = given(&domain.xml);
    let odd = oddities(engine, machine, &domain.xml);
    if !odd.is_empty() && odd != before.odd {
        tracing::error!("machine {}: {odd}", machine.0);
    }
    let seen = Seen { process: process.or(before.process), xml: domain.xml, fresh: true, given, odd, guest, ..Seen::default() };
    engine.machines.seen.insert(machine, seen);
    // A job in hand says itself what the machine is.
    if engine.jobs.on_machine(machine).is_none() {
        set_state(engine, machine, state);
    }
}

// Hot-plug asks no hook: somebody with libvirt's rights can give a domain a device, and take one from it.
fn oddities(engine: &Engine, machine: MachineId, xml: &str) -> String {
    let Ok(present) = hostdevs(xml) else { return "its domain's XML cannot be read".into() };
    let claimed: BTreeSet<PciAddress> = claims_of(engine, machine).flat_map(|(_, claim)| claim.devices.iter().copied()).collect();
    let taken = claimed.iter().filter(|device| !present.contains(device)).map(|device| format!("{device} was taken out of its domain"));
    let added =
        present.iter().filter(|device| !claimed.contains(device)).map(|device| format!("{device} was put into its domain without a claim"));
    taken.chain(added).collect::<Vec<_>>().join("; ")
}

// Whatever agent was heard before is gone with the system that ran it.
fn note_reboot(engine: &mut Engine, machine: MachineId) {
    if let Some(seen) = engine.machines.seen.get_mut(&machine) {
        seen.guest.was_heard = false;
        seen.guest.reboots += 1;
    }
    look_at(engine, machine, Duration::ZERO);
}

fn set_state(engine: &mut Engine, machine: MachineId, state: MachineState) {
    if engine.ledger.machines.get(&machine).is_none_or(|record| record.state == state) {
        return;
    }
    let committed = engine.commit(|ledger| {
        if let Some(record) = ledger.machines.get_mut(&machine) {
            record.state = state;
            record.reason.clear();
        }
    });
    if let Err(failure) = committed {
        tracing::error!("cannot record that machine {} is {state:?}: {}", machine.0, failure.message);
    }
}

// By all three conditions. What is left in the ledger of it is cleaned up by a job of the daemon's own.
fn gone(engine: &mut Engine, machine: MachineId) {
    // Guests are stopped while the host shuts down: the next boot cleans up after them, in its own way.
    if engine.host_stops() || claims_of(engine, machine).any(|(id, claim)| reboot::awaits(engine, id, claim)) {
        return;
    }
    let Some(record) = engine.ledger.machines.get(&machine) else { return };
    let releases = |claim: &ClaimRecord| record.spec.hold == Hold::Running || claim.standing == Standing::Releasing;
    let is_clean = is_down(record.state) && !claims_of(engine, machine).any(|(_, claim)| releases(claim));
    if is_clean {
        forget_process(engine, machine);
        return;
    }
    if let Err(failure) = work::begin_end(engine, machine) {
        tracing::error!("cannot clean up after machine {}: {}", machine.0, failure.message);
    }
}

/// The process of a machine is of no interest any more.
fn forget_process(engine: &mut Engine, machine: MachineId) {
    engine.machines.seen.remove(&machine);
    if let Some(watch) = &engine.machines.watch {
        watch.remove(machine);
    }
}

fn list_foreign(engine: &mut Engine) {
    if let Some(again) = &mut engine.machines.listing {
        *again = true;
        return;
    }
    let Some(libvirt) = engine.machines.libvirt.clone() else { return };
    let ours: BTreeSet<_> = engine.ledger.machines.keys().map(|machine| machine.0).collect();
    let inbox = engine.inbox.clone();
    let list = move || {
        let domains = libvirt.active().map_err(|error| tracing::warn!("cannot list others' domains: {error}"));
        let others = domains.map(|domains| domains.into_iter().filter(|domain| !ours.contains(&domain.uuid)));
        let devices = others.map(|others| {
            let devices = others.flat_map(|domain| {
                let devices = hostdevs(&domain.xml).unwrap_or_default();
                devices.into_iter().map(move |device| (device, domain.name.clone()))
            });
            devices.collect()
        });
        tell(&inbox, Hint::Foreign(devices.ok()));
    };
    match thread::Builder::new().name("list-domains".into()).spawn(list) {
        Ok(_) => engine.machines.listing = Some(false),
        Err(error) => tracing::error!("cannot list others' domains: {error}"),
    }
}

fn note_foreign(engine: &mut Engine, found: Option<BTreeMap<PciAddress, String>>) {
    let again = engine.machines.listing.take() == Some(true);
    if let Some(found) = found {
        engine.machines.foreign = found;
    }
    if again {
        list_foreign(engine);
    }
}

/// The hypervisor, where there is one.
pub(super) fn libvirt(engine: &Engine) -> Option<Libvirt> {
    engine.machines.libvirt.clone()
}

/// Devices that domains of others have, by the domain's name.
pub(super) fn foreign_domains(engine: &Engine) -> BTreeMap<PciAddress, String> {
    engine.machines.foreign.clone()
}

/// Whether a domain of another manager has a device.
pub(super) fn is_in_a_domain(engine: &Engine, device: PciAddress) -> bool {
    engine.machines.foreign.contains_key(&device)
}

/// Whether a machine's domain runs.
pub(super) fn runs(engine: &Engine, machine: MachineId) -> bool {
    engine.ledger.machines.get(&machine).is_some_and(|record| match record.state {
        MachineState::Running | MachineState::Paused | MachineState::Stopping => true,
        MachineState::Off | MachineState::Preparing | MachineState::Starting | MachineState::Failed | MachineState::Unknown => false,
    })
}

/// Whether nothing of it runs.
fn is_down(state: MachineState) -> bool {
    match state {
        MachineState::Off | MachineState::Failed => true,
        MachineState::Preparing
        | MachineState::Starting
        | MachineState::Running
        | MachineState::Paused
        | MachineState::Stopping
        | MachineState::Unknown => false,
    }
}

#[cfg(test)]
mod tests;
