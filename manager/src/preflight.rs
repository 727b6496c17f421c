//! What speaks against starting a machine on this host: looked at before anything is changed, judged, and what to do about it.
//!
//! Reading ([`Facts`], [`Told`]) is apart from judging, which is pure. A fact that cannot be observed is a finding of its own: nothing
//! passes because nobody could look. `docs/preflight.md` lists every code.

use std::fmt;

use serde::Serialize;
use vfio::{Function, Host};

use crate::failure::{ErrorKind, Failure};
use crate::libvirt::{HostFacts, Libvirt, Told};
use crate::machine;
use crate::spec::{MachineSpec, TenantSpec};

mod devices;
mod facts;
mod hypervisor;
mod iommu;
mod memory;
mod numa;

pub use facts::{Facts, NumaNode};

/// How grave a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Worth knowing, or could not be observed.
    Info,
    /// It starts, and may be slow or protect less than it seems.
    Warning,
    /// It would not start, or would harm the host: a start is refused.
    Error,
}

impl Severity {
    /// Its word on the bus.
    pub fn word(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What it is about (`free-memory`): stable within version 1.
    pub code: &'static str,
    /// How grave it is.
    pub severity: Severity,
    /// The device it is about; empty for the host or the machine as a whole.
    pub subject: String,
    /// What was found, in one sentence.
    pub message: String,
    /// Where: files and their values.
    pub evidence: Vec<String>,
    /// What to do; empty where nothing is to be done.
    pub remedy: String,
}

impl Finding {
    fn new(code: &'static str, severity: Severity, message: impl Into<String>) -> Self {
        Self { code, severity, subject: String::new(), message: message.into(), evidence: Vec::new(), remedy: String::new() }
    }

    fn of(function: &Function, code: &'static str, severity: Severity, message: impl Into<String>) -> Self {
        Self { subject: function.address.to_string(), ..Self::new(code, severity, message) }
    }

    /// A fact that cannot be observed.
    fn unknown(code: &'static str, message: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(code, Severity::Info, message).because(why)
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

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.subject.is_empty() { f.write_str(&self.message) } else { write!(f, "{}: {}", self.subject, self.message) }
    }
}

/// A start that is thought through.
#[derive(Clone, Debug)]
pub struct Case {
    /// What the machine is to be.
    pub spec: MachineSpec,
    /// Its tenant's policy.
    pub tenant: TenantSpec,
    /// The devices that it holds, or would get now.
    pub devices: Vec<Function>,
    /// Why it gets none now, or may not be made.
    pub refusal: Option<Failure>,
    /// What libvirt said of the host.
    pub host: HostFacts,
    /// Where the rest is asked.
    pub libvirt: Libvirt,
}

/// What is judged.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// What the machine is to be.
    pub spec: &'a MachineSpec,
    /// The devices that it gets.
    pub devices: &'a [Function],
    /// What libvirt said of the host when it was connected to.
    pub host: &'a HostFacts,
    /// What libvirt can run.
    pub told: &'a Told,
    /// What was read of the host.
    pub facts: &'a Facts,
}

impl Subject<'_> {
    /// Whether the guest's memory is pinned: it gets devices, or wishes for some.
    fn is_pinned(&self) -> bool {
        !self.devices.is_empty() || !self.spec.devices.is_empty()
    }
}

/// Judges a start: the gravest findings first.
pub fn judge(subject: Subject<'_>) -> Vec<Finding> {
    let mut findings = hypervisor::judge(subject);
    findings.extend(memory::judge(subject));
    findings.extend(numa::judge(subject));
    findings.extend(iommu::judge(subject));
    findings.extend(devices::judge(subject));
    gravest_first(&mut findings);
    findings
}

/// Reads what is judged of the host, asks libvirt, and judges. Waits for both: not for the engine's thread.
pub fn look(host: &Host, libvirt: &Libvirt, (spec, devices, of_host): (&MachineSpec, &[Function], &HostFacts)) -> Vec<Finding> {
    let (facts, told) = (Facts::of(host, devices), libvirt.capabilities(of_host.domain_type));
    judge(Subject { spec, devices, host: of_host, told: &told, facts: &facts })
}

/// As [`look`], with what speaks against the machine itself: its tenant's quota, devices that are not free, its volumes.
pub fn examine(host: &Host, case: &Case) -> Vec<Finding> {
    let mut findings = look(host, &case.libvirt, (&case.spec, &case.devices, &case.host));
    findings.extend(case.refusal.as_ref().map(|refusal| of_failure("admission", refusal)));
    let volumes = machine::backing(&case.libvirt, &case.spec, &case.tenant);
    findings.extend(volumes.err().map(|failure| of_failure("storage", &failure)));
    gravest_first(&mut findings);
    findings
}

/// Why a start with these findings is refused; `None` where it is not.
pub fn refusal(findings: &[Finding]) -> Option<Failure> {
    let errors: Vec<_> = findings.iter().filter(|finding| finding.severity == Severity::Error).collect();
    let first = errors.first()?;
    let message = match errors.len() {
        1 => format!("the pre-flight refuses the start: {}", first),
        many => format!("the pre-flight refuses the start, for {many} reasons; the first: {}", first),
    };
    let failure = Failure::new(ErrorKind::PreflightFailed, message).remedy(first.remedy.clone());
    let lines = errors.iter().flat_map(|finding| {
        let heading = format!("{}: {}", finding.code, finding);
        [heading].into_iter().chain(finding.evidence.iter().cloned())
    });
    Some(within_limit(lines).fold(failure, Failure::because))
}

/// The most bytes of evidence that a failure carries.
const MOST_EVIDENCE: usize = 4 << 10;

fn within_limit(lines: impl Iterator<Item = String>) -> impl Iterator<Item = String> {
    lines.scan(0, |size, line| {
        *size += line.len();
        (*size <= MOST_EVIDENCE).then_some(line)
    })
}

fn of_failure(code: &'static str, failure: &Failure) -> Finding {
    let finding = Finding::new(code, Severity::Error, failure.message.clone()).remedy(failure.remedy.clone());
    failure.why.iter().fold(finding, Finding::because)
}

// Within one severity they stay in the order they were judged.
fn gravest_first(findings: &mut [Finding]) {
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
}

/// Bytes in the largest unit that holds at least one of them, for a person.
fn size(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 1 << 40 && bytes.is_multiple_of(1 << 40) => format!("{} TiB", bytes >> 40),
        bytes if bytes >= 1 << 30 => format!("{} GiB", bytes >> 30),
        bytes => format!("{} MiB", bytes >> 20),
    }
}

#[cfg(test)]
mod tests;
