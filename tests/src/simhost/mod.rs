//! Simulated hosts: a described machine laid as a tree of files, and a kernel that answers stores into it.
//!
//! The simulated kernel may only answer as a real one was seen to. Everything it knows is below the host's root, so a process
//! killed half-way finds the host as it left it.
//!
//! ```no_run
//! use tests::simhost::{Death, SimHost, survives};
//! let sim = SimHost::build("dgx-h100").unwrap();
//! let before = sim.snapshot();
//! sim.kernel.die_at(2, Death::After);
//! let host = sim.host();
//! survives(|| drop(host)); // runs the plan; `None` where it died
//! let sim = sim.restart();
//! assert_eq!(sim.snapshot(), before);
//! ```

mod builder;
mod captured;
mod config_space;
mod description;
mod drivers;
mod effects;
mod function;
mod generate;
mod kernel;
mod machine;
mod rules;
mod tree;
mod units;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use vfio::Host;

pub use builder::BuildError;
pub use description::{BadDescription, Description, Model, Placed, Process};
pub use generate::generate;
pub use kernel::{Death, SimKernel};
pub use rustix::io::Errno;

use tree::{PRIVATE, Tree};

/// The described hosts, by name.
const HOSTS: [(&str, &str); 5] = [
    ("dgx-h100", include_str!("../../hosts/dgx-h100.toml")),
    ("workstation", include_str!("../../hosts/workstation.toml")),
    ("crowded-group", include_str!("../../hosts/crowded-group.toml")),
    ("no-iommu", include_str!("../../hosts/no-iommu.toml")),
    ("l40s-vgpu", include_str!("../../hosts/l40s-vgpu.toml")),
];

/// The root of a simulated host: a directory of its own that goes with it, or one that stays.
#[derive(Debug)]
pub enum SimRoot {
    /// Removed when dropped.
    Temporary(TempDir),
    /// Kept.
    Kept(PathBuf),
}

impl SimRoot {
    /// Lays the described host `name` in a temporary directory.
    ///
    /// # Errors
    /// No host of that name, or its tree cannot be laid.
    pub fn temporary(name: &str) -> Result<Self, BuildError> {
        let root = temporary_root()?;
        lay_named(&Tree::new(root.path()), name)?;
        Ok(Self::Temporary(root))
    }

    /// Lays the described host `name` in `dir`, unless a host lies there already: then that one is used as it is.
    ///
    /// # Errors
    /// No host of that name, or its tree cannot be laid.
    pub fn kept(name: &str, dir: &Path) -> Result<Self, BuildError> {
        fs::create_dir_all(dir)?;
        let dir = fs::canonicalize(dir)?;
        if !dir.join("sys").exists() {
            lay_named(&Tree::new(&dir), name)?;
        }
        Ok(Self::Kept(dir))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        match self {
            Self::Temporary(dir) => dir.path(),
            Self::Kept(dir) => dir,
        }
    }
}

/// What a reset leaves of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// All as it was.
    Whole,
    /// Configuration space reads as ones (P32), until it is taken off the bus and found again.
    Silent,
    /// Configuration space reads as ones, for good.
    Dead,
    /// Its regions have lost their addresses (P35).
    WithoutRegions,
}

/// A simulated host with its own root and kernel.
#[derive(Debug)]
pub struct SimHost {
    root: SimRoot,
    /// Its kernel: what to fail, and what was stored.
    pub kernel: Arc<SimKernel>,
}

impl SimHost {
    /// Lays the described host `name` (`dgx-h100`) in a temporary directory.
    ///
    /// # Errors
    /// No host of that name, or its tree cannot be laid.
    pub fn build(name: &str) -> Result<Self, BuildError> {
        Ok(Self::at(SimRoot::temporary(name)?))
    }

    /// Lays a host that a test describes itself.
    ///
    /// # Errors
    /// As [`SimHost::build`].
    pub fn lay(description: &Description) -> Result<Self, BuildError> {
        let root = temporary_root()?;
        builder::lay(&Tree::new(root.path()), description)?;
        Ok(Self::at(SimRoot::Temporary(root)))
    }

    /// The host that lies at `root`.
    pub fn at(root: SimRoot) -> Self {
        Self { kernel: Arc::new(SimKernel::new(root.path())), root }
    }

    /// The same host for a process that starts anew: its files as they are, a kernel without faults or memory.
    #[must_use]
    pub fn restart(self) -> Self {
        Self::at(self.root)
    }

    /// Where its tree is.
    pub fn root(&self) -> &Path {
        self.root.path()
    }

    /// The host as gpuward sees it, for as long as this simulated one is not dropped.
    pub fn host(&self) -> Host {
        Host::new(self.root(), Arc::<SimKernel>::clone(&self.kernel))
    }

    /// Every file and link of its tree with what is in it, directories not: for comparing before and after.
    pub fn snapshot(&self) -> BTreeMap<PathBuf, String> {
        let mut files = BTreeMap::new();
        collect(self.root(), Path::new(""), &mut files);
        files
    }

    /// Lets a process with this id hold `node` (`/dev/vfio/31`).
    ///
    /// # Errors
    /// The file system's.
    pub fn hold(&self, pid: u32, comm: &str, node: &str) -> io::Result<()> {
        let process = Process {
            pid,
            comm: comm.into(),
            cmdline: vec![format!("/usr/bin/{comm}")],
            cgroup: format!("/system.slice/{comm}.service"),
            opens: vec![node.into()],
            maps: Vec::new(),
        };
        machine::lay_process(&Tree::new(self.root()), &process)
    }

    /// Ends the process with this id.
    ///
    /// # Errors
    /// The file system's.
    pub fn end_process(&self, pid: u32) -> io::Result<()> {
        Tree::new(self.root()).remove(format!("proc/{pid}"))
    }

    /// Begins to shut the host down, or thinks better of it.
    ///
    /// # Errors
    /// The file system's.
    pub fn shut_down(&self, begun: bool) -> io::Result<()> {
        let tree = Tree::new(self.root());
        if begun { tree.write(units::SHUTTING_DOWN, "") } else { tree.remove(units::SHUTTING_DOWN) }
    }

    /// Pulls out the function at `address` (P73); nothing where there is none.
    ///
    /// # Errors
    /// The file system's.
    pub fn unplug(&self, address: &str) -> io::Result<()> {
        let tree = Tree::new(self.root());
        match tree.resolve(Path::new(&format!("sys/bus/pci/devices/{address}"))) {
            Some(dir) => effects::vanish(&tree, &dir.to_string_lossy()),
            None => Ok(()),
        }
    }

    /// What the next resets of the function at `address` leave of it.
    ///
    /// # Errors
    /// The file system's.
    pub fn after_reset(&self, address: &str, left: Left) -> io::Result<()> {
        let word = match left {
            Left::Whole => "",
            Left::Silent => "silent",
            Left::Dead => "dead",
            Left::WithoutRegions => "without-regions",
        };
        Tree::new(self.root()).write(format!("{PRIVATE}/functions/{address}/after_reset"), word)
    }

    /// Lets the function at `address`, which a reset left otherwise, be as it was.
    ///
    /// # Errors
    /// The file system's.
    pub fn answer_again(&self, address: &str) -> io::Result<()> {
        let tree = Tree::new(self.root());
        let own = tree.bytes(format!("{PRIVATE}/functions/{address}/config"))?;
        tree.remove(format!("{PRIVATE}/functions/{address}/config"))?;
        tree.write(format!("sys/bus/pci/devices/{address}/config"), own)
    }

    /// How often the function at `address` was reset.
    pub fn resets(&self, address: &str) -> u32 {
        Tree::new(self.root()).read(format!("{PRIVATE}/functions/{address}/resets")).parse().unwrap_or(0)
    }

    /// Changes `file` as somebody else would: a driver, the firmware, an administrator.
    ///
    /// # Errors
    /// The file system's.
    pub fn set(&self, file: impl AsRef<Path>, text: &str) -> io::Result<()> {
        Tree::new(self.root()).write(file, format!("{text}\n"))
    }
}

// A host is thousands of small files: in memory they are laid ten times as fast.
fn temporary_root() -> io::Result<TempDir> {
    TempDir::with_prefix_in("gpuward-sim-", "/dev/shm").or_else(|_| TempDir::with_prefix("gpuward-sim-"))
}

/// The description of the host `name`.
///
/// # Errors
/// There is none of that name, or it is wrong.
pub fn describe(name: &str) -> Result<Description, BadDescription> {
    let found = HOSTS.iter().find(|(known, _)| *known == name);
    let (_, text) = found.ok_or_else(|| BadDescription(format!("there is no host {name}; there are {}", names().join(", "))))?;
    Description::parse(text)
}

/// The names of the hosts that can be built: described ones, and one that was captured as a whole.
pub fn names() -> Vec<&'static str> {
    HOSTS.iter().map(|(name, _)| *name).chain([captured::A2]).collect()
}

fn lay_named(tree: &Tree, name: &str) -> Result<(), BuildError> {
    if name == captured::A2 {
        return Ok(captured::lay_a2(tree)?);
    }
    builder::lay(tree, &describe(name)?)?;
    if name == "l40s-vgpu" {
        captured::lay_l40s_vgpu(tree)?;
    }
    Ok(())
}

/// Runs `work`; `None` where its process died at a store, as [`SimKernel::die_at`] said. Other panics go on.
pub fn survives<T>(work: impl FnOnce() -> T) -> Option<T> {
    match panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => Some(done),
        Err(payload) if payload.is::<kernel::Died>() => None,
        Err(payload) => panic::resume_unwind(payload),
    }
}

fn collect(root: &Path, dir: &Path, files: &mut BTreeMap<PathBuf, String>) {
    for entry in fs::read_dir(root.join(dir)).into_iter().flatten().flatten() {
        let path = dir.join(entry.file_name());
        let Ok(kind) = entry.file_type() else { continue };
        if path == Path::new(PRIVATE) {
            continue;
        }
        if kind.is_dir() {
            collect(root, &path, files);
        } else if kind.is_symlink() {
            let target = fs::read_link(root.join(&path)).unwrap_or_default();
            files.insert(path, format!("-> {}", target.display()));
        } else {
            let bytes = fs::read(root.join(&path)).unwrap_or_default();
            files.insert(path, String::from_utf8_lossy(&bytes).into_owned());
        }
    }
}
