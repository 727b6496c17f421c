//! The gpuward daemon and its command.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]
