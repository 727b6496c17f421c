//! The command.

use std::process::ExitCode;

fn main() -> ExitCode {
    manager::cli::main()
}
