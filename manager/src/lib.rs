//! The gpuward daemon and its command: everything with time in it.
//!
//! One engine thread decides and owns inventory, ledger and journal. [`request`] is what may be asked of it, [`view`] what it
//! publishes, [`failure`] how it refuses. The bus is the only asynchronous part.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod apply;
pub mod bus;
pub mod cli;
pub mod client;
pub mod config;
pub mod daemon;
pub mod doctor;
pub mod engine;
pub mod failure;
pub mod history;
pub mod hook;
pub mod id;
pub mod journal;
pub mod ledger;
pub mod libvirt;
pub mod machine;
pub mod pins;
pub mod plan;
pub mod preflight;
pub mod request;
pub mod restore;
pub mod spec;
pub mod view;
