//! A specification from TOML to what the bus takes.
//!
//! Only TOML's own mistakes are found here. What a key may be is the service's to say, with the full path of the key.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use zbus::Variant;

use super::Stop;
use super::names::MachineName;
use crate::client::Spec;
use crate::spec::parse_size;

/// Keys whose integers are bytes (`t` on the bus); all others are `u`.
const SIZES: [&str; 1] = ["memory"];

/// Reads the specification of `machine` from `file`. Its name may be left out, but not be another.
pub(super) fn read(file: &Path, machine: &MachineName) -> Result<Spec, Stop> {
    let shown = file.display();
    let text = fs::read_to_string(file).map_err(|error| Stop::Wrong(format!("cannot read {shown}: {error}")))?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(1, |span| text[..span.start].lines().count().max(1));
        Stop::Wrong(format!("{shown}:{line}: {}", error.message()))
    })?;
    convert(table, machine).map_err(|problem| Stop::Wrong(format!("{shown}: {problem}")))
}

fn convert(mut table: toml::Table, machine: &MachineName) -> Result<Spec, String> {
    let name = table.entry("name").or_insert_with(|| machine.name.clone().into());
    if let Some(other) = name.as_str().filter(|name| *name != machine.name) {
        return Err(format!("it is for a machine named {other:?}, not {:?}", machine.name));
    }
    Ok(dictionary(table))
}

fn dictionary(table: toml::Table) -> Spec {
    table.into_iter().map(|(key, value)| (key.clone(), variant(&key, value))).collect()
}

fn variant(key: &str, value: toml::Value) -> Variant<'static> {
    match value {
        toml::Value::String(text) => size(key, &text).map_or_else(|| text.into(), Variant::from),
        toml::Value::Integer(number) => integer(key, number),
        toml::Value::Float(number) => number.into(),
        toml::Value::Boolean(flag) => flag.into(),
        toml::Value::Datetime(moment) => moment.to_string().into(),
        toml::Value::Array(values) => list(values),
        toml::Value::Table(table) => texts(&table).map_or_else(|| dictionary(table).into(), Variant::from),
    }
}

// What is no size stays text, for the service to refuse by its path.
fn size(key: &str, text: &str) -> Option<u64> {
    if SIZES.contains(&key) { parse_size(text) } else { None }
}

fn integer(key: &str, number: i64) -> Variant<'static> {
    let bytes = u64::try_from(number).ok().filter(|_| SIZES.contains(&key));
    let small = u32::try_from(number).ok().map(Variant::from);
    bytes.map(Variant::from).or(small).unwrap_or_else(|| number.into())
}

// Of one type where it can be, so that it has the type that the specification gives (`aa{sv}`, `as`).
fn list(values: Vec<toml::Value>) -> Variant<'static> {
    let tables = values.iter().map(|value| value.as_table().cloned().map(dictionary)).collect::<Option<Vec<_>>>();
    let words = values.iter().map(|value| value.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>();
    match (tables, words) {
        (Some(tables), _) => tables.into(),
        (None, Some(words)) => words.into(),
        (None, None) => values.into_iter().map(|value| variant("", value)).collect::<Vec<_>>().into(),
    }
}

// A table of nothing but text is `a{ss}`: labels.
fn texts(table: &toml::Table) -> Option<HashMap<String, String>> {
    table.iter().map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRAIN: &str = r#"
format = 1
vcpus = 16
memory = "64GiB"
kill-after-deadline = false
labels = { job = "4711" }
[cpu]
mode = "host-model"
pin = false
[[device]]
kind = "gpu"
count = 2
"#;

    fn convert_text(text: &str) -> Result<Spec, String> {
        convert(text.parse().unwrap(), &"train-1".parse().unwrap())
    }

    #[test]
    fn values_have_the_types_of_the_bus() {
        let spec = convert_text(TRAIN).unwrap();
        let signatures = [
            ("name", "s"),
            ("format", "u"),
            ("memory", "t"),
            ("kill-after-deadline", "b"),
            ("labels", "a{ss}"),
            ("cpu", "a{sv}"),
            ("device", "aa{sv}"),
        ];
        for (key, signature) in signatures {
            assert_eq!(spec[key].value_signature().to_string(), signature, "{key}");
        }
        assert_eq!(spec["memory"], Variant::from(64u64 << 30));
        assert_eq!(spec["name"], Variant::from("train-1"));
    }

    #[test]
    fn what_is_wrong_is_left_for_the_service_to_refuse() {
        let spec = convert_text("memory = '64 gigs'\nvcpus = -1\nsurprise = 1979-05-27\nmixed = [1, 'a']").unwrap();
        let signatures = [("memory", "s"), ("vcpus", "x"), ("surprise", "s"), ("mixed", "av")];
        for (key, signature) in signatures {
            assert_eq!(spec[key].value_signature().to_string(), signature, "{key}");
        }
    }

    #[test]
    fn a_specification_of_another_machine_is_refused() {
        assert_eq!(convert_text("name = 'other'").unwrap_err(), r#"it is for a machine named "other", not "train-1""#);
        assert!(convert_text("name = 'train-1'").is_ok());
    }
}
