//! What a move of bundles between host and pool means for the ledger: before it, after it, and after it was undone.

use std::collections::BTreeMap;

use vfio::{Binding, Host, Inventory, PciAddress};

use super::{DeviceRecord, Ledger, Quarantine, Standing};
use crate::id::ClaimId;
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
        let boot = self.boot.clone();
        for (to, device) in each(moves) {
            match (to, self.devices.get_mut(&device)) {
                (Side::Pool, Some(record)) => {
                    record.again |= record.standing == Standing::Active;
                    (record.standing, record.boot) = (Standing::Pending, boot.clone());
                }
                (Side::Host, Some(record)) => record.standing = Standing::Releasing,
                (Side::Pool, None) => {
                    let taken = inventory.devices.get(&device).map(|function| DeviceRecord {
                        identity: function.identity.clone(),
                        standing: Standing::Pending,
                        boot: boot.clone(),
                        original: plan::original(function),
                        again: false,
                        lent: false,
                    });
                    self.devices.extend(taken.map(|record| (device, record)));
                }
                (Side::Host, None) => {}
            }
        }
    }

    /// Says of devices that are being taken whether that is for another manager.
    pub fn lend(&mut self, devices: &[PciAddress], lent: bool) {
        for device in devices {
            if let Some(record) = self.devices.get_mut(device) {
                record.lent = lent;
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

    /// Devices of these claims were bound again in this boot.
    pub fn restore_claims(&mut self, claims: &[ClaimId]) {
        let boot = &self.boot;
        let restored = self.claims.iter_mut().filter(|(id, _)| claims.contains(id));
        restored.for_each(|(_, claim)| claim.boot.clone_from(boot));
    }

    /// A device that was being taken is ours only as far as it has not what it had before, or as it was ours before.
    pub fn settle(&mut self, device: PciAddress, now: &Bindings) {
        let is_held = self.claim_on(device).is_some_and(|(_, claim)| claim.standing != Standing::Pending);
        let Some(record) = self.devices.get_mut(&device) else { return };
        match now.get(&device) {
            Some(binding) if *binding != record.original.binding => record.standing = Standing::Active,
            // The next start tries again.
            Some(_) | None if is_held || record.again => (record.standing, record.boot) = (Standing::Active, String::new()),
            Some(_) | None => drop(self.devices.remove(&device)),
        }
    }

    /// Keeps devices out of every plan.
    pub fn quarantine(&mut self, devices: &[PciAddress], reason: &str, (since, stuck): (u64, bool)) {
        for device in devices {
            let taken = self.devices.get(device).map(|record| &record.identity);
            let Some(identity) = taken.or_else(|| Some(&self.vfs.get(device)?.identity)).cloned() else { continue };
            let quarantine = Quarantine { identity, reason: reason.into(), since, stuck };
            self.quarantines.insert(*device, quarantine);
        }
    }

    /// Devices that sit elsewhere now keep their records, claims and quarantines: they follow by identity.
    ///
    /// A device that is not on the host keeps its last address, unless another device of ours sits there now.
    pub fn follow(&mut self, inventory: &Inventory) {
        let identities = self.devices.iter().map(|(address, record)| (*address, &record.identity));
        let identities = identities.chain(self.vfs.iter().map(|(address, intent)| (*address, &intent.identity)));
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
        rekey(&mut self.vfs, now);
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

#[cfg(test)]
mod tests {
    use vfio::Kind;

    use super::*;
    use crate::plan::tests::{at, function};

    fn inventory(functions: &[(&str, &str)]) -> Inventory {
        let made = functions.iter().map(|(address, slot)| {
            let mut function = function(address, Kind::Gpu);
            function.identity.slot = (*slot).into();
            (function.address, function)
        });
        Inventory { devices: made.collect(), ..Inventory::default() }
    }

    fn taken(inventory: &Inventory) -> Ledger {
        let mut ledger = Ledger::default();
        let devices = inventory.devices.keys().copied().collect();
        ledger.begin_moves(&[Move { to: Side::Pool, devices }], inventory);
        ledger
    }

    fn slots(ledger: &Ledger) -> Vec<(String, &str)> {
        ledger.devices.iter().map(|(address, record)| (address.to_string(), record.identity.slot.as_str())).collect()
    }

    #[test]
    fn p26_records_follow_their_devices_when_cards_renumber() {
        let mut ledger = taken(&inventory(&[("0000:41:00.0", "a"), ("0000:42:00.0", "b")]));
        ledger.quarantine(&[at("0000:42:00.0")], "reset failed", (0, false));
        ledger.follow(&inventory(&[("0000:42:00.0", "a"), ("0000:43:00.0", "b"), ("0000:41:00.0", "new")]));
        assert_eq!(slots(&ledger), [("0000:42:00.0".into(), "a"), ("0000:43:00.0".into(), "b")]);
        assert_eq!(ledger.quarantines.keys().copied().collect::<Vec<_>>(), [at("0000:43:00.0")]);
    }

    #[test]
    fn a_device_that_is_gone_keeps_its_record_until_it_is_back() {
        let both = inventory(&[("0000:41:00.0", "a"), ("0000:42:00.0", "b")]);
        let mut ledger = taken(&both);
        ledger.follow(&inventory(&[("0000:41:00.0", "a")]));
        assert_eq!(ledger.devices.len(), 2);
        ledger.follow(&inventory(&[("0000:41:00.0", "a"), ("0000:50:00.0", "b")]));
        assert_eq!(slots(&ledger), [("0000:41:00.0".into(), "a"), ("0000:50:00.0".into(), "b")]);
    }

    #[test]
    fn what_a_device_had_before_is_recorded_once() {
        let host = inventory(&[("0000:41:00.0", "a")]);
        let mut ledger = taken(&host);
        let mut moved = host.clone();
        moved.devices.get_mut(&at("0000:41:00.0")).unwrap().driver = Some("vfio-pci".into());
        ledger.begin_moves(&[Move { to: Side::Pool, devices: vec![at("0000:41:00.0")] }], &moved);
        assert_eq!(ledger.devices[&at("0000:41:00.0")].original.binding.driver.as_deref(), Some("nvidia"));
    }

    fn claimed(standing: Standing) -> (Inventory, Ledger) {
        let host = inventory(&[("0000:41:00.0", "a")]);
        let mut ledger = taken(&host);
        let claim = crate::ledger::ClaimRecord {
            standing,
            tenant: crate::id::TenantId::BUILT_IN,
            machine: None,
            domain: uuid::Uuid::from_u128(7),
            devices: vec![at("0000:41:00.0")],
            isolation: crate::ledger::Isolation::WholeGpu,
            since: 0,
            epoch: 1,
            on_demand: false,
            boot: "before".into(),
            terms: None,
        };
        ledger.claims.insert(ClaimId::random(), claim);
        ledger.boot = "now".into();
        (host, ledger)
    }

    #[test]
    fn a_device_that_could_not_be_bound_again_for_its_claim_is_not_forgotten() {
        for (standing, stays) in [(Standing::Pending, false), (Standing::Active, true), (Standing::Releasing, true)] {
            let (host, mut ledger) = claimed(standing);
            let now = host.devices.values().map(|function| (function.address, function.binding())).collect();
            ledger.settle(at("0000:41:00.0"), &now);
            assert_eq!(ledger.devices.contains_key(&at("0000:41:00.0")), stays, "{standing:?}");
        }
    }

    #[test]
    fn a_claim_is_of_this_boot_again_once_its_devices_are_bound() {
        let (_, mut ledger) = claimed(Standing::Active);
        let id = *ledger.claims.keys().next().unwrap();
        assert!(ledger.is_of_an_earlier_boot(&ledger.claims[&id]));
        ledger.restore_claims(&[id]);
        assert!(!ledger.is_of_an_earlier_boot(&ledger.claims[&id]));
    }

    #[test]
    fn the_hook_is_told_nobody_while_a_claim_ends_and_nothing_of_what_is_lent() {
        let device = at("0000:41:00.0");
        let (_, mut ledger) = claimed(Standing::Active);
        assert_eq!(ledger.owners()[&device], uuid::Uuid::from_u128(7));
        let (_, ending) = claimed(Standing::Releasing);
        assert_eq!(ending.owners()[&device], uuid::Uuid::nil());
        ledger.claims.clear();
        ledger.finish_moves(&[Move { to: Side::Pool, devices: vec![device] }]);
        assert_eq!(ledger.owners()[&device], uuid::Uuid::nil());
        ledger.lend(&[device], true);
        assert!(ledger.owners().is_empty());
    }
}
