//! Runs the real daemon on a simulated host, as an ordinary user.
//!
//! `gpuward-sim dgx-h100 --shell` leaves you at a prompt where `gpuward` and `busctl` talk to that host.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use tests::simhost::{SimRoot, names};
use tests::standin;

/// Runs gpuward on a simulated host.
#[derive(Debug, Parser)]
#[command(name = "gpuward-sim", version)]
struct Arguments {
    /// The host to simulate.
    #[arg(value_parser = names())]
    host: String,
    /// Lay the host here and keep it; a host that is here already is used as it is.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Only lay the files, for `gpuward list --root DIR`.
    #[arg(long, requires = "root")]
    tree: bool,
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let result = match words.first().map(String::as_str) {
        Some(standin::WORD) => hold(&words),
        _ => run(Arguments::parse()),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("gpuward-sim: {}", chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

type Failed = Box<dyn std::error::Error>;

/// As a stand-in of libvirt's hypervisor: the nodes come after the UUID.
fn hold(words: &[String]) -> Result<ExitCode, Failed> {
    let nodes = words.iter().skip_while(|word| *word != "-uuid").skip(2).cloned().collect::<Vec<_>>();
    standin::stand_in(&nodes)?;
    Ok(ExitCode::SUCCESS)
}

fn run(arguments: Arguments) -> Result<ExitCode, Failed> {
    let root = match &arguments.root {
        Some(dir) => SimRoot::kept(&arguments.host, dir)?,
        None => SimRoot::temporary(&arguments.host)?,
    };
    writeln!(io::stdout(), "{}", root.path().display())?;
    Ok(ExitCode::SUCCESS)
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
