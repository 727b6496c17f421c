//! What a move of bundles between host and pool means for the ledger: before it, after it, and after it was undone.

use std::collections::BTreeMap;

use vfio::{Binding, Host, Inventory, PciAddress};

use super::{DeviceRecord, Ledger, Quarantine, Standing};
use crate::plan::{self, Move, Side};

/// What devices are bound to now, as read.
pub type Bindings = BTreeMap<PciAddress, Binding>;

/// Reads what devices are bound to now. One that has left or cannot be read is left out.
pub fn bindings(host: &Host, devices: impl IntoIterator<Item = PciAddress>) -> Bindings {
    devices.into_iter().filter_map(|device| Some((device, Binding::read(host, device).ok()??))).collect()
}

impl Ledger {
    /// Bundles are about to move. What a device had before is recorded once, when it is first taken.
    pub fn begin_moves(&mut self, moves: &[Move], inventory: &Inventory) {
        for (to, device) in each(moves) {
            match (to, self.devices.get_mut(&device)) {
                (Side::Pool, Some(record)) => record.standing = Standing::Pending,
                (Side::Host, Some(record)) => record.standing = Standing::Releasing,
                (Side::Pool, None) => {
                    let taken = inventory.devices.get(&device).map(|function| DeviceRecord {
                        identity: function.identity.clone(),
                        standing: Standing::Pending,
                        original: plan::original(function),
                    });
                    self.devices.extend(taken.map(|record| (device, record)));
                }
                (Side::Host, None) => {}
            }
        }
    }

    /// Bundles have moved.
    pub fn finish_moves(&mut self, moves: &[Move]) {
        for (to, device) in each(moves) {
            match to {
                Side::Pool => self.stand(device, Standing::Active),
                Side::Host => drop(self.devices.remove(&device)),
            }
        }
    }

    /// Bundles were moved back.
    pub fn undo_moves(&mut self, moves: &[Move], now: &Bindings) {
        for (to, device) in each(moves) {
            match to {
                Side::Pool => self.settle(device, now),
                Side::Host => self.stand(device, Standing::Active),
            }
        }
    }

    /// A device that was being taken is ours only as far as it has not what it had before.
    pub fn settle(&mut self, device: PciAddress, now: &Bindings) {
        let Some(record) = self.devices.get_mut(&device) else { return };
        match now.get(&device) {
            Some(binding) if *binding != record.original.binding => record.standing = Standing::Active,
            Some(_) | None => drop(self.devices.remove(&device)),
        }
    }

    /// Keeps devices out of every plan.
    pub fn quarantine(&mut self, devices: &[PciAddress], reason: &str, (since, stuck): (u64, bool)) {
        for device in devices {
            let Some(record) = self.devices.get(device) else { continue };
            let quarantine = Quarantine { identity: record.identity.clone(), reason: reason.into(), since, stuck };
            self.quarantines.insert(*device, quarantine);
        }
    }

    /// Devices that sit elsewhere now keep their records, claims and quarantines: they follow by identity.
    ///
    /// A device that is not on the host keeps its last address, unless another device of ours sits there now.
    pub fn follow(&mut self, inventory: &Inventory) {
        let identities = self.devices.iter().map(|(address, record)| (*address, &record.identity));
        let identities = identities.chain(self.quarantines.iter().map(|(address, quarantine)| (*address, &quarantine.identity)));
        let moved = identities.filter_map(|(address, identity)| {
            let is_there = inventory.devices.get(&address).is_some_and(|function| identity.matches(&function.identity));
            let found = inventory.devices.values().find(|function| identity.matches(&function.identity));
            Some((address, found.filter(|_| !is_there)?.address))
        });
        let moved: BTreeMap<_, _> = moved.collect();
        if moved.is_empty() {
            return;
        }
        let now = |address: PciAddress| moved.get(&address).copied().unwrap_or(address);
        rekey(&mut self.devices, now);
        rekey(&mut self.quarantines, now);
        for claim in self.claims.values_mut() {
            claim.devices.iter_mut().for_each(|device| *device = now(*device));
        }
    }

    fn stand(&mut self, device: PciAddress, standing: Standing) {
        if let Some(record) = self.devices.get_mut(&device) {
            record.standing = standing;
        }
    }
}

fn each(moves: &[Move]) -> impl Iterator<Item = (Side, PciAddress)> {
    moves.iter().flat_map(|bundle| bundle.devices.iter().map(|device| (bundle.to, *device)))
}

// Those that stay come first: one that moved to their address is the one that is there.
fn rekey<T>(records: &mut BTreeMap<PciAddress, T>, now: impl Fn(PciAddress) -> PciAddress) {
    let (moved, stay): (Vec<_>, Vec<_>) = std::mem::take(records).into_iter().partition(|(address, _)| now(*address) != *address);
    records.extend(stay);
    records.extend(moved.into_iter().map(|(address, record)| (now(address), record)));
}
