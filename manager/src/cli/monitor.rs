//! `gpuward monitor`: events and changes as they come, one a line.

use std::collections::{BTreeMap, HashMap};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::{Map, Value};
use zbus::export::ordered_stream::OrderedStreamExt;
use zbus::{Message, MessageStream, OwnedObjectPath};

use super::names::{machine_name, subject_of_path};
use super::output::{moment, safe, said};
use super::{Context, Stop};
use crate::client::{Dict, Objects, Record, to_json};

/// One thing that happened.
#[derive(Debug, Serialize)]
struct Line {
    time: String,
    /// An event's kind, or `changed`, `added`, `removed`, `job-new`, `job-removed`, `service-gone`, `service-there`.
    what: String,
    subject: String,
    detail: Map<String, Value>,
}

/// What only programs want to know of a change.
const PLUMBING: [&str; 4] = ["generation", "cancelable", "claims", "objects"];

/// Prints what happens until the bus goes away.
pub(super) fn run(context: &mut Context) -> Result<(), Stop> {
    let client = context.client()?;
    let mut signals = client.signals()?;
    let mut owners = client.owners()?;
    let mut names = Names::of(&client.objects()?);
    loop {
        let client = context.client()?;
        let message = client.wait(next(&mut signals, &mut owners))?;
        names.learn(&message);
        let Some(line) = line_of(&message, &names) else { continue };
        if context.output.is_json() {
            context.output.json(&line)?;
        } else if let Some(text) = text(&line, &names) {
            context.output.line(text)?;
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

/// What machines are called, by object path. They are remembered when they have gone: what is said of them comes later.
#[derive(Debug, Default)]
struct Names(BTreeMap<String, String>);

impl Names {
    fn of(objects: &Objects) -> Self {
        let machines = objects.iter().filter_map(|(path, interfaces)| Some((path, interfaces.get("Machine")?)));
        Self(machines.map(|(path, machine)| (path.clone(), machine_name(objects, machine))).collect())
    }

    fn learn(&mut self, message: &Message) {
        if message.header().member().is_none_or(|member| member.as_str() != "InterfacesAdded") {
            return;
        }
        let Ok((path, interfaces)) = message.body().deserialize::<Added>() else { return };
        let properties = interfaces.into_iter().filter_map(|(name, properties)| {
            let name = name.strip_prefix("org.gpuward1.")?.to_owned();
            Some((name, Record(properties)))
        });
        let objects = Objects::from([(path.to_string(), properties.collect())]);
        self.0.extend(Self::of(&objects).0);
    }

    fn call(&self, path: &str) -> String {
        self.0.get(path).cloned().unwrap_or_else(|| subject_of_path(path))
    }
}

/// The body of `InterfacesAdded`.
type Added = (OwnedObjectPath, HashMap<String, Dict>);

fn line_of(message: &Message, names: &Names) -> Option<Line> {
    let header = message.header();
    let (path, member) = (header.path()?.as_str(), header.member()?.as_str());
    let (what, subject, detail) = read(message, path, member)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    Some(Line { time: moment(now), what, subject: names.call(&subject), detail })
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
            let (subject, _) = body.deserialize::<Added>().ok()?;
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

// Nothing for a change of what is of no use to a person.
fn text(line: &Line, names: &Names) -> Option<String> {
    let details = line.detail.iter().filter(|(key, _)| !PLUMBING.contains(&key.as_str()));
    let details = details.map(|(key, value)| (key, said(value, |path| names.call(path)))).filter(|(_, value)| !value.is_empty());
    let details = details.map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join("  ");
    if line.what == "changed" && details.is_empty() {
        return None;
    }
    let text = format!("{}  {}  {}  {details}", line.time, line.what, line.subject);
    Some(safe(&text).trim_end().to_owned())
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
        let names = Names::default();
        let line = line_of(&message, &names).unwrap();
        assert_eq!((line.what.as_str(), line.subject.as_str()), ("quarantined", "0000:41:00.0"));
        let text = text(&line, &names).unwrap();
        assert!(text.ends_with("quarantined  0000:41:00.0  reason=reset failed\\n"), "{text}");
    }
}
