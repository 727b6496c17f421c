//! Typed specifications to libvirt XML.
//!
//! Templates are checked at compile time and escape what they are given; [`Text`] refuses what XML 1.0 cannot hold. Nothing here
//! reads or asks: what a domain needs to know of its host is part of its specification. Element by element the output follows
//! libvirt's `docs/formatdomain.rst`; the golden files name the least libvirt each part is for.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod domain;
mod mmio;
mod render;
mod text;

pub use domain::{
    Backing, Claim, Cpu, DirectBoot, Disk, DiskFormat, DiskSource, Domain, DomainType, Firmware, Hostdev, Interface, InterfaceSource,
    Metadata,
};
pub use mmio::{BarSize, Mmio64, mmio64};
pub use render::{AGENT_CHANNEL, NAMESPACE, RenderError, render_domain, render_hostdev};
pub use text::{BadText, Text};
