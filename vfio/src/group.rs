//! IOMMU groups: what the kernel cannot tell apart.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Ids, Kind, PciAddress};

/// The number of an IOMMU group: of this boot, never kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GroupId(pub u32);

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An IOMMU group with all its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its number.
    pub id: GroupId,
    /// Every function in it, by address.
    pub members: Vec<Member>,
    /// Ports above it that lack access control services: why it is as big as it is.
    pub acs: Vec<PortAcs>,
    /// A member has a `direct` reserved region (RMRR), so that the kernel refuses user DMA.
    pub reserved_direct: bool,
}

/// A member of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Where it sits.
    pub address: PciAddress,
    /// What it is.
    pub kind: Kind,
    /// What it is, for a person (`Non-Volatile memory controller`).
    pub description: String,
    /// Its ids.
    pub ids: Ids,
    /// Its driver.
    pub driver: Option<String>,
}

impl Member {
    /// Whether its driver does no DMA of its own (`driver_managed_dma` in the kernel), so that the group stays viable.
    pub fn leaves_dma_alone(&self) -> bool {
        matches!(self.driver.as_deref(), Some("vfio-pci" | "pci-stub"))
    }

    /// Whether its driver keeps the group from a guest, as `vfio_group_viable` counts: one without a driver does not.
    pub fn is_in_the_way(&self) -> bool {
        self.driver.is_some() && !self.leaves_dma_alone()
    }
}

/// A port above a group and the ACS bits it lacks of those the kernel wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortAcs {
    /// The port.
    pub port: PciAddress,
    /// No ACS capability at all, or its configuration space may not be read.
    pub capability: AcsCapability,
    /// Missing of source validation, request redirect, completion redirect and upstream forwarding.
    pub missing: Vec<&'static str>,
}

impl PortAcs {
    /// Whether functions below it can be told apart.
    pub fn isolates(&self) -> bool {
        self.capability == AcsCapability::Present && self.missing.is_empty()
    }
}

/// What is known of a port's ACS capability (PCIe extended capability 000D).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcsCapability {
    /// Present.
    Present,
    /// The port has none.
    Absent,
    /// Configuration space beyond 64 bytes needs CAP_SYS_ADMIN.
    Unreadable,
}

impl Group {
    /// Why a guest cannot have it as it is; `None` where the kernel would call it viable.
    ///
    /// As `vfio_group_viable` counts: bridges and members without a driver are fine, so are members on a VFIO driver.
    pub fn not_viable(&self, is_vfio: impl Fn(&Member) -> bool) -> Option<NotViable> {
        if self.reserved_direct {
            return Some(NotViable::ReservedRegion);
        }
        let bound = self.members.iter().filter(|member| member.kind != Kind::Bridge && !is_vfio(member));
        bound.filter_map(NotViable::bound).next()
    }
}

/// Why a group cannot be given to a guest as it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotViable {
    /// A member that is no bridge is bound to a host driver.
    #[error("{address} ({description}) is bound to {driver}")]
    Bound {
        /// The member.
        address: PciAddress,
        /// What it is.
        description: String,
        /// Its driver.
        driver: String,
    },
    /// The firmware reserved memory for a member's DMA.
    #[error("the firmware reserved memory for DMA of a member (a direct reserved region), so the kernel refuses user DMA")]
    ReservedRegion,
}

impl NotViable {
    fn bound(member: &Member) -> Option<Self> {
        let driver = member.driver.clone()?;
        Some(Self::Bound { address: member.address, description: member.description.clone(), driver })
    }
}
