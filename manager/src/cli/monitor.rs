//! `gpuward monitor`: events and changes as they come, one a line.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::{Map, Value};
use zbus::export::ordered_stream::OrderedStreamExt;
use zbus::{Message, MessageStream, OwnedObjectPath};

use super::names::subject_of_path;
use super::output::{moment, safe};
use super::{Context, Stop};
use crate::client::{Dict, to_json};

/// One thing that happened.
#[derive(Debug, Serialize)]
struct Line {
    time: String,
    /// An event's kind, or `changed`, `added`, `removed`, `job-new`, `job-removed`, `service-gone`, `service-there`.
    what: String,
    subject: String,
    detail: Map<String, Value>,
}

/// Prints what happens until the bus goes away.
pub(super) fn run(context: &mut Context) -> Result<(), Stop> {
    let client = context.client()?;
    let mut signals = client.signals()?;
    let mut owners = client.owners()?;
    client.owner()?;
    loop {
        let client = context.client()?;
        let message = client.wait(next(&mut signals, &mut owners))?;
        let Some(line) = line_of(&message) else { continue };
        if context.output.is_json() {
            context.output.json(&line)?;
        } else {
            context.output.line(text(&line))?;
        }
    }
}

async fn next(signals: &mut MessageStream, owners: &mut MessageStream) -> zbus::Result<Message> {
    let message = tokio::select! {
        message = signals.next() => message,
        message = owners.next() => message,
    };
    message.unwrap_or_else(|| Err(zbus::fdo::Error::Disconnected("the bus has gone".into()).into()))
}

fn line_of(message: &Message) -> Option<Line> {
    let header = message.header();
    let (path, member) = (header.path()?.as_str(), header.member()?.as_str());
    let (what, subject, detail) = read(message, path, member)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    Some(Line { time: moment(now), what, subject: subject_of_path(&subject), detail })
}

// What happened, the object path it happened to, and the details.
fn read(message: &Message, path: &str, member: &str) -> Option<(String, String, Map<String, Value>)> {
    let body = message.body();
    match member {
        "Event" => {
            let (_, kind, subject, detail) = body.deserialize::<(u64, String, OwnedObjectPath, Dict)>().ok()?;
            Some((kind, subject.to_string(), json(&detail)))
        }
        "PropertiesChanged" => {
            let (_, changed, _) = body.deserialize::<(String, Dict, Vec<String>)>().ok()?;
            Some(("changed".into(), path.into(), json(&changed)))
        }
        "InterfacesAdded" => {
            let (subject, _) = body.deserialize::<(OwnedObjectPath, std::collections::HashMap<String, Dict>)>().ok()?;
            Some(("added".into(), subject.to_string(), Map::new()))
        }
        "InterfacesRemoved" => {
            let (subject, _) = body.deserialize::<(OwnedObjectPath, Vec<String>)>().ok()?;
            Some(("removed".into(), subject.to_string(), Map::new()))
        }
        "JobNew" => {
            let (_, job, detail) = body.deserialize::<(u64, OwnedObjectPath, Dict)>().ok()?;
            Some(("job-new".into(), job.to_string(), json(&detail)))
        }
        "JobRemoved" => {
            let (_, job, result, detail) = body.deserialize::<(u64, OwnedObjectPath, String, Dict)>().ok()?;
            let mut detail = json(&detail);
            detail.insert("result".into(), result.into());
            Some(("job-removed".into(), job.to_string(), detail))
        }
        "NameOwnerChanged" => {
            let (name, _, new) = body.deserialize::<(String, String, String)>().ok()?;
            let what = if new.is_empty() { "service-gone" } else { "service-there" };
            Some((what.into(), name, Map::new()))
        }
        _ => None,
    }
}

fn json(dict: &Dict) -> Map<String, Value> {
    dict.iter().map(|(key, value)| (kebab(key), to_json(value))).collect()
}

fn text(line: &Line) -> String {
    let details = line.detail.iter().map(|(key, value)| (key, shown(value)));
    let details = details.filter(|(key, value)| *key != "generation" && !value.is_empty());
    let details = details.map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join("  ");
    let text = format!("{}  {}  {}  {details}", line.time, line.what, line.subject);
    safe(&text).trim_end().to_owned()
}

// Object paths as what they are about; lists without brackets.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => subject_of_path(text),
        Value::Array(values) => values.iter().map(shown).collect::<Vec<_>>().join(","),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => value.to_string(),
    }
}

/// The name of a property as a key: `StartedByUID` is `started-by-uid`.
fn kebab(name: &str) -> String {
    let letters: Vec<char> = name.chars().collect();
    let mut key = String::new();
    for (index, letter) in letters.iter().enumerate() {
        let after_lower = index > 0 && letters[index - 1].is_lowercase();
        let before_lower = index > 0 && letters[index - 1].is_uppercase() && letters.get(index + 1).is_some_and(|next| next.is_lowercase());
        if letter.is_uppercase() && (after_lower || before_lower) {
            key.push('-');
        }
        key.extend(letter.to_lowercase());
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_become_keys() {
        let cases = [
            ("State", "state"),
            ("HeldBy", "held-by"),
            ("StartedByUID", "started-by-uid"),
            ("UUIDOfIt", "uuid-of-it"),
            ("request-id", "request-id"),
        ];
        for (name, key) in cases {
            assert_eq!(kebab(name), key);
        }
    }

    #[test]
    fn an_event_is_a_line() {
        let subject = OwnedObjectPath::try_from("/org/gpuward1/device/pci_0000_41_00_0").unwrap();
        let detail = Dict::from([("reason".to_owned(), zbus::Variant::from("reset failed\n").try_to_owned().unwrap())]);
        let message = Message::signal("/org/gpuward1", "org.gpuward1.Manager", "Event");
        let message = message.build(&(7u64, "quarantined", subject, detail)).unwrap();
        let line = line_of(&message).unwrap();
        assert_eq!((line.what.as_str(), line.subject.as_str()), ("quarantined", "0000:41:00.0"));
        assert!(text(&line).ends_with("quarantined  0000:41:00.0  reason=reset failed\\n"), "{}", text(&line));
    }
}
