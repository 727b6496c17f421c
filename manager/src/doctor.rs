//! What stands between a host and handing out its devices: looked at, judged, and what to do about it.
//!
//! Reading ([`Readings`]) is apart from judging, which is pure. A fact that is not to be had is not judged: missing is not broken.
//! `docs/doctor.md` lists every check.

use std::collections::BTreeSet;

use serde::Serialize;
use vfio::{Function, Host, Inventory, PciAddress};

mod device;
mod host;
mod readings;

pub(crate) use host::kernel_version;
pub use readings::{IommuUnit, Readings};

/// How grave a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Note,
    /// May fail, or protects less than it seems.
    Warning,
    /// Devices cannot be handed out like this.
    Problem,
}

impl Severity {
    /// Its word on the bus.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Which check (`iommu`): stable within version 1.
    pub check: &'static str,
    /// The device it is about; empty for the host.
    pub subject: String,
    /// How grave it is.
    pub severity: Severity,
    /// What was found, in one sentence.
    pub message: String,
    /// Where: files and their values.
    pub evidence: Vec<String>,
    /// What to do; empty where nothing is to be done.
    pub remedy: String,
}

impl Finding {
    fn of_host(check: &'static str, severity: Severity, message: impl Into<String>) -> Self {
        Self { check, subject: String::new(), severity, message: message.into(), evidence: Vec::new(), remedy: String::new() }
    }

    fn of(function: &Function, check: &'static str, severity: Severity, message: impl Into<String>) -> Self {
        Self { subject: function.address.to_string(), ..Self::of_host(check, severity, message) }
    }

    fn because(mut self, fact: impl Into<String>) -> Self {
        self.evidence.push(fact.into());
        self
    }

    fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }
}

/// What is judged.
#[derive(Clone, Copy, Debug)]
pub struct Patient<'a> {
    /// What was read.
    pub readings: &'a Readings,
    /// What was observed.
    pub inventory: &'a Inventory,
    /// The devices that the configuration lets gpuward have.
    pub wanted: &'a BTreeSet<PciAddress>,
}

impl<'a> Patient<'a> {
    fn devices(&self) -> impl Iterator<Item = &'a Function> {
        let (inventory, wanted) = (self.inventory, self.wanted);
        wanted.iter().filter_map(|device| inventory.devices.get(device))
    }
}

/// Judges a host: its own findings first, then those of devices.
pub fn judge(patient: Patient<'_>) -> Vec<Finding> {
    let mut findings = host::judge(patient);
    if patient.wanted.is_empty() {
        let nothing = Finding::of_host("configuration", Severity::Note, "gpuward.toml lets gpuward have no device: all are only observed");
        findings.push(nothing.remedy("add [[devices]] with use = \"pool\" or \"on-demand\"; docs/configuration.md shows how"));
    }
    findings.extend(patient.devices().flat_map(|function| device::judge(patient, function)));
    findings
}

/// Reads what is judged, and judges it.
pub fn examine(host: &Host, inventory: &Inventory, wanted: &BTreeSet<PciAddress>) -> Vec<Finding> {
    judge(Patient { readings: &Readings::of(host), inventory, wanted })
}

#[cfg(test)]
mod tests;
