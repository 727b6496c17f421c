//! The built command. Cargo builds no programs of other packages for a test, so it is asked to.

use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Where the command `gpuward` is, built with what the tests were built from.
///
/// # Panics
/// It cannot be built.
pub fn gpuward() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| build("gpuward").unwrap_or_else(|error| panic!("gpuward is not built: {error}")))
}

fn build(program: &str) -> io::Result<PathBuf> {
    let cargo = env::var_os("CARGO").unwrap_or("cargo".into());
    let built = Command::new(cargo).args(["build", "--quiet", "--package", "gpuward-manager", "--bin", program]).status()?;
    if !built.success() {
        return Err(io::Error::other("cargo build failed"));
    }
    // target/debug/deps/cli-… and target/debug/gpuward
    let test = env::current_exe()?;
    Ok(test.ancestors().nth(2).unwrap_or(Path::new(".")).join(program))
}
