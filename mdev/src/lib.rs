//! Virtual GPUs: mdev and vendor-VFIO types and instances, MIG layouts and schedulers.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]
