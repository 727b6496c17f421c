//! Confidential machines: what the host can do, GPU confidential modes, launch requirements and evidence.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]
