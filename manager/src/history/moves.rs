//! What a change of the ledger means for the histories of its devices.

use std::collections::BTreeMap;

use vfio::{Identity, Inventory, PciAddress};

use super::{Entry, Kind};
use crate::ledger::{ClaimRecord, DeviceRecord, Ledger, Quarantine, Standing};

/// What befell devices between two states of the ledger. Devices that only sit elsewhere now are the same ones.
pub fn between(before: &Ledger, after: &Ledger, inventory: &Inventory) -> Vec<(Identity, Entry)> {
    let mut entries = claims(before, after, inventory);
    entries.extend(devices(before, after));
    entries.extend(quarantines(before, after));
    entries
}

fn by_identity<'a, T>(
    records: &'a BTreeMap<PciAddress, T>,
    identity: impl Fn(&'a T) -> &'a Identity,
) -> BTreeMap<&'a Identity, (PciAddress, &'a T)> {
    records.iter().map(|(address, record)| (identity(record), (*address, record))).collect()
}

fn devices(before: &Ledger, after: &Ledger) -> Vec<(Identity, Entry)> {
    let [was, is] = [before, after].map(|ledger| by_identity(&ledger.devices, |record: &DeviceRecord| &record.identity));
    let standing = |records: &BTreeMap<&Identity, (PciAddress, &DeviceRecord)>, identity: &Identity| {
        records.get(identity).map(|(_, record)| record.standing)
    };
    let assigned = is.iter().filter(|(identity, (_, record))| {
        record.standing == Standing::Active && matches!(standing(&was, identity), None | Some(Standing::Pending))
    });
    let released = was.iter().filter(|(identity, (_, record))| {
        matches!(record.standing, Standing::Active | Standing::Releasing) && standing(&is, identity).is_none()
    });
    let driver = |record: &DeviceRecord| record.original.binding.driver.clone().unwrap_or_else(|| "no driver".into());
    let entry = |kind, text: String, address: PciAddress| Entry::new(kind, text).with("address", address);
    let assigned = assigned.map(|(identity, (address, record))| {
        ((*identity).clone(), entry(Kind::Assigned, format!("taken from {}", driver(record)), *address))
    });
    let released = released.map(|(identity, (address, record))| {
        ((*identity).clone(), entry(Kind::Released, format!("given back to {}", driver(record)), *address))
    });
    assigned.chain(released).collect()
}

fn quarantines(before: &Ledger, after: &Ledger) -> Vec<(Identity, Entry)> {
    let [was, is] = [before, after].map(|ledger| by_identity(&ledger.quarantines, |quarantine: &Quarantine| &quarantine.identity));
    let reason = |quarantine: &Quarantine| (quarantine.reason.clone(), quarantine.stuck);
    let begun = is.iter().filter(|(identity, (_, now))| was.get(*identity).map(|(_, old)| reason(old)) != Some(reason(now)));
    let begun = begun.map(|(identity, (address, quarantine))| {
        let kind = if quarantine.stuck { Kind::Stuck } else { Kind::Quarantined };
        ((*identity).clone(), Entry::new(kind, &quarantine.reason).with("address", address))
    });
    let ended = was.iter().filter(|(identity, _)| !is.contains_key(*identity));
    let ended = ended.map(|(identity, (address, quarantine))| {
        let entry = Entry::new(Kind::QuarantineCleared, format!("it was there because: {}", quarantine.reason));
        ((*identity).clone(), entry.with("address", address))
    });
    begun.chain(ended).collect()
}

fn claims(before: &Ledger, after: &Ledger, inventory: &Inventory) -> Vec<(Identity, Entry)> {
    let identity = |device: &PciAddress| {
        let recorded = [before, after].into_iter().find_map(|ledger| ledger.devices.get(device)).map(|record| &record.identity);
        recorded.or_else(|| inventory.devices.get(device).map(|function| &function.identity)).cloned()
    };
    let made = after.claims.iter().filter(|(id, _)| !before.claims.contains_key(id)).map(|claim| (Kind::ClaimMade, claim));
    let released = before.claims.iter().filter(|(id, _)| !after.claims.contains_key(id)).map(|claim| (Kind::ClaimReleased, claim));
    let of_claim = |(kind, (id, claim)): (Kind, (&crate::id::ClaimId, &ClaimRecord))| {
        let told = Entry::new(kind, format!("for the domain {}", claim.domain)).with("claim", id).with("epoch", claim.epoch);
        let told = told.with("domain", claim.domain).with("isolation", claim.isolation.word());
        claim.devices.iter().map(|device| (*device, told.clone().with("address", device))).collect::<Vec<_>>()
    };
    let all = released.chain(made).flat_map(of_claim);
    all.filter_map(|(device, entry)| Some((identity(&device)?, entry))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::{at, function};
    use crate::plan::{Move, Side};

    fn host() -> Inventory {
        let gpu = function("0000:41:00.0", vfio::Kind::Gpu);
        Inventory { devices: BTreeMap::from([(gpu.address, gpu)]), ..Inventory::default() }
    }

    fn kinds(before: &Ledger, after: &Ledger) -> Vec<Kind> {
        between(before, after, &host()).into_iter().map(|(_, entry)| entry.kind).collect()
    }

    #[test]
    fn a_devices_way_through_the_pool_is_told_step_by_step() {
        let bundle = |to| [Move { to, devices: vec![at("0000:41:00.0")] }];
        let (free, mut ledger) = (Ledger::default(), Ledger::default());
        ledger.begin_moves(&bundle(Side::Pool), &host());
        assert_eq!(kinds(&free, &ledger), []);
        let pending = ledger.clone();
        ledger.finish_moves(&bundle(Side::Pool));
        assert_eq!(kinds(&pending, &ledger), [Kind::Assigned]);
        let active = ledger.clone();
        ledger.quarantine(&[at("0000:41:00.0")], "reset failed", (0, false));
        assert_eq!(kinds(&active, &ledger), [Kind::Quarantined]);
        assert_eq!(kinds(&ledger, &active), [Kind::QuarantineCleared]);
        let mut releasing = active.clone();
        releasing.begin_moves(&bundle(Side::Host), &host());
        assert_eq!(kinds(&active, &releasing), []);
        assert_eq!(kinds(&releasing, &free), [Kind::Released]);
        assert_eq!(kinds(&pending, &free), [], "what was never taken was never given back");
    }

    #[test]
    fn a_device_that_sits_elsewhere_now_was_not_given_back() {
        let mut ledger = Ledger::default();
        ledger.begin_moves(&[Move { to: Side::Pool, devices: vec![at("0000:41:00.0")] }], &host());
        let mut moved = ledger.clone();
        let record = moved.devices.remove(&at("0000:41:00.0")).unwrap();
        moved.devices.insert(at("0000:42:00.0"), record);
        assert_eq!(kinds(&ledger, &moved), []);
    }
}
