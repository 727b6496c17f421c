//! Asking for a change, and waiting for its job.

use std::io::{IsTerminal, stderr};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use serde_json::{Map, Value};
use zbus::export::ordered_stream::OrderedStreamExt;
use zbus::{Connection, MessageStream, OwnedObjectPath, Variant, fdo};

use super::args::Request;
use super::names::number_of_path;
use super::{Context, Stop};
use crate::client::{Client, JobProxy, Options, Record, failure_in, to_json};
use crate::failure::{ErrorKind, Failure};

/// Keys of a job's result that tell how it ended rather than what it made.
const ENDING: [&str; 5] = ["state", "error", "message", "why", "remedy"];

/// A job that has ended well, or that is not waited for.
#[derive(Debug)]
pub(super) struct Followed {
    /// Its number.
    pub job: u64,
    /// What it made; `None` where it was not waited for.
    pub made: Option<Map<String, Value>>,
}

/// A job as `--json` prints what came of it.
#[derive(Debug, Serialize)]
struct Outcome {
    job: u64,
    state: Option<&'static str>,
    result: Option<Map<String, Value>>,
}

/// What a job made, of the dictionary that tells how it ended.
pub(super) fn made(ended: &Record) -> Map<String, Value> {
    let made = ended.0.iter().filter(|(key, _)| !ENDING.contains(&key.as_str()));
    made.map(|(key, value)| (key.clone(), to_json(value))).collect()
}

impl Request {
    /// What goes into the options of the call.
    pub(super) fn options(&self) -> Options<'static> {
        let id = self.request_id.clone().map(|id| ("request-id", Variant::from(id)));
        id.into_iter().collect()
    }
}

/// Calls what answers with a job, and waits for it unless told not to.
pub(super) fn follow<F>(context: &mut Context, request: &Request, call: impl FnOnce(Connection) -> F) -> Result<Followed, Stop>
where
    F: Future<Output = zbus::Result<OwnedObjectPath>>,
{
    let shown = stderr().is_terminal() && !request.no_wait;
    let client = context.client()?;
    // Before the call: what the job does first would be missed.
    let signals = if shown { Some(client.signals()?) } else { None };
    let path = client.wait(call(client.bus().clone()))?;
    if request.no_wait {
        return Ok(Followed { job: number(&path), made: None });
    }
    wait_for(client, &path, signals)
}

/// Waits until the job at `path` is over.
pub(super) fn wait_for(client: &Client, path: &OwnedObjectPath, signals: Option<MessageStream>) -> Result<Followed, Stop> {
    let bar = Progress::new(number(path));
    let ended = client.wait(async {
        let job = JobProxy::builder(client.bus()).path(path.clone()).build().await?;
        let Some(mut signals) = signals else { return job.wait(Options::new()).await };
        let wait = job.wait(Options::new());
        tokio::pin!(wait);
        loop {
            tokio::select! {
                ended = &mut wait => return ended,
                Some(Ok(signal)) = signals.next() => bar.update(path, &signal),
            }
        }
    });
    bar.0.finish_and_clear();
    outcome(number(path), Record(ended?))
}

fn outcome(job: u64, ended: Record) -> Result<Followed, Stop> {
    if let Some(failure) = failure_in(&ended) {
        return Err(Stop::Failed(Box::new(failure)));
    }
    match ended.text("state") {
        "done" => Ok(Followed { job, made: Some(made(&ended.record("result"))) }),
        "canceled" => Err(Stop::Failed(Box::new(Failure::new(ErrorKind::Canceled, format!("job {job} was canceled"))))),
        other => Err(Stop::Failed(Box::new(Failure::new(ErrorKind::Internal, format!("job {job} ended as {other:?} without a reason"))))),
    }
}

fn number(path: &OwnedObjectPath) -> u64 {
    number_of_path(path.as_str()).unwrap_or_default()
}

impl Followed {
    /// Says what came of it: JSON, the number of a job that goes on, or `text`.
    pub(super) fn say(&self, context: &mut Context, text: &str) -> Result<(), Stop> {
        if context.output.is_json() {
            let state = self.made.as_ref().map(|_| "done");
            return Ok(context.output.json(&Outcome { job: self.job, state, result: self.made.clone() })?);
        }
        let line = if self.made.is_some() { format!("{text} (job {})", self.job) } else { format!("job {}", self.job) };
        Ok(context.output.line(line)?)
    }
}

/// The progress line on a terminal's standard error.
struct Progress(ProgressBar);

impl Progress {
    fn new(job: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(100), ProgressDrawTarget::stderr()).with_prefix(format!("job {job}"));
        // The template is ours: where it is wrong, the tests see the default style.
        if let Ok(style) = ProgressStyle::with_template("{prefix}  {bar:20} {percent} %  {elapsed}  {msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(250));
        Self(bar)
    }

    fn update(&self, path: &OwnedObjectPath, signal: &zbus::Message) {
        let header = signal.header();
        if header.path().is_none_or(|about| about.as_str() != path.as_str()) {
            return;
        }
        let Some(changed) = fdo::PropertiesChanged::from_message(signal.clone()) else { return };
        let Ok(changed) = changed.args() else { return };
        if let Some(progress) = changed.changed_properties().get("Progress").and_then(|value| f64::try_from(value).ok()) {
            self.0.set_position((progress.clamp(0.0, 1.0) * 100.0) as u64);
        }
        if let Some(step) = changed.changed_properties().get("Step") {
            self.0.set_message(super::output::safe(crate::client::text_of(step)).into_owned());
        }
    }
}
