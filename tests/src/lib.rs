//! What the suites share: the simulated host, private buses and stand-ins.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod bus;
pub mod engine;
pub mod operated;
pub mod person;
pub mod polkit;
pub mod program;
pub mod session;
pub mod simhost;
pub mod standin;
pub mod typed;
pub mod umockdev;
