//! The command `gpuward`: a client of the service, and a reader of captured trees.
//!
//! Answers go to standard output; progress, warnings and reasons to standard error. Every way it ends has its exit status.

mod args;
mod change;
mod claim;
mod console;
mod device;
mod doctor;
mod follow;
mod history;
mod holders;
mod job;
mod local;
mod look;
mod machine;
mod monitor;
mod names;
mod output;
mod preflight;
mod quarantine;
mod spec;
mod stop;
mod tenant;
mod vfs;

use std::process::ExitCode;

use clap::Parser;

use crate::client::{CallError, Client};
use args::{Cli, Command, ConfigCommand};
use change::Wish;
use output::Output;
use stop::Stop;

/// Runs the command with the arguments of this process.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Command::LibvirtHook(call) = &cli.command {
        return local::libvirt_hook(call);
    }
    let mut context = Context { bus: cli.bus, client: None, output: Output::new(cli.json) };
    match run(&mut context, cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(stop) => stop.report(&mut context.output),
    }
}

/// What every command works with.
struct Context {
    bus: Option<String>,
    client: Option<Client>,
    output: Output,
}

impl Context {
    /// The connection to the service, made when it is first wanted.
    fn client(&mut self) -> Result<&Client, CallError> {
        let client = match self.client.take() {
            Some(client) => client,
            None => Client::connect(self.bus.as_deref())?,
        };
        Ok(self.client.insert(client))
    }
}

fn run(context: &mut Context, command: Command) -> Result<(), Stop> {
    match command {
        Command::List { tree, holders } => look::list(context, &tree, holders),
        Command::Show { device, tree } => look::show(context, device, &tree),
        Command::Plan(command) => change::plan(context, command),
        Command::Assign { devices, force, request } => change::apply(context, Wish::Assign(force), &devices.devices, &request),
        Command::Release { devices, request } => change::apply(context, Wish::Release, &devices.devices, &request),
        Command::Doctor { tree } => doctor::run(context, &tree),
        Command::Preflight { name, file } => preflight::run(context, &name, file.as_deref()),
        Command::Reset(device) => quarantine::reset(context, &device),
        Command::History(of) => history::run(context, &of),
        Command::Quarantine(command) => quarantine::run(context, command),
        Command::Vfs { command } => vfs::run(context, command),
        Command::Tenant(command) => tenant::run(context, command),
        Command::Machine(command) => machine::run(context, command),
        Command::Claims => claim::list(context),
        Command::Claim(command) => claim::run(context, command),
        Command::Job(command) => job::run(context, command),
        Command::Monitor => monitor::run(context),
        Command::Config(ConfigCommand::Check { file }) => local::check_config(context, &file),
        Command::Capture { dir, root } => local::capture(context, &dir, &root),
        Command::Completions { shell } => local::completions(context, shell),
        Command::Man { dir } => local::manual(&dir),
        Command::LibvirtHook(call) => Err(Stop::Wrong(format!("libvirt calls {} by itself", call.operation))),
    }
}

/// Says something on standard error beside the answer.
fn warn(text: &str) {
    eprintln!("gpuward: {}", output::safe(text));
}
