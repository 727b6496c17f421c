//! What a new number of virtual functions means for the ledger: before it, after it, and after it was undone.

use vfio::{Inventory, PciAddress};

use super::{Ledger, VfIntent};
use crate::plan::VfMove;

impl Ledger {
    /// Physical functions are about to get or lose virtual ones.
    pub fn begin_vfs(&mut self, vfs: &[VfMove], inventory: &Inventory) {
        for wish in vfs {
            let Some(function) = inventory.devices.get(&wish.device) else { continue };
            let autoprobe = function.sriov.as_ref().is_some_and(|sriov| sriov.autoprobe);
            let intent = VfIntent { identity: function.identity.clone(), count: 0, wished: None, boot: String::new(), autoprobe };
            self.vfs.entry(wish.device).or_insert(intent).wished = Some(wish.count);
        }
    }

    /// They have them.
    pub fn finish_vfs(&mut self, vfs: &[VfMove]) {
        let boot = self.boot.clone();
        for wish in vfs {
            if let Some(intent) = self.vfs.get_mut(&wish.device) {
                (intent.count, intent.wished) = (wish.count, None);
                intent.boot.clone_from(&boot);
            }
            self.forget_without_vfs(wish.device);
        }
    }

    /// They have what they had before.
    pub fn undo_vfs(&mut self, device: PciAddress) {
        if let Some(intent) = self.vfs.get_mut(&device) {
            intent.wished = None;
        }
        self.forget_without_vfs(device);
    }

    fn forget_without_vfs(&mut self, device: PciAddress) {
        self.vfs.retain(|other, intent| *other != device || intent.count > 0 || intent.wished.is_some());
    }
}
