//! What may be typed. Completions and manual pages are made from these definitions, so each says what it is for.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueHint};
use clap_complete::Shell;
use uuid::Uuid;
use vfio::PciAddress;

use super::names::{MachineName, parse_device};
use crate::id::ClaimId;

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
    List {
        #[command(flatten)]
        tree: Tree,
        /// Also look which processes have them open; takes longer
        #[arg(long)]
        holders: bool,
    },
    /// Shows everything about a device
    Show {
        /// Address (0000:41:00.0 or 41:00.0) or libvirt's name (pci_0000_41_00_0)
        #[arg(value_parser = parse_device)]
        device: PciAddress,
        #[command(flatten)]
        tree: Tree,
    },
    /// Says what would be done, without doing it
    #[command(subcommand)]
    Plan(PlanCommand),
    /// Moves devices, with all that must move together, from the host into the pool
    Assign {
        #[command(flatten)]
        devices: Devices,
        #[command(flatten)]
        force: Force,
        #[command(flatten)]
        request: Request,
    },
    /// Gives devices of the pool back to their own drivers
    Release {
        #[command(flatten)]
        devices: Devices,
        #[command(flatten)]
        request: Request,
    },
    /// Resets a device of the pool, with all that must move together, and looks whether it comes back
    Reset(OneDevice),
    /// Shows what befell a device, newest first
    History(History),
    /// Looks at devices that did not come back clean, and lets them out where they are sound
    #[command(subcommand)]
    Quarantine(QuarantineCommand),
    /// Says what stands between this host and handing out its devices, and what to do about it
    Doctor {
        #[command(flatten)]
        tree: Tree,
    },
    /// Says what speaks against starting a machine here and now, without starting it
    Preflight {
        /// Name, or tenant/name
        name: MachineName,
        /// A specification to look at instead (docs/machine-spec.md): there need be no such machine
        #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: Option<PathBuf>,
    },
    /// Lists virtual functions below the functions they are parts of, and makes them
    Vfs {
        #[command(subcommand)]
        command: Option<VfsCommand>,
    },
    /// Looks at tenants, and makes, changes and removes them
    #[command(subcommand)]
    Tenant(TenantCommand),
    /// Makes, starts and ends virtual machines
    #[command(subcommand)]
    Machine(MachineCommand),
    /// Lists claims, one a line: who has which devices until when
    Claims,
    /// Claims devices for domains that another manager runs, and ends such claims
    #[command(subcommand)]
    Claim(ClaimCommand),
    /// Looks at jobs: requests being carried out, or carried out
    #[command(subcommand)]
    Job(JobCommand),
    /// Prints events and changes as they come, one a line
    Monitor,
    /// Looks at the configuration
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Saves what gpuward reads of this host below DIR, serial numbers blanked
    Capture {
        /// Where to save it; must not be there yet
        #[arg(value_hint = ValueHint::DirPath)]
        dir: PathBuf,
        /// The tree of another host to save of
        #[arg(long, value_name = "TREE", default_value = "/", value_hint = ValueHint::DirPath)]
        root: PathBuf,
    },
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
    /// Read the tree of a host below TREE, such as a captured one, instead of asking the service
    #[arg(long, value_name = "TREE", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(super) struct Devices {
    /// Address (0000:41:00.0 or 41:00.0) or libvirt's name (pci_0000_41_00_0)
    #[arg(required = true, value_name = "DEVICE", value_parser = parse_device)]
    pub devices: Vec<PciAddress>,
}

#[derive(Debug, Args)]
pub(super) struct OneDevice {
    /// Address (0000:41:00.0 or 41:00.0) or libvirt's name (pci_0000_41_00_0)
    #[arg(value_parser = parse_device)]
    pub device: PciAddress,
    #[command(flatten)]
    pub request: Request,
}

#[derive(Debug, Args)]
pub(super) struct History {
    /// Address (0000:41:00.0 or 41:00.0) or libvirt's name (pci_0000_41_00_0)
    #[arg(value_parser = parse_device)]
    pub device: PciAddress,
    /// How many entries, the newest ones (at most 1000)
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub limit: u32,
    /// Only entries older than this, in seconds since 1970
    #[arg(long, value_name = "TIME")]
    pub before: Option<u64>,
}

#[derive(Debug, Subcommand)]
pub(super) enum QuarantineCommand {
    /// Lists devices in quarantine, one a line, with the reason
    List,
    /// Resets a device and lets it out of quarantine where it answers
    Clear(OneDevice),
    /// Takes a device off the bus, has it found again, and lets it out of quarantine where it answers
    Recover(OneDevice),
}

#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Force {
    /// Also a device with the boot display or the only console
    #[arg(long)]
    pub force: bool,
}

#[derive(Clone, Debug, Args)]
pub(super) struct Request {
    /// Print the job's number and do not wait for it
    #[arg(long)]
    pub no_wait: bool,
    /// Name of this request: the same one again gives the same job
    #[arg(long, value_name = "ID")]
    pub request_id: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(super) enum VfsCommand {
    /// Gives a device so many virtual functions, now and after each boot
    Set {
        #[command(flatten)]
        wish: VfCount,
        #[command(flatten)]
        request: Request,
    },
}

#[derive(Clone, Copy, Debug, Args)]
pub(super) struct VfCount {
    /// Address (0000:41:00.0 or 41:00.0) or libvirt's name (pci_0000_41_00_0)
    #[arg(value_parser = parse_device)]
    pub device: PciAddress,
    /// How many; 0 takes all away
    pub count: u16,
}

#[derive(Debug, Subcommand)]
pub(super) enum PlanCommand {
    /// What `gpuward vfs set` would do
    Vfs(VfCount),
    /// What `gpuward assign` would do
    Assign {
        #[command(flatten)]
        devices: Devices,
        #[command(flatten)]
        force: Force,
    },
    /// What `gpuward release` would do
    Release {
        #[command(flatten)]
        devices: Devices,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum TenantCommand {
    /// Lists tenants, one a line: who owns them, and how much of their quota is used
    List,
    /// Shows everything about a tenant
    Show {
        /// Its name
        name: String,
    },
    /// Makes a tenant as a file says, or changes it; shows the difference first
    Apply(TenantApply),
    /// Forgets a tenant that has neither machines nor claims
    Remove {
        /// Its name
        name: String,
        #[command(flatten)]
        request: Request,
    },
}

#[derive(Debug, Args)]
pub(super) struct TenantApply {
    /// Its specification (docs/tenants.md)
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// Show the difference only
    #[arg(long)]
    pub dry_run: bool,
    /// Do not ask
    #[arg(short, long, conflicts_with = "dry_run")]
    pub yes: bool,
    #[command(flatten)]
    pub request: Request,
}

#[derive(Debug, Subcommand)]
pub(super) enum MachineCommand {
    /// Records a machine, off
    Create {
        /// Name, or tenant/name
        name: MachineName,
        /// Its specification (docs/machine-spec.md)
        #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: PathBuf,
        #[command(flatten)]
        request: Request,
    },
    /// Claims its devices and starts it
    Start(OneMachine),
    /// Asks its guest to shut down
    Stop(OneMachine),
    /// Ends it at once
    Kill(OneMachine),
    /// Asks its guest to reboot
    Reboot(OneMachine),
    /// Connects this terminal to its serial console; Ctrl-] leaves it
    Console {
        /// Name, or tenant/name
        name: MachineName,
    },
    /// Says why it is as it is, and what it waits for
    Explain {
        /// Name, or tenant/name
        name: MachineName,
    },
    /// Forgets a machine that is off
    Remove(OneMachine),
    /// Lists machines, one a line
    List,
    /// Shows everything about a machine
    Show {
        /// Name, or tenant/name
        name: MachineName,
    },
}

#[derive(Debug, Args)]
pub(super) struct OneMachine {
    /// Name, or tenant/name
    pub name: MachineName,
    #[command(flatten)]
    pub request: Request,
}

#[derive(Debug, Subcommand)]
pub(super) enum ClaimCommand {
    /// Claims devices: from then on exactly that domain may start with them
    Make(Claiming),
    /// Ends a claim whose devices nobody holds; they are sanitised
    Release {
        /// c and 32 hexadecimal digits, as `gpuward claims` lists it
        claim: ClaimId,
        /// Refuse where the claim has another epoch than this
        #[arg(long, value_name = "NUMBER")]
        epoch: Option<u64>,
        #[command(flatten)]
        request: Request,
    },
    /// Prints the <hostdev> elements of a claim's devices, for its domain's XML
    Xml {
        /// c and 32 hexadecimal digits, as `gpuward claims` lists it
        claim: ClaimId,
    },
}

#[derive(Debug, Args)]
pub(super) struct Claiming {
    #[command(flatten)]
    pub wishes: Wishes,
    /// Only of this model (10de:2330)
    #[arg(long, value_name = "VENDOR:DEVICE")]
    pub model: Option<String>,
    /// UUID of the domain that may use them
    #[arg(long, value_name = "UUID")]
    pub domain: Uuid,
    /// What ends the claims: only `gpuward claim release`, or also that the domain ran and is gone
    #[arg(long, value_name = "MODE", value_parser = ["manual", "domain-stopped"], default_value = "manual")]
    pub release: String,
    /// Seconds after which they end in any case; 0: never
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub ttl: u32,
    #[command(flatten)]
    pub request: Request,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub(super) struct Wishes {
    /// So many GPUs
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    pub gpu: Option<u32>,
    /// So many virtual functions
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    pub vf: Option<u32>,
    /// Exactly this device; may be repeated
    #[arg(long, value_name = "DEVICE", value_parser = parse_device)]
    pub device: Vec<PciAddress>,
}

#[derive(Debug, Subcommand)]
pub(super) enum JobCommand {
    /// Lists jobs, one a line
    List,
    /// Shows everything about a job
    Show {
        /// Number
        job: u64,
    },
    /// Waits for a job and ends as it ended
    Watch {
        /// Number
        job: u64,
    },
    /// Stops a job before its next change and undoes what it did
    Cancel {
        /// Number
        job: u64,
    },
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
    pub extra: Vec<String>,
    /// Where the service says which domain may use which device
    #[arg(long, default_value = "/run/gpuward/owned.json")]
    pub owned: PathBuf,
}
