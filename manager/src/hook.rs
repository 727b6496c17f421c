//! `gpuward libvirt-hook`: the lock that libvirt obeys.
//!
//! libvirt runs it before it starts a domain and waits for the answer, so it asks nobody: neither the daemon nor libvirt, which
//! would both wait for us. All it knows is the domain's XML and `owned.json`, which the daemon writes before it changes the host.
//! A domain without PCI devices of the host is never refused.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use uuid::Uuid;
use vfio::PciAddress;

use crate::libvirt::hostdevs;

/// What libvirt calls a hook with (<https://libvirt.org/hooks.html>).
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The domain's name.
    pub domain: &'a str,
    /// `prepare`, `start`, `migrate`, …
    pub operation: &'a str,
    /// `begin`, `end` or `-`.
    pub suboperation: &'a str,
}

/// Why a domain may not start.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// It has a device that another domain holds.
    #[error("{device} is held through gpuward by domain {owner}: stop that one, or release its claim, first")]
    Held {
        /// The device.
        device: PciAddress,
        /// UUID of the domain that may have it.
        owner: Uuid,
    },
    /// It has a device of the pool.
    #[error("{device} is in gpuward's pool: claim it for this domain, or give it back to the host (`gpuward release {device}`)")]
    Pooled {
        /// The device.
        device: PciAddress,
    },
    /// The XML on standard input cannot be used.
    #[error("cannot tell which devices the domain has: {reason}")]
    Unreadable {
        /// Why.
        reason: String,
    },
    /// `owned.json` is there and cannot be used.
    #[error("cannot tell who may use the domain's devices, {}: {reason}; restarting gpuwardd writes it anew", path.display())]
    OwnersUnreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// Answers libvirt: the exit code allows or refuses, and a refusal is said on standard error, which libvirt passes on.
pub fn run(call: Call<'_>, xml: &mut dyn Read, owned: &Path) -> ExitCode {
    if let Ok(journal) = tracing_journald::layer()
        && tracing_subscriber::registry().with(journal).try_init().is_err()
    {
        tracing::debug!("logs go where the caller sends them");
    }
    match check(call, xml, owned) {
        Ok(()) => ExitCode::SUCCESS,
        Err(refused) => {
            tracing::warn!("domain {} may not start: {refused}", call.domain);
            eprintln!("gpuward: domain {} may not start: {refused}", call.domain);
            ExitCode::FAILURE
        }
    }
}

/// Whether libvirt may go on.
///
/// # Errors
/// The domain has a device that gpuward owns and did not give to it, or that cannot be told.
pub fn check(call: Call<'_>, xml: &mut dyn Read, owned: &Path) -> Result<(), Refused> {
    if !can_be_refused(call) {
        return Ok(());
    }
    let unreadable = |reason: String| Refused::Unreadable { reason };
    let mut text = String::new();
    xml.read_to_string(&mut text).map_err(|error| unreadable(error.to_string()))?;
    let devices = hostdevs(&text).map_err(|error| unreadable(error.to_string()))?;
    if devices.is_empty() {
        return Ok(());
    }
    let Some(owners) = read_owners(owned)? else {
        tracing::warn!("domain {} has PCI devices, and {} is missing: allowed", call.domain, owned.display());
        return Ok(());
    };
    let domain = domain_uuid(&text).ok_or_else(|| unreadable("it has no UUID".into()))?;
    devices.into_iter().try_for_each(|device| match owners.get(&device) {
        None => Ok(()),
        Some(owner) if *owner == domain => Ok(()),
        Some(owner) if owner.is_nil() => Err(Refused::Pooled { device }),
        Some(owner) => Err(Refused::Held { device, owner: *owner }),
    })
}

// Not `reconnect`: refusing that one kills a guest which runs already.
fn can_be_refused(call: Call<'_>) -> bool {
    matches!((call.operation, call.suboperation), ("prepare" | "migrate" | "restore", "begin"))
}

// Address to the UUID of the domain that may use it; nil: nobody, it is in the pool.
fn read_owners(path: &Path) -> Result<Option<BTreeMap<PciAddress, Uuid>>, Refused> {
    let unreadable = |reason: String| Refused::OwnersUnreadable { path: path.into(), reason };
    match fs::read(path) {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|error| unreadable(error.to_string())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unreadable(error.to_string())),
    }
}

fn domain_uuid(xml: &str) -> Option<Uuid> {
    let document = roxmltree::Document::parse(xml).ok()?;
    let uuid = document.root_element().children().find(|node| node.has_tag_name("uuid"))?;
    uuid.text()?.trim().parse().ok()
}

#[cfg(test)]
mod tests;
