//! `gpuward tenant`.

use std::fs;
use std::io::{BufRead, IsTerminal, Write, stderr, stdin};
use std::path::Path;

use serde::Serialize;
use zbus::{Connection, OwnedObjectPath};

use super::args::{Request, TenantApply, TenantCommand};
use super::follow::follow;
use super::output::details;
use super::{Context, Stop};
use crate::client::{ManagerProxy, Record, TenantProxy};
use crate::failure::ErrorKind;
use crate::spec::{Node, TenantSpec};

mod table;

use table::{Line, lines_of, lines_told, resolve, to_bus};

/// A tenant as `--json` prints it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Tenant {
    tenant: String,
    name: String,
    policy: serde_json::Value,
    usage: serde_json::Value,
}

/// What `tenant list --json` prints.
#[derive(Debug, Serialize)]
struct Tenants {
    tenants: Vec<Tenant>,
}

/// What `tenant apply --dry-run --json` prints.
#[derive(Debug, Serialize)]
struct Difference {
    name: String,
    /// Whether there is no tenant of that name yet.
    new: bool,
    changes: Vec<Changed>,
}

/// A key that would change.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Changed {
    key: &'static str,
    from: String,
    to: String,
}

/// `gpuward tenant …`
pub(super) fn run(context: &mut Context, command: TenantCommand) -> Result<(), Stop> {
    match command {
        TenantCommand::List => list(context),
        TenantCommand::Show { name } => show(context, &name),
        TenantCommand::Apply(wanted) => apply(context, &wanted),
        TenantCommand::Remove { name, request } => remove(context, &name, &request),
    }
}

fn list(context: &mut Context) -> Result<(), Stop> {
    let objects = context.client()?.visible()?;
    let mut tenants: Vec<_> = objects.iter().filter_map(|(path, object)| Some((path, object.get("Tenant")?))).collect();
    tenants.sort_by_key(|(_, record)| record.text("Name").to_owned());
    if context.output.is_json() {
        let tenants = tenants.iter().map(|(path, record)| told(path, record)).collect();
        return Ok(context.output.json(&Tenants { tenants })?);
    }
    let row = |(_, record): &(&String, &Record)| {
        let (quota, usage) = (record.record("Quota"), record.record("Usage"));
        let of = |key| table::used(&usage, &quota, key);
        let owners = table::owners_told(&record.record("Owners"));
        vec![record.text("Name").into(), owners, of("gpus"), of("vfs"), of("machines"), of("vcpus"), of("memory")]
    };
    let rows = tenants.iter().map(row).collect();
    Ok(context.output.table(&["TENANT", "OWNERS", "GPUS", "VFS", "MACHINES", "VCPUS", "MEMORY"], rows)?)
}

fn show(context: &mut Context, name: &str) -> Result<(), Stop> {
    let client = context.client()?;
    let path = client.wait(find(client.bus(), name))?;
    let record = client.properties(path.as_str(), "Tenant")?;
    if context.output.is_json() {
        return Ok(context.output.json(&told(path.as_str(), &record))?);
    }
    let (quota, usage) = (record.record("Quota"), record.record("Usage"));
    let line = |line: Line| {
        let key = line.key.strip_prefix("quota.");
        let text = key.map_or(line.text, |key| format!("{} used", table::used(&usage, &quota, key)));
        (line.key, text)
    };
    let lines: Vec<_> = lines_told(&record).into_iter().map(line).collect();
    Ok(context.output.line(details(name, &lines))?)
}

fn told(path: &str, record: &Record) -> Tenant {
    let lines = lines_told(record).into_iter().map(|line| (line.key.to_owned(), line.text.into()));
    let usage = record.record("Usage");
    let usage = usage.0.iter().map(|(key, value)| (key.clone(), crate::client::to_json(value)));
    Tenant {
        tenant: path.rsplit('/').next().unwrap_or_default().into(),
        name: record.text("Name").into(),
        policy: serde_json::Value::Object(lines.collect()),
        usage: serde_json::Value::Object(usage.collect()),
    }
}

async fn find(bus: &Connection, name: &str) -> zbus::Result<OwnedObjectPath> {
    ManagerProxy::new(bus).await?.get_tenant(name).await
}

// What is there, or nothing: that there is none is no failure here.
fn existing(context: &mut Context, name: &str) -> Result<Option<(OwnedObjectPath, Record)>, Stop> {
    let client = context.client()?;
    let path = match client.wait(find(client.bus(), name)).map_err(Stop::from) {
        Ok(path) => path,
        Err(Stop::Failed(failure)) if failure.kind == ErrorKind::NoSuchTenant => return Ok(None),
        Err(stop) => return Err(stop),
    };
    let record = client.properties(path.as_str(), "Tenant")?;
    Ok(Some((path, record)))
}

fn apply(context: &mut Context, wanted: &TenantApply) -> Result<(), Stop> {
    let (spec, sent) = read(&wanted.file)?;
    let name = spec.name.clone();
    let there = existing(context, &name)?;
    let changes = difference(there.as_ref().map(|(_, record)| record), &spec);
    let new = there.is_none();
    if !context.output.is_json() || wanted.dry_run || changes.is_empty() {
        say(context, &Difference { name: name.clone(), new, changes: changes.clone() })?;
    }
    if wanted.dry_run || changes.is_empty() || !agreed(wanted)? {
        return Ok(());
    }
    let mut options = wanted.request.options();
    if let Some((_, record)) = &there {
        // What was shown is what is changed.
        let seen = record.number("Generation").and_then(|generation| u64::try_from(generation).ok()).unwrap_or_default();
        options.insert("if-generation", seen.into());
    }
    let call = |bus: Connection| async move {
        match there {
            None => ManagerProxy::new(&bus).await?.create_tenant(sent, options).await,
            Some((path, _)) => TenantProxy::builder(&bus).path(path).build().await?.set_policy(sent, options).await,
        }
    };
    let done = if new { "is made" } else { "is changed" };
    follow(context, &wanted.request, call)?.say(context, &format!("tenant {name} {done}"))
}

fn read(file: &Path) -> Result<(TenantSpec, crate::client::Spec), Stop> {
    let shown = file.display();
    let text = fs::read_to_string(file).map_err(|error| Stop::Wrong(format!("cannot read {shown}: {error}")))?;
    let text = resolve(&text).map_err(|problem| Stop::Wrong(format!("{shown}: {problem}")))?;
    let parsed = Node::from_toml(&text).and_then(TenantSpec::parse);
    let (id, spec) = parsed.map_err(|failure| Stop::Failed(Box::new(failure.because(format!("in {shown}")))))?;
    let sent = to_bus(id, &spec);
    Ok((spec, sent))
}

fn difference(there: Option<&Record>, spec: &TenantSpec) -> Vec<Changed> {
    let before = there.map(lines_told).unwrap_or_default();
    let was = |key| before.iter().find(|line| line.key == key).map(|line| line.text.clone()).unwrap_or_default();
    let changed = |line: Line| Changed { key: line.key, from: was(line.key), to: line.text };
    let changes = lines_of(spec).into_iter().map(changed);
    changes.filter(|change| there.is_none() || change.from != change.to).collect()
}

fn say(context: &mut Context, difference: &Difference) -> Result<(), Stop> {
    if context.output.is_json() {
        return Ok(context.output.json(difference)?);
    }
    if difference.changes.is_empty() {
        return Ok(context.output.line(format!("nothing to do: tenant {} is as wished already", difference.name))?);
    }
    let row = |change: &Changed| {
        let text = if difference.new { change.to.clone() } else { format!("{} → {}", or_none(&change.from), or_none(&change.to)) };
        vec![change.key.into(), text]
    };
    let head = if difference.new { "is new" } else { "changes" };
    context.output.line(format!("tenant {} {head}", difference.name))?;
    Ok(context.output.table(&[], difference.changes.iter().map(row).collect())?)
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "none" } else { text }
}

// A person is asked; a script has to say beforehand that it means it.
fn agreed(wanted: &TenantApply) -> Result<bool, Stop> {
    if wanted.yes {
        return Ok(true);
    }
    if !stdin().is_terminal() || !stderr().is_terminal() {
        return Err(Stop::Wrong("nobody can be asked here: give --yes to apply this, or --dry-run to see it only".into()));
    }
    eprint!("apply this? [y/N] ");
    stderr().flush()?;
    let mut answer = String::new();
    stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "yes"))
}

fn remove(context: &mut Context, name: &str, request: &Request) -> Result<(), Stop> {
    let (wanted, options) = (name.to_owned(), request.options());
    let call = |bus: Connection| async move {
        let path = find(&bus, &wanted).await?;
        TenantProxy::builder(&bus).path(path).build().await?.remove(options).await
    };
    follow(context, request, call)?.say(context, &format!("tenant {name} is forgotten"))
}
