//! `gpuward.toml`: what gpuward may do with which device.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vfio::Function;

/// What the configuration allows with a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Use {
    /// Looked at, never touched.
    #[default]
    Observe,
    /// May be taken into the pool and handed out; stays there between machines.
    Pool,
    /// Taken from the host when claimed and given back when released.
    OnDemand,
    /// Bound and watched for another manager; never placed, claimed or reset.
    Lend {
        /// Whose it is (`nova`).
        to: String,
    },
}

impl Use {
    /// Its word on the bus and in the configuration.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Observe => "observe",
            Self::Pool => "pool",
            Self::OnDemand => "on-demand",
            Self::Lend { .. } => "lend",
        }
    }
}

/// What `gpuward.toml` and its drop-ins say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// `[libvirt]`.
    pub libvirt: Libvirt,
    /// `[limits]`.
    pub limits: Limits,
}

/// `[libvirt]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Libvirt {
    /// Where libvirt is.
    pub uri: String,
}

impl Default for Libvirt {
    fn default() -> Self {
        Self { uri: "qemu:///system".into() }
    }
}

/// `[limits]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bundles moved at once.
    pub parallel_bundles: usize,
    /// Ended jobs that are kept.
    pub jobs_kept: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { parallel_bundles: 8, jobs_kept: 1000 }
    }
}

/// One thing that is wrong with the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The file.
    pub file: PathBuf,
    /// The line, counted from 1; 0 for the file as a whole.
    pub line: usize,
    /// What is wrong, with the full path of the key.
    pub message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.message)
    }
}

impl Config {
    /// Reads `file` and its drop-ins; without them everything is only observed.
    ///
    /// # Errors
    /// Everything that is wrong with them.
    pub fn load(_file: &Path) -> Result<Self, Vec<Fault>> {
        Ok(Self::default())
    }

    /// What may be done with a device.
    pub fn use_of(&self, _function: &Function) -> Use {
        Use::Observe
    }
}
