//! Typed specifications to libvirt XML.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]
