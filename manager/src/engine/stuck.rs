//! Stores that have not returned: what is refused while they live, and what is said when they end after all.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use vfio::{Host, Identity, LateStore, PciAddress, StuckStore};

use super::{Engine, Message};
use crate::failure::{ErrorKind, Failure};
use crate::history::{self, Entry, Kind};
use crate::view::{EventKind, Subject};

/// A store into one of `devices` that has not returned, of this daemon or an earlier one.
pub(super) fn stuck_in(host: &Host, devices: &[PciAddress]) -> Option<StuckStore> {
    let is_about = |store: &StuckStore| store.device().is_some_and(|device| devices.contains(&device));
    host.stuck_stores().into_iter().find(is_about)
}

/// As users meet it.
pub(super) fn failure(store: &StuckStore) -> Failure {
    let what = store.device().map_or_else(|| "the host".to_owned(), |device| device.to_string());
    Failure::new(ErrorKind::Stuck, format!("a store into {what} has not returned: its driver is stuck in the kernel"))
        .because(describe(store))
        .remedy("end what uses the device and wait; where nothing does, restart the host")
}

fn describe(store: &StuckStore) -> String {
    let process = if store.pid == 0 { String::new() } else { format!(" by process {}", store.pid) };
    format!("{:?} into /{}{process}", store.value, store.attribute.display())
}

impl Engine {
    /// Has the end of stores that are stuck told to this thread.
    pub(super) fn hear_of_late_stores(&self) {
        let inbox = self.inbox.clone();
        self.options.host.on_late_store(Arc::new(move |late| {
            if inbox.send(Message::Late(late)).is_err() {
                tracing::warn!("a stuck store returned after the engine had stopped");
            }
        }));
    }

    /// A stuck store has returned: what came of it is observed, recorded and told. The quarantine stays until a person clears it.
    pub(super) fn returned(&mut self, late: &LateStore) {
        self.observe();
        let how = match late.errno {
            Some(0) => "it succeeded".to_owned(),
            Some(errno) => format!("the kernel refused it: {}", io::Error::from_raw_os_error(errno)),
            None => "its answer went to an earlier daemon".to_owned(),
        };
        let Some(device) = late.store.device() else {
            tracing::warn!("{} has returned late: {how}", describe(&late.store));
            return self.publish();
        };
        let driver = self.inventory.devices.get(&device).map(|function| function.driver.as_deref().unwrap_or("no driver").to_owned());
        let now = driver.map_or_else(|| "it is not on the host".to_owned(), |driver| format!("it is bound to {driver} now"));
        let told = format!("{} has returned late: {how}; {now}", describe(&late.store));
        tracing::warn!("{device}: {told}");
        if let Some(identity) = self.identity_of(device) {
            history::append(&self.options.state_dir, &identity, Entry::new(Kind::StuckEnded, &told).with("address", device));
        }
        self.unstick(device, &told);
        let detail = BTreeMap::from([("returned".to_owned(), told)]);
        self.publisher.event(EventKind::Stuck, Subject::Device(device), detail);
        self.publish();
    }

    /// Which device it is, also where it has left or does not answer: then it has no serial number to be read, but the record has.
    pub(super) fn identity_of(&self, device: PciAddress) -> Option<Identity> {
        let seen = self.inventory.devices.get(&device).map(|function| &function.identity);
        let recorded = self.ledger.devices.get(&device).map(|record| &record.identity);
        recorded.filter(|recorded| seen.is_none_or(|seen| recorded.matches(seen))).or(seen).cloned()
    }

    // Its bundle is quarantined still, but nothing is in the way of clearing it.
    fn unstick(&mut self, device: PciAddress, told: &str) {
        let bundle = self.bundle_of(device);
        if !bundle.iter().any(|device| self.ledger.quarantines.contains_key(device)) || stuck_in(&self.options.host, &bundle).is_some() {
            return;
        }
        let recorded = self.commit(|ledger| {
            for quarantine in ledger.quarantines.iter_mut().filter(|(device, _)| bundle.contains(device)).map(|(_, quarantine)| quarantine)
            {
                quarantine.stuck = false;
                quarantine.reason = format!("{}; {told}", quarantine.reason);
            }
        });
        if let Err(failure) = recorded {
            tracing::error!("{device}: {}", failure.message);
        }
    }
}
