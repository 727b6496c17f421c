//! Dictionaries as the service answers them, read without trusting their types.

use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as NotAWord, StrDeserializer};
use zbus::names::OwnedErrorName;
use zbus::{Message, Variant};

use super::{Dict, ERROR_PREFIX};
use crate::failure::{ErrorKind, Failure};

/// A dictionary of the service. A missing key, or one of another type than asked for, reads as nothing.
#[derive(Debug, Default)]
pub struct Record(pub Dict);

impl Record {
    /// The value of `key`.
    pub fn value(&self, key: &str) -> Option<&Variant<'static>> {
        self.0.get(key).map(|value| -> &Variant<'static> { value })
    }

    /// Text or an object path; empty where there is none.
    pub fn text(&self, key: &str) -> &str {
        self.value(key).map_or("", text_of)
    }

    /// An integer of any size.
    pub fn number(&self, key: &str) -> Option<i128> {
        self.value(key).and_then(number_of)
    }

    /// A number between 0 and 1, or any other.
    pub fn fraction(&self, key: &str) -> f64 {
        self.value(key).and_then(|value| f64::try_from(value).ok()).unwrap_or(0.0)
    }

    /// True or false; false where there is none.
    pub fn flag(&self, key: &str) -> bool {
        self.value(key).is_some_and(|value| bool::try_from(value).unwrap_or(false))
    }

    /// A list of texts or object paths.
    pub fn texts(&self, key: &str) -> Vec<String> {
        let Some(Variant::Array(array)) = self.value(key) else { return Vec::new() };
        array.iter().map(|element| text_of(element).to_owned()).collect()
    }

    /// A dictionary of text to anything.
    pub fn record(&self, key: &str) -> Self {
        self.value(key).map(record_of).unwrap_or_default()
    }

    /// A list of dictionaries.
    pub fn records(&self, key: &str) -> Vec<Self> {
        let Some(Variant::Array(array)) = self.value(key) else { return Vec::new() };
        array.iter().map(record_of).collect()
    }
}

/// The failure that a dictionary tells of, if it does.
pub fn failure_in(record: &Record) -> Option<Failure> {
    let kind = kind(record.text("error"))?;
    let message = Some(record.text("message")).filter(|message| !message.is_empty()).unwrap_or("the service gave no reason");
    Some(Failure { kind, message: message.into(), why: record.texts("why"), remedy: record.text("remedy").into() })
}

/// The failure that an error reply tells of; `None` where its name is none of ours.
pub(super) fn failure_of_reply(name: &OwnedErrorName, text: Option<&str>, reply: &Message) -> Option<Failure> {
    let kind = kind(name.as_str().strip_prefix(ERROR_PREFIX)?).unwrap_or(ErrorKind::Internal);
    let body = reply.body();
    let detail = body.deserialize::<(String, Dict)>().map(|(_, detail)| Record(detail)).unwrap_or_default();
    let message = text.unwrap_or("the service gave no reason");
    Some(Failure { kind, message: message.into(), why: detail.texts("why"), remedy: detail.text("remedy").into() })
}

// With or without the prefix that it has as the name of an error.
fn kind(name: &str) -> Option<ErrorKind> {
    let word = name.strip_prefix(ERROR_PREFIX).unwrap_or(name);
    let word: StrDeserializer<'_, NotAWord> = word.into_deserializer();
    ErrorKind::deserialize(word).ok()
}

/// The text of a string, path or signature; empty for anything else.
pub fn text_of<'a>(value: &'a Variant<'_>) -> &'a str {
    if let Variant::Variant(inner) = value {
        return text_of(inner);
    }
    if let Variant::ObjectPath(path) = value {
        return path.as_str();
    }
    <&str>::try_from(value).unwrap_or("")
}

fn number_of(value: &Variant<'_>) -> Option<i128> {
    let value = if let Variant::Variant(inner) = value { inner } else { value };
    u64::try_from(value)
        .map(i128::from)
        .or_else(|_| i64::try_from(value).map(i128::from))
        .or_else(|_| u32::try_from(value).map(i128::from))
        .or_else(|_| i32::try_from(value).map(i128::from))
        .or_else(|_| u16::try_from(value).map(i128::from))
        .or_else(|_| i16::try_from(value).map(i128::from))
        .or_else(|_| u8::try_from(value).map(i128::from))
        .ok()
}

fn record_of(value: &Variant<'_>) -> Record {
    let value = if let Variant::Variant(inner) = value { inner } else { value };
    let Variant::Dict(dict) = value else { return Record::default() };
    let entries = dict.iter().filter_map(|(key, value)| {
        let value = if let Variant::Variant(inner) = value { inner } else { value };
        Some((text_of(key).to_owned(), value.try_to_owned().ok()?))
    });
    Record(entries.collect())
}

/// Any value as JSON: dictionaries as objects, object paths as text.
pub fn to_json(value: &Variant<'_>) -> serde_json::Value {
    match value {
        Variant::U8(number) => (*number).into(),
        Variant::Bool(flag) => (*flag).into(),
        Variant::I16(number) => (*number).into(),
        Variant::U16(number) => (*number).into(),
        Variant::I32(number) => (*number).into(),
        Variant::U32(number) => (*number).into(),
        Variant::I64(number) => (*number).into(),
        Variant::U64(number) => (*number).into(),
        Variant::F64(number) => (*number).into(),
        Variant::Str(_) | Variant::ObjectPath(_) => text_of(value).into(),
        Variant::Signature(signature) => signature.to_string().into(),
        Variant::Variant(inner) => to_json(inner),
        Variant::Array(array) => array.iter().map(to_json).collect(),
        Variant::Dict(dict) => {
            let entries = dict.iter().map(|(key, value)| (text_of(key).to_owned(), to_json(value)));
            serde_json::Value::Object(entries.collect())
        }
        Variant::Structure(structure) => structure.fields().iter().map(to_json).collect(),
        Variant::Fd(_) => serde_json::Value::Null,
    }
}
