//! `gpuward history`: what befell a device, newest first.

use std::collections::BTreeMap;

use serde::Serialize;
use zbus::Variant;

use super::args::History;
use super::output::{moment, safe};
use super::{Context, Stop};
use crate::client::{DeviceProxy, ManagerProxy, Options, Record, text_of};

/// What `history --json` prints.
#[derive(Debug, Serialize)]
struct Told {
    device: String,
    entries: Vec<Entry>,
}

#[derive(Debug, Serialize)]
struct Entry {
    /// Seconds since 1970.
    time: u64,
    kind: String,
    text: String,
    details: BTreeMap<String, String>,
}

/// `gpuward history DEVICE`
pub(super) fn run(context: &mut Context, of: &History) -> Result<(), Stop> {
    let mut options = Options::from([("limit", Variant::from(of.limit))]);
    options.extend(of.before.map(|before| ("before", Variant::from(before))));
    let (client, address) = (context.client()?, of.device.to_string());
    let told = client.wait(async {
        let path = ManagerProxy::new(client.bus()).await?.get_device(&address).await?;
        DeviceProxy::builder(client.bus()).path(path).build().await?.get_history(options).await
    })?;
    let entries = told.into_iter().map(|record| entry(&Record(record))).collect();
    let told = Told { device: address, entries };
    if context.output.is_json() {
        return Ok(context.output.json(&told)?);
    }
    told.entries.iter().flat_map(lines).try_for_each(|line| Ok(context.output.line(line)?))
}

fn entry(record: &Record) -> Entry {
    let time = record.number("time").and_then(|time| u64::try_from(time).ok()).unwrap_or_default();
    let details = record.record("details").0.iter().map(|(key, value)| (key.clone(), text_of(value).to_owned())).collect();
    Entry { time, kind: record.text("kind").into(), text: record.text("text").into(), details }
}

// What happened on a line, then what belongs to it, then each step on its own.
fn lines(entry: &Entry) -> Vec<String> {
    let mut lines = vec![format!("{}  {:<18}  {}", moment(entry.time), safe(&entry.kind), safe(&entry.text))];
    let (steps, others): (Vec<_>, Vec<_>) = entry.details.iter().partition(|(key, _)| key.starts_with("step-"));
    let others: Vec<_> = others.iter().map(|(key, value)| format!("{} {}", safe(key), safe(value))).collect();
    lines.extend((!others.is_empty()).then(|| format!("    {}", others.join(", "))));
    lines.extend(steps.iter().map(|(_, step)| format!("    {}", safe(step))));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_told_with_its_steps_in_order() {
        let details = [("step-02", "reset: flr (104 ms)"), ("step-01", "wake: D0 (0 ms)"), ("claim", "c1"), ("epoch", "4")];
        let details = details.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let entry = Entry { time: 0, kind: "sanitised".into(), text: "reset (flr)".into(), details };
        let expected = [
            "1970-01-01T00:00:00Z  sanitised           reset (flr)",
            "    claim c1, epoch 4",
            "    wake: D0 (0 ms)",
            "    reset: flr (104 ms)",
        ];
        assert_eq!(lines(&entry), expected);
    }
}
