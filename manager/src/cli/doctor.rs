//! `gpuward doctor`: what stands between this host and handing out its devices.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Serialize;
use vfio::{Host, Inventory};

use super::args::Tree;
use super::output::safe;
use super::{Context, Stop};
use crate::client::{ManagerProxy, Options, Record};
use crate::config::{Config, Use};
use crate::doctor;

/// What `doctor --json` prints.
#[derive(Debug, Serialize)]
struct Report {
    findings: Vec<Finding>,
}

#[derive(Debug, Serialize)]
struct Finding {
    check: String,
    subject: String,
    severity: String,
    message: String,
    evidence: Vec<String>,
    remedy: String,
}

/// `gpuward doctor`
pub(super) fn run(context: &mut Context, tree: &Tree) -> Result<(), Stop> {
    let findings = match &tree.root {
        Some(root) => of_tree(root)?,
        None => ask(context)?,
    };
    let report = Report { findings };
    let is_ill = report.findings.iter().any(|finding| finding.severity == "problem");
    if context.output.is_json() {
        context.output.json(&report)?;
    } else {
        for line in report.findings.iter().flat_map(lines) {
            context.output.line(line)?;
        }
    }
    if is_ill { Err(Stop::Said) } else { Ok(()) }
}

fn ask(context: &mut Context) -> Result<Vec<Finding>, Stop> {
    let client = context.client()?;
    let told = client.wait(async { ManagerProxy::new(client.bus()).await?.doctor(Options::new()).await })?;
    let finding = |record: Record| {
        let text = |key| record.text(key).to_owned();
        let (check, subject, severity) = (text("check"), text("subject"), text("severity"));
        Finding { check, subject, severity, message: text("message"), evidence: record.texts("evidence"), remedy: text("remedy") }
    };
    Ok(told.into_iter().map(Record).map(finding).collect())
}

// As the configuration in the tree says; without one everything that could be handed out is looked at.
fn of_tree(root: &Path) -> Result<Vec<Finding>, Stop> {
    if !root.join("sys").is_dir() {
        return Err(Stop::Wrong(format!("{} is no tree of a host: there is no sys below it", root.display())));
    }
    let host = Host::captured(root);
    let inventory = Inventory::observe(&host, 0);
    let file = root.join("etc/gpuward/gpuward.toml");
    let config = Config::load(&file).map_err(|_| Stop::Wrong(format!("gpuward config check {} says what is wrong", file.display())))?;
    let has_rules = !config.devices.is_empty();
    let is_wanted = |function: &&vfio::Function| !has_rules || config.use_in(&inventory, function) != Use::Observe;
    let wanted: BTreeSet<_> = inventory.devices.values().filter(is_wanted).map(|function| function.address).collect();
    Ok(doctor::examine(&host, &inventory, &wanted).into_iter().map(finding).collect())
}

fn finding(finding: doctor::Finding) -> Finding {
    let doctor::Finding { check, subject, severity, message, evidence, remedy } = finding;
    Finding { check: check.into(), subject, severity: severity.word().into(), message, evidence, remedy }
}

fn lines(finding: &Finding) -> Vec<String> {
    let subject = if finding.subject.is_empty() { String::new() } else { format!("{}: ", safe(&finding.subject)) };
    let mut lines = vec![format!("{:<8} {subject}{} ({})", finding.severity, safe(&finding.message), safe(&finding.check))];
    lines.extend(finding.evidence.iter().map(|fact| format!("  why    {}", safe(fact))));
    lines.extend((!finding.remedy.is_empty()).then(|| format!("  remedy {}", safe(&finding.remedy))));
    lines
}
