//! Virtual functions that are meant to be there: made again after a boot, or when their driver was loaded anew.

use std::collections::BTreeMap;

use vfio::{Function, PciAddress};

use super::Engine;
use super::carry::one_line;
use crate::failure::ErrorKind;
use crate::ledger::{DeviceRecord, Standing, VfIntent};
use crate::request::{Goal, Request, Submission};

/// The kind of jobs that make and take away virtual functions.
pub(super) const KIND: &str = "set-vf-count";

/// The driver with which making virtual functions anew was tried last in this start; `None` where the function was seen without one.
pub(super) type Tried = BTreeMap<PciAddress, Option<String>>;

/// What a physical function lacks, for a person; `None` where it has what it is meant to have, or is being given it.
pub(super) fn lack(function: &Function, intent: &VfIntent) -> Option<String> {
    let enabled = function.sriov.as_ref().map_or(0, |sriov| sriov.enabled);
    let is_lacking = intent.wished.is_none() && enabled != intent.count;
    is_lacking
        .then(|| format!("it has {enabled} of {} virtual functions: its driver was loaded anew, or somebody else changed it", intent.count))
}

impl Engine {
    /// Makes virtual functions again that their physical function has lost with a boot or with its driver, once for each time that a
    /// driver comes. What was in the pool of them follows. What somebody took away is shown, and not undone.
    pub(super) fn restore_vfs(&mut self) {
        if !self.recovered {
            return;
        }
        for (device, count, driver) in self.lost_vfs() {
            self.expect_again(device);
            let request = Request::Apply { goals: vec![Goal::Vfs { device, count }], plan_digest: None };
            let submission = Submission { request, uid: 0, request_id: String::new(), if_generation: None };
            match self.submit(submission) {
                // One of the jobs that are too many ends, and then this is tried again.
                Err(failure) if failure.kind == ErrorKind::TooMany => break,
                Err(failure) => tracing::error!("{device} has not its virtual functions again: {}", one_line(&failure)),
                Ok(_) => {}
            }
            self.vfs_tried.insert(device, Some(driver));
        }
        self.dispatch();
    }

    fn lost_vfs(&mut self) -> Vec<(PciAddress, u16, String)> {
        let mut lost = Vec::new();
        for (device, intent) in &self.ledger.vfs {
            let function = self.inventory.devices.get(device).filter(|function| intent.identity.matches(&function.identity));
            let driver = function.and_then(|function| function.driver.clone());
            let Some((function, driver)) = function.zip(driver) else {
                self.vfs_tried.insert(*device, None);
                continue;
            };
            let has_none = function.sriov.as_ref().is_some_and(|sriov| sriov.enabled == 0);
            let is_due = match self.vfs_tried.get(device) {
                None => intent.boot != self.ledger.boot,
                Some(tried) => tried.as_ref() != Some(&driver),
            };
            if has_none && is_due && self.jobs.on_device(*device).is_none() && lack(function, intent).is_some() {
                lost.push((*device, intent.count, driver));
            }
        }
        lost
    }

    // Devices of the pool that have left beside it may be among those that come back, without a driver.
    fn expect_again(&mut self, parent: PciAddress) {
        let beside = |slot: &str| slot.rsplit_once('/').map(|(above, _)| above.to_owned());
        let above = self.ledger.vfs.get(&parent).and_then(|intent| beside(&intent.identity.slot));
        let has_left = |device: &PciAddress| !self.inventory.devices.contains_key(device);
        let is_beside = |record: &DeviceRecord| record.standing == Standing::Active && beside(&record.identity.slot) == above;
        let records = self.ledger.devices.iter().filter(|(device, record)| is_beside(record) && has_left(device));
        let left: Vec<_> = records.map(|(device, _)| *device).filter(|device| self.ledger.claim_on(*device).is_none()).collect();
        let recorded = self.commit(|ledger| {
            for device in &left {
                if let Some(record) = ledger.devices.get_mut(device) {
                    record.boot.clear();
                }
            }
        });
        match recorded {
            Ok(()) => self.restoring.expect(&left),
            Err(failure) => tracing::error!("what comes back is not taken again: {}", one_line(&failure)),
        }
    }

    /// Whether virtual functions are being made, which devices that are not there may be among.
    pub(super) fn makes_vfs(&self) -> bool {
        self.jobs.live().any(|(_, view)| view.kind == KIND)
    }
}
