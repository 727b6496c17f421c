//! Tests that only root can run are counted as ignored, with their reason, when somebody else builds them.

use std::os::unix::fs::MetadataExt;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(unprivileged)");
    println!("cargo::rerun-if-env-changed=USER");
    println!("cargo::rerun-if-changed=build.rs");
    let root = std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
    if !root {
        println!("cargo::rustc-cfg=unprivileged");
    }
}
