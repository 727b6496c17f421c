//! What may be typed. Completions and manual pages are made from these definitions, so each says what it is for.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueHint};
use clap_complete::Shell;
use vfio::PciAddress;

use super::names::parse_device;

/// Hands GPUs to virtual machines and takes them back clean.
///
/// Exit status: 0 done, 1 failed, 2 wrong call, 3 refused (with the reason), 4 not authorised, 5 the service is not there.
#[derive(Debug, Parser)]
#[command(name = "gpuward", version, max_term_width = 100, arg_required_else_help = true)]
pub(super) struct Cli {
    /// Address of the bus to call the service on (default: the system bus)
    #[arg(long, global = true, value_name = "ADDRESS")]
    pub bus: Option<String>,
    /// Answer in JSON, as docs/cli.md describes it
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Lists devices, one a line
    List(Tree),
    /// Shows everything about a device
    Show {
        /// Address (0000:41:00.0 or 41:00.0) or libvirt's name (pci_0000_41_00_0)
        #[arg(value_parser = parse_device)]
        device: PciAddress,
        #[command(flatten)]
        tree: Tree,
    },
    /// Looks at the configuration
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Answers libvirt's hook for QEMU domains, with the domain's XML on standard input
    #[command(hide = true)]
    LibvirtHook(Hook),
    /// Prints the completions for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Writes the manual pages into DIR
    #[command(hide = true)]
    Man {
        /// An existing directory
        #[arg(value_hint = ValueHint::DirPath)]
        dir: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(super) struct Tree {
    /// Read the captured tree below DIR instead of asking the service
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(super) enum ConfigCommand {
    /// Says what is wrong with the configuration, by file and line
    Check {
        /// The file; its drop-ins in FILE.d are read with it
        #[arg(default_value = "/etc/gpuward/gpuward.toml", value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(super) struct Hook {
    /// The domain's name
    #[arg(allow_hyphen_values = true)]
    pub domain: String,
    /// prepare, start, started, stopped, release, migrate, restore, reconnect, attach
    pub operation: String,
    /// begin, end or -
    pub suboperation: String,
    /// What else libvirt passes
    #[arg(allow_hyphen_values = true)]
    pub extra: Vec<String>,
    /// Where the service says which domain may use which device
    #[arg(long, default_value = "/run/gpuward/owned.json")]
    pub owned: PathBuf,
}
