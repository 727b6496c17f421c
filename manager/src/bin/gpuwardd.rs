//! The daemon. `gpuwardd --help` names its options; without any it manages this host on the system bus.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use manager::bus::{Address, HostKernel};
use manager::daemon::{self, Options};
use manager::engine;
use manager::engine::machines::{self, Hypervisor};
use manager::libvirt::Source;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use vfio::{Deadlines, Host, Linux};

/// Hands GPUs to virtual machines and takes them back clean.
#[derive(Debug, Parser)]
#[command(name = "gpuwardd", version)]
struct Arguments {
    /// Configuration; its drop-ins lie in the folder of that name with `.d`
    #[arg(long, value_name = "FILE", default_value = "/etc/gpuward/gpuward.toml")]
    config: PathBuf,
    /// Where the ledger lies
    #[arg(long, value_name = "DIR", default_value = "/var/lib/gpuward")]
    state_dir: PathBuf,
    /// Where what ends with the boot lies
    #[arg(long, value_name = "DIR", default_value = "/run/gpuward")]
    run_dir: PathBuf,
    /// Address of the bus, in place of the system bus
    #[arg(long, value_name = "ADDRESS")]
    bus: Option<String>,
    /// URI of libvirt, in place of the configuration's; `none` for none
    #[arg(long, value_name = "URI")]
    libvirt: Option<String>,
    /// Observe a captured tree: nothing is changed
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Take again what was in the pool before this boot, and end: without bus and libvirt
    #[arg(long, conflicts_with_all = ["bus", "libvirt", "root"])]
    restore: bool,
    /// Make one store that is asked for on standard input (used by the daemon itself)
    #[arg(long, hide = true)]
    store: bool,
    /// Answer paths on standard input with what is in them (used by the daemon itself)
    #[arg(long, hide = true)]
    read: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.store {
        return vfio::run_store_child();
    }
    if arguments.read {
        return vfio::run_read_child();
    }
    log();
    match start(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", manager::failure::Failure::of(manager::failure::ErrorKind::Internal, error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

// To the journal where standard error leads there, to standard error otherwise.
fn log() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter);
    match leads_to_journal().then(|| tracing_journald::layer().ok()).flatten() {
        // Fields as they are named, so that `message_id` is the journal's MESSAGE_ID.
        Some(journal) => registry.with(journal.with_field_prefix(None)).init(),
        None => registry.with(tracing_subscriber::fmt::layer().with_writer(std::io::stderr)).init(),
    }
}

// The variable is inherited, also by programs whose output goes elsewhere: it names device and inode to compare (systemd.exec(5)).
fn leads_to_journal() -> bool {
    let stream = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    fs::metadata("/proc/self/fd/2").is_ok_and(|file| stream == format!("{}:{}", file.dev(), file.ino()))
}

fn start(arguments: Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let bus = arguments.bus.map_or(Address::System, Address::At);
    let host = host(&arguments.run_dir, arguments.root, &bus)?;
    let restores = arguments.restore;
    let hypervisor = match arguments.libvirt.as_deref() {
        None if restores => Hypervisor::None,
        None => Hypervisor::Configured,
        Some("none") => Hypervisor::None,
        Some(uri) => Hypervisor::At(Source::Uri(uri.to_owned())),
    };
    let engine = engine::Options {
        host,
        config: arguments.config,
        state_dir: arguments.state_dir,
        run_dir: arguments.run_dir,
        deadlines: Deadlines::default(),
        machines: machines::Options { hypervisor },
    };
    if restores {
        return Ok(manager::restore::run(engine)?);
    }
    Ok(daemon::run(Options { engine, bus })?)
}

fn host(run_dir: &Path, captured: Option<PathBuf>, bus: &Address) -> std::io::Result<Host> {
    if let Some(root) = captured {
        return Ok(Host::captured(root));
    }
    let notes = run_dir.join("stores");
    fs::create_dir_all(&notes)?;
    let kernel = Linux::new("/", std::env::current_exe()?, notes);
    Ok(Host::new("/", Arc::new(HostKernel::new(kernel, bus.clone()))))
}
