//! `gpuward job`.

use std::io::{IsTerminal, stderr};

use serde::Serialize;
use zbus::OwnedObjectPath;

use super::args::JobCommand;
use super::follow::{made, wait_for};
use super::names::{called, number_of_path};
use super::output::{details, moment, said};
use super::{Context, Stop};
use crate::client::{CallError, ENTRY, JobProxy, Objects, Record, failure_in};
use crate::failure::{ErrorKind, Failure};

/// A job as `--json` prints it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Job {
    job: u64,
    kind: String,
    state: String,
    progress: f64,
    step: String,
    about: Vec<String>,
    result: serde_json::Map<String, serde_json::Value>,
    error: Option<Failure>,
    request_id: String,
    started_by_uid: Option<u64>,
    started_at: Option<String>,
    cancelable: bool,
}

/// What `job list --json` prints.
#[derive(Debug, Serialize)]
struct Jobs {
    jobs: Vec<Job>,
}

/// `gpuward job …`
pub(super) fn run(context: &mut Context, command: JobCommand) -> Result<(), Stop> {
    match command {
        JobCommand::List => list(context),
        JobCommand::Show { job } => show(context, job),
        JobCommand::Watch { job } => watch(context, job),
        JobCommand::Cancel { job } => cancel(context, job),
    }
}

fn list(context: &mut Context) -> Result<(), Stop> {
    let objects = context.client()?.objects()?;
    let told = objects.iter().filter_map(|(path, interfaces)| Some(told(&objects, number_of_path(path)?, interfaces.get("Job")?)));
    let mut jobs: Vec<_> = told.collect();
    jobs.sort_by_key(|job| job.job);
    if context.output.is_json() {
        return Ok(context.output.json(&Jobs { jobs })?);
    }
    let row = |job: &Job| {
        let started = job.started_at.clone().unwrap_or_default();
        vec![job.job.to_string(), job.kind.clone(), job.state.clone(), percent(job), started, job.about.join(" ")]
    };
    let rows = jobs.iter().map(row).collect();
    Ok(context.output.table(&["JOB", "KIND", "STATE", "PROGRESS", "STARTED", "ABOUT"], rows)?)
}

fn show(context: &mut Context, number: u64) -> Result<(), Stop> {
    let objects = context.client()?.objects()?;
    let record = objects.get(path_of(number)?.as_str()).and_then(|interfaces| interfaces.get("Job"));
    let job = told(&objects, number, record.ok_or_else(|| Stop::Failed(Box::new(no_job(number))))?);
    if context.output.is_json() {
        return Ok(context.output.json(&job)?);
    }
    let made = job.result.iter().map(|(key, value)| format!("{key} {}", said(value, |path| called(&objects, path))));
    let lines = [
        ("kind", job.kind.clone()),
        ("state", format!("{}, {}", job.state, percent(&job))),
        ("step", job.step.clone()),
        ("about", job.about.join(" ")),
        ("made", made.collect::<Vec<_>>().join("\n")),
        ("failure", job.error.as_ref().map(ToString::to_string).unwrap_or_default()),
        ("started", job.started_at.clone().unwrap_or_default()),
        ("by uid", job.started_by_uid.map(|uid| uid.to_string()).unwrap_or_default()),
        ("request", job.request_id.clone()),
    ];
    Ok(context.output.line(details(&format!("job {number}"), &lines))?)
}

fn watch(context: &mut Context, number: u64) -> Result<(), Stop> {
    let path = path_of(number)?;
    let client = context.client()?;
    let signals = if stderr().is_terminal() { Some(client.signals()?) } else { None };
    wait_for(client, &path, signals).map_err(|stop| stop.of_missing_object(|| no_job(number)))?.say(context, "done")
}

fn cancel(context: &mut Context, number: u64) -> Result<(), Stop> {
    let path = path_of(number)?;
    let client = context.client()?;
    let canceled = client.wait(async { JobProxy::builder(client.bus()).path(path.clone()).build().await?.cancel().await });
    canceled.map_err(|error| missing(number, error))?;
    if context.output.is_json() {
        return Ok(context.output.json(&serde_json::json!({ "job": number }))?);
    }
    Ok(context.output.line(format!("job {number} is being canceled"))?)
}

fn path_of(job: u64) -> Result<OwnedObjectPath, Stop> {
    let path = OwnedObjectPath::try_from(format!("{ENTRY}/job/{job}"));
    path.map_err(|error| Stop::Wrong(format!("{job} is no job: {error}")))
}

fn missing(job: u64, error: CallError) -> Stop {
    Stop::from(error).of_missing_object(|| no_job(job))
}

fn no_job(job: u64) -> Failure {
    let failure = Failure::new(ErrorKind::Conflict, format!("there is no job {job}, or it ended long ago"));
    failure.remedy("`gpuward job list` names those that are kept")
}

fn told(objects: &Objects, job: u64, record: &Record) -> Job {
    let number = |key| record.number(key).and_then(|number| u64::try_from(number).ok());
    let result = record.record("Result");
    Job {
        job,
        kind: record.text("Kind").into(),
        state: record.text("State").into(),
        progress: record.fraction("Progress"),
        step: record.text("Step").into(),
        about: record.texts("Objects").iter().map(|path| called(objects, path)).collect(),
        error: failure_in(&result),
        result: made(&result),
        request_id: record.text("RequestId").into(),
        started_by_uid: number("StartedByUID"),
        started_at: number("StartedAt").map(moment),
        cancelable: record.flag("Cancelable"),
    }
}

fn percent(job: &Job) -> String {
    format!("{:.0} %", job.progress * 100.0)
}
