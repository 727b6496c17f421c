//! What needs no service: the configuration, completions, manual pages, and libvirt's hook.

use std::fs::File;
use std::io;
use std::path::Path;
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;
use serde::Serialize;
use vfio::{Captured, Host};

use super::args::{Cli, Hook};
use super::output::safe;
use super::{Context, Stop};
use crate::config::{Config, Fault};
use crate::hook;

/// What `config check --json` prints.
#[derive(Debug, Serialize)]
struct Checked<'a> {
    faults: Vec<CheckedFault<'a>>,
}

#[derive(Debug, Serialize)]
struct CheckedFault<'a> {
    file: &'a Path,
    line: usize,
    message: &'a str,
}

/// `gpuward config check`
pub(super) fn check_config(context: &mut Context, file: &Path) -> Result<(), Stop> {
    let faults = Config::load(file).err().unwrap_or_default();
    if context.output.is_json() {
        let faults = faults.iter().map(|fault| CheckedFault { file: &fault.file, line: fault.line, message: &fault.message });
        context.output.json(&Checked { faults: faults.collect() })?;
    } else {
        say(context, file, &faults)?;
    }
    if faults.is_empty() { Ok(()) } else { Err(Stop::Said) }
}

fn say(context: &mut Context, file: &Path, faults: &[Fault]) -> io::Result<()> {
    if faults.is_empty() {
        let there = if file.exists() { "is good" } else { "is not there: every device is only observed" };
        return context.output.line(format!("{} {there}", file.display()));
    }
    faults.iter().try_for_each(|fault| context.output.line(safe(&fault.to_string())))
}

/// What `capture --json` prints.
#[derive(Debug, Serialize)]
struct Saved<'a> {
    dir: &'a Path,
    saved: usize,
    unreadable: &'a [String],
}

/// `gpuward capture DIR`
pub(super) fn capture(context: &mut Context, dir: &Path, root: &Path) -> Result<(), Stop> {
    let host = Host::captured(root);
    let Captured { saved, unreadable } = vfio::capture(&host, dir).map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        Stop::Local(format!("{error}: {cause}"))
    })?;
    if context.output.is_json() {
        return Ok(context.output.json(&Saved { dir, saved, unreadable: &unreadable })?);
    }
    for file in &unreadable {
        super::warn(file);
    }
    Ok(context.output.line(format!("{saved} files and links saved below {}, serial numbers blanked", dir.display()))?)
}

/// `gpuward completions SHELL`
pub(super) fn completions(context: &mut Context, shell: Shell) -> Result<(), Stop> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "gpuward", &mut script);
    Ok(context.output.raw(&script)?)
}

/// `gpuward man DIR`: a page for the command and for each of its commands.
pub(super) fn manual(dir: &Path) -> Result<(), Stop> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    pages(&command, dir).map_err(|error| Stop::Local(format!("cannot write manual pages into {}: {error}", dir.display())))
}

fn pages(command: &clap::Command, dir: &Path) -> io::Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        pages(below, dir)?;
    }
    let page = clap_mangen::Man::new(command.clone().name(command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned()));
    page.render(&mut File::create(dir.join(page.get_filename()))?)
}

/// `gpuward libvirt-hook`: libvirt looks at the exit status alone.
pub(super) fn libvirt_hook(call: &Hook) -> ExitCode {
    let Hook { domain, operation, suboperation, extra: _, owned } = call;
    hook::run(hook::Call { domain, operation, suboperation }, &mut io::stdin().lock(), owned)
}
