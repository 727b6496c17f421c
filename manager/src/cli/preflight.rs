//! `gpuward preflight`: what speaks against starting a machine.

use std::path::Path;

use serde::Serialize;
use zbus::Variant;

use super::names::MachineName;
use super::output::safe;
use super::{Context, Stop, spec};
use crate::client::{ManagerProxy, Record, Spec};

/// What `preflight --json` prints.
#[derive(Debug, Serialize)]
struct Report {
    findings: Vec<Finding>,
}

#[derive(Debug, Serialize)]
struct Finding {
    code: String,
    severity: String,
    subject: String,
    message: String,
    evidence: Vec<String>,
    remedy: String,
}

/// `gpuward preflight`
pub(super) fn run(context: &mut Context, name: &MachineName, file: Option<&Path>) -> Result<(), Stop> {
    let mut request = Spec::from([("tenant".to_owned(), Variant::from(name.tenant.clone()))]);
    match file {
        Some(file) => request.insert("spec".to_owned(), spec::read(file, name)?.into()),
        None => request.insert("machine".to_owned(), name.name.clone().into()),
    };
    let client = context.client()?;
    let told = client.wait(async { ManagerProxy::new(client.bus()).await?.preflight(request).await })?;
    let report = Report { findings: told.into_iter().map(Record).map(|record| finding(&record)).collect() };
    let is_refused = report.findings.iter().any(|finding| finding.severity == "error");
    if context.output.is_json() {
        context.output.json(&report)?;
    } else {
        report.findings.iter().flat_map(lines).try_for_each(|line| context.output.line(line))?;
        let verdict = if is_refused { "would be refused" } else { "would be tried; nothing was changed" };
        context.output.line(format!("a start of {name} {verdict}"))?;
    }
    if is_refused { Err(Stop::Refused) } else { Ok(()) }
}

fn finding(record: &Record) -> Finding {
    let text = |key| record.text(key).to_owned();
    Finding {
        code: text("code"),
        severity: text("severity"),
        subject: text("subject"),
        message: text("message"),
        evidence: record.texts("evidence"),
        remedy: text("remedy"),
    }
}

fn lines(finding: &Finding) -> Vec<String> {
    let subject = if finding.subject.is_empty() { String::new() } else { format!("{}: ", safe(&finding.subject)) };
    let mut lines = vec![format!("{:<8} {subject}{} ({})", finding.severity, safe(&finding.message), safe(&finding.code))];
    lines.extend(finding.evidence.iter().map(|fact| format!("  why    {}", safe(fact))));
    lines.extend((!finding.remedy.is_empty()).then(|| format!("  remedy {}", safe(&finding.remedy))));
    lines
}
