//! Claims of managers that run their own domains: made and ended here, used elsewhere.
//!
//! The ledger says when such a claim ends. What libvirt, the bus and the clock tell are hints that lead to a look, in a thread of its
//! own. A claim ends when nobody holds its devices; until then it is looked at again, more and more seldom. Nobody is killed.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::{Duration, Instant};

use uuid::Uuid;
use vfio::Function;

use super::worker::Outcome;
use super::{Engine, Message, machines, now, reboot};
use crate::id::{ClaimId, JobId};
use crate::ledger::{ClaimRecord, ReleaseOn, Standing, Terms};

mod look;
mod work;

use look::{Look, Subject};
pub(super) use work::{admit_claim, admit_release, begin_claim, begin_release};

/// What the engine keeps of these claims beside the ledger.
#[derive(Debug, Default)]
pub struct External {
    /// Clients that have left the bus.
    left: BTreeSet<String>,
    /// Looks under way, and whether to look again after them.
    looking: BTreeMap<ClaimId, bool>,
    /// Claims that would end if nothing were in the way.
    waiting: BTreeMap<ClaimId, Waiting>,
}

/// A claim that is looked at again.
#[derive(Debug)]
struct Waiting {
    /// When.
    at: Instant,
    /// Looks in a row that it was in the way of.
    tries: u32,
    /// What is in the way, for a person.
    why: String,
    /// Its domain was gone when it was looked at last.
    gone: bool,
}

/// Something happened to such claims: look at them again.
#[derive(Debug)]
pub enum Hint {
    /// A client has left the bus.
    ClientLeft(String),
    /// It is time to look at some again.
    Time,
    /// A claim was looked at.
    Looked(ClaimId, Look),
}

/// Before the second look at a claim that is to end; each later one takes twice as long to come.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Doublings of that time: about a minute at most.
const MOST_DOUBLINGS: u32 = 6;
/// The longest sleep until a claim's time is over: the clock may be set meanwhile.
const LONGEST_SLEEP: Duration = Duration::from_secs(15 * 60);

/// Something happened outside.
pub(super) fn hint(engine: &mut Engine, hint: Hint) {
    match hint {
        Hint::ClientLeft(client) => {
            let claims = claims_with(engine, |terms| terms.client == client);
            // Of those that left before only who still has a claim: of any other the bus would tell again.
            let is_named = |client: &String| engine.ledger.claims.values().any(|claim| claim.is_of_client(client));
            engine.external.left.retain(is_named);
            engine.external.left.insert(client);
            claims.into_iter().for_each(|claim| look_at(engine, claim));
        }
        Hint::Time => look_at_those_due(engine),
        Hint::Looked(claim, look) => looked(engine, claim, look),
    }
    engine.publish();
}

/// A domain that is no machine of ours changed.
pub(super) fn domain_changed(engine: &mut Engine, domain: Uuid) {
    let claims: Vec<_> = engine.ledger.claims.iter().filter(|(_, claim)| claim.domain == domain).map(|(id, _)| *id).collect();
    claims.into_iter().for_each(|claim| look_at(engine, claim));
}

/// Looks at every claim that could end.
pub(super) fn look_at_all(engine: &mut Engine) {
    claims_with(engine, |_| true).into_iter().for_each(|claim| look_at(engine, claim));
}

/// A job ended, of any kind.
pub(super) fn ended(engine: &mut Engine, job: JobId, outcome: &Outcome) {
    if Some(job) == engine.recovery {
        return look_at_all(engine);
    }
    let devices = engine.jobs.0.get(&job).map(|job| job.view.devices.clone()).unwrap_or_default();
    let claims: BTreeSet<_> = devices.iter().filter_map(|device| engine.ledger.claim_on(*device)).map(|(id, _)| id).collect();
    for claim in claims {
        match &outcome.error {
            // What could not be done now is not tried again at once.
            Some(error) if engine.ledger.claims.get(&claim).is_some_and(|claim| claim.standing == Standing::Releasing) => {
                wait(engine, claim, error.message.clone());
            }
            Some(_) | None => look_at(engine, claim),
        }
    }
}

/// How long the engine may sleep until a claim wants to be looked at; `None` while none does.
pub(super) fn next_look(engine: &Engine) -> Option<Duration> {
    if !engine.recovered || engine.host_stops() {
        return None;
    }
    let (moment, seconds) = (Instant::now(), now());
    let until = |(id, claim): (&ClaimId, &ClaimRecord)| {
        let expires = claim.terms.as_ref()?.expires;
        let sleep = match engine.external.waiting.get(id) {
            Some(waiting) => waiting.at.saturating_duration_since(moment),
            None if expires > 0 => Duration::from_secs(expires.saturating_sub(seconds)).min(LONGEST_SLEEP),
            None => return None,
        };
        is_idle(engine, *id, claim).then_some(sleep)
    };
    engine.ledger.claims.iter().filter_map(until).min()
}

/// What stands in the way of a claim's end, for a person; `None` for a claim that is not about to end.
pub(super) fn in_the_way(engine: &Engine, claim: ClaimId) -> Option<&str> {
    engine.external.waiting.get(&claim).map(|waiting| waiting.why.as_str())
}

fn claims_with(engine: &Engine, holds: impl Fn(&Terms) -> bool) -> Vec<ClaimId> {
    let claims = engine.ledger.claims.iter().filter(|(_, claim)| claim.terms.as_ref().is_some_and(&holds));
    claims.map(|(id, _)| *id).collect()
}

/// Whether a claim may be looked at now: neither a job nor a look has it in hand.
fn is_idle(engine: &Engine, id: ClaimId, claim: &ClaimRecord) -> bool {
    let is_busy = claim.devices.iter().any(|device| engine.jobs.on_device(*device).is_some());
    claim.standing != Standing::Pending && !is_busy && !reboot::awaits(engine, id, claim) && !engine.external.looking.contains_key(&id)
}

/// Whether a claim is to end as soon as nobody holds its devices.
fn is_due(engine: &Engine, claim: &ClaimRecord) -> bool {
    let Some(terms) = &claim.terms else { return false };
    let client_left = terms.release == ReleaseOn::ClientGone && engine.external.left.contains(&terms.client);
    let is_over = terms.expires > 0 && terms.expires <= now();
    claim.standing == Standing::Releasing || client_left || is_over
}

fn look_at_those_due(engine: &mut Engine) {
    let moment = Instant::now();
    let is_time = |id: &ClaimId, claim: &ClaimRecord| match engine.external.waiting.get(id) {
        Some(waiting) => waiting.at <= moment,
        None => is_due(engine, claim),
    };
    let due: Vec<_> = engine.ledger.claims.iter().filter(|(id, claim)| is_time(id, claim)).map(|(id, _)| *id).collect();
    due.into_iter().for_each(|claim| look_at(engine, claim));
}

// One look at a claim at a time; what is hinted at meanwhile leads to one more.
fn look_at(engine: &mut Engine, id: ClaimId) {
    if let Some(again) = engine.external.looking.get_mut(&id) {
        *again = true;
        return;
    }
    let Some(claim) = engine.ledger.claims.get(&id).filter(|claim| engine.recovered && is_idle(engine, id, claim)) else { return };
    let Some(terms) = &claim.terms else { return };
    if terms.release != ReleaseOn::DomainStopped && !is_due(engine, claim) {
        return;
    }
    let (subject, inbox) = (subject(engine, claim), engine.inbox.clone());
    let look = move || {
        if inbox.send(Message::Claims(Hint::Looked(id, subject.look()))).is_err() {
            tracing::debug!("a look at a claim ended after the engine");
        }
    };
    match thread::Builder::new().name("look-claim".into()).spawn(look) {
        Ok(_) => drop(engine.external.looking.insert(id, false)),
        Err(error) => wait(engine, id, format!("it cannot be looked at: {error}")),
    }
}

fn subject(engine: &Engine, claim: &ClaimRecord) -> Subject {
    let functions = claim.devices.iter().filter_map(|device| engine.inventory.devices.get(device));
    // What sits at its address now may be another device, and somebody else's.
    let ours: Vec<Function> = functions.filter(|function| engine.ledger.record_of(function).is_some()).cloned().collect();
    Subject { host: engine.options.host.clone(), libvirt: machines::libvirt(engine), domain: claim.domain, devices: ours }
}

fn looked(engine: &mut Engine, id: ClaimId, look: Look) {
    let again = engine.external.looking.remove(&id) == Some(true);
    let Some(claim) = engine.ledger.claims.get(&id) else {
        engine.external.waiting.remove(&id);
        return;
    };
    if !is_idle(engine, id, claim) {
        return;
    }
    // Something happened since this look began.
    if again {
        return look_at(engine, id);
    }
    let is_due = is_due(engine, claim);
    let was_running = claim.terms.as_ref().is_some_and(|terms| terms.was_running);
    match look {
        Look::Runs { name } if is_due => wait(engine, id, format!("the domain {name} runs")),
        Look::Runs { .. } => note_running(engine, id),
        Look::Held { why } if is_due || was_running => wait(engine, id, why),
        Look::Unknown(failure) if is_due || was_running => wait(engine, id, failure.message),
        Look::Gone if is_due => end(engine, id),
        Look::Gone if was_running => gone(engine, id),
        Look::Held { .. } | Look::Unknown(_) | Look::Gone => drop(engine.external.waiting.remove(&id)),
    }
}

fn note_running(engine: &mut Engine, id: ClaimId) {
    engine.external.waiting.remove(&id);
    if engine.ledger.claims.get(&id).and_then(|claim| claim.terms.as_ref()).is_none_or(|terms| terms.was_running) {
        return;
    }
    let noted = engine.commit(|ledger| {
        if let Some(terms) = ledger.claims.get_mut(&id).and_then(|claim| claim.terms.as_mut()) {
            terms.was_running = true;
        }
    });
    if let Err(failure) = noted {
        tracing::error!("cannot record that the domain of claim {id} runs: {}", failure.message);
    }
}

// libvirt makes the QEMU of a TDX guest anew when it reboots (since 11.6): for a moment there is none.
fn gone(engine: &mut Engine, id: ClaimId) {
    if engine.external.waiting.get(&id).is_some_and(|waiting| waiting.gone) {
        return end(engine, id);
    }
    let waiting = Waiting { at: Instant::now() + LOOK_AGAIN, tries: 0, why: "its domain has stopped".into(), gone: true };
    engine.external.waiting.insert(id, waiting);
}

fn end(engine: &mut Engine, id: ClaimId) {
    engine.external.waiting.remove(&id);
    if engine.host_stops() {
        return;
    }
    if let Err(failure) = work::begin_end(engine, id) {
        wait(engine, id, failure.message);
    }
}

// A claim that is to end is not to be used any more: the hook hears that with the entry in the ledger.
fn wait(engine: &mut Engine, id: ClaimId, why: String) {
    let tries = engine.external.waiting.get(&id).map_or(0, |waiting| waiting.tries);
    let at = Instant::now() + LOOK_AGAIN * (1 << tries.min(MOST_DOUBLINGS));
    engine.external.waiting.insert(id, Waiting { at, tries: tries + 1, why, gone: false });
    let begins = engine.ledger.claims.get(&id).is_some_and(|claim| claim.standing == Standing::Active && is_due(engine, claim));
    if !begins {
        return;
    }
    let recorded = engine.commit(|ledger| {
        if let Some(claim) = ledger.claims.get_mut(&id) {
            claim.standing = Standing::Releasing;
        }
    });
    if let Err(failure) = recorded {
        tracing::error!("cannot record that claim {id} is to end: {}", failure.message);
    }
}
