//! What was observed of a host at one moment, as one value.

use std::collections::BTreeMap;

use crate::{Function, Group, GroupId, PciAddress};

/// Every PCI function that matters to gpuward and every IOMMU group they are in, observed at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Grows with each observation that differs from the one before.
    pub generation: u64,
    /// Devices by address: GPUs, virtual functions, NVSwitches and companions.
    pub devices: BTreeMap<PciAddress, Function>,
    /// The groups of these devices, with all their members, devices or not.
    pub groups: BTreeMap<GroupId, Group>,
    /// Whether the kernel isolates devices at all.
    pub iommu: Iommu,
    /// Directories or files that could not be read as a whole, as `path: reason`.
    pub unreadable: Vec<String>,
}

/// Whether the kernel runs with an IOMMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Iommu {
    /// `/sys/kernel/iommu_groups` is empty: nothing can be handed to a guest safely.
    #[default]
    Off,
    /// Groups exist.
    On,
}
