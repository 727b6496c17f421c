//! `gpuward.toml`: what gpuward may do with which device.

use serde::{Deserialize, Serialize};

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
