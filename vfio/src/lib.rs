//! PCI functions of a host and everything VFIO needs to know about them.
//!
//! [`Host`] is a root to read from and one narrow seam, [`Kernel`], to change it through: a captured tree, a simulated host and a
//! real host are read by the same code. [`Inventory`] is what was observed at one moment, as one value. A change is one knob
//! of the host with the value it has and the value it is to have; swapped, it is its own undo.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod address;
mod aliases;
mod attributes;
mod bundle;
mod capture;
mod change;
mod class;
mod config_space;
mod deadlines;
mod function;
mod group;
mod holders;
mod host;
mod inventory;
mod iomem;
mod kernel;
mod linux;
mod nvidia;
mod observe;
pub mod rescan;
pub mod reset;
mod sriov;
mod uevent;

pub use address::{InvalidAddress, PciAddress};
pub use bundle::Bundle;
pub use capture::{CaptureError, Captured, capture};
pub use change::{Change, ChangeError, attribute};
pub use deadlines::Deadlines;
pub use function::{Bar, Binding, Function, Identity, Ids, Kind, Link, Power, Sriov, VgpuInterface};
pub use group::{AcsCapability, Group, GroupId, Member, NotViable, PortAcs};
pub use holders::{Hold, Holder, Holders};
pub use host::{Host, HostError};
pub use inventory::{Inventory, Iommu};
pub use kernel::{Kernel, LateHook, LateStore, ReadOnly, StoreError, StuckStore, UnitAsk, UnitError};
pub use linux::{Linux, READ_ARGUMENT, STORE_ARGUMENT, run_read_child, run_store_child};
pub use sriov::is_made_by_nvidia;
pub use uevent::Uevents;
