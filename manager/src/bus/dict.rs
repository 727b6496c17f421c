//! Dictionaries `a{sv}`: written with the values the daemon knows, read with nothing left over.

use std::collections::{BTreeMap, HashMap};

use zbus::{OwnedVariant, Variant};

use crate::failure::{ErrorKind, Failure};
use crate::spec::Node;

/// What a caller sends as `a{sv}`.
pub(super) type Received = HashMap<String, OwnedVariant>;

/// A dictionary being written.
#[derive(Debug, Default)]
pub(super) struct Dict(HashMap<String, Variant<'static>>);

impl Dict {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn put(&mut self, key: &str, value: impl Into<Variant<'static>>) -> &mut Self {
        self.0.insert(key.to_owned(), value.into());
        self
    }

    pub(super) fn into_map(self) -> HashMap<String, Variant<'static>> {
        self.0
    }

    /// The failure's keys, as in job results and properties.
    pub(super) fn put_failure(&mut self, failure: &Failure) -> &mut Self {
        self.put("error", failure.kind.to_string());
        self.put("message", failure.message.clone());
        self.put("why", failure.why.clone());
        self.put("remedy", failure.remedy.clone())
    }
}

/// The failure's dictionary; empty where there is none.
pub(super) fn of_failure(failure: Option<&Failure>) -> HashMap<String, Variant<'static>> {
    let mut dict = Dict::new();
    if let Some(failure) = failure {
        dict.put_failure(failure);
    }
    dict.into_map()
}

/// Options of a call, each taken once; what is left over is refused by name.
pub(super) struct Options(HashMap<String, Node>);

impl Options {
    pub(super) fn new(received: Received) -> Result<Self, Failure> {
        let node = |(key, value): (String, OwnedVariant)| Ok((key.clone(), node_of(&value, &key)?));
        Ok(Self(received.into_iter().map(node).collect::<Result<_, Failure>>()?))
    }

    pub(super) fn text(&mut self, key: &str) -> Result<Option<String>, Failure> {
        match self.0.remove(key) {
            None => Ok(None),
            Some(Node::Text(text)) => Ok(Some(text)),
            Some(_) => Err(wrong_type(key, "a string (s)")),
        }
    }

    pub(super) fn flag(&mut self, key: &str) -> Result<bool, Failure> {
        match self.0.remove(key) {
            None => Ok(false),
            Some(Node::Boolean(flag)) => Ok(flag),
            Some(_) => Err(wrong_type(key, "a boolean (b)")),
        }
    }

    pub(super) fn number(&mut self, key: &str) -> Result<Option<u64>, Failure> {
        match self.0.remove(key) {
            None => Ok(None),
            Some(Node::Integer(number)) => u64::try_from(number).map(Some).map_err(|_| wrong_type(key, "a number (t)")),
            Some(_) => Err(wrong_type(key, "a number (t)")),
        }
    }

    /// Refuses what was not taken: `{"dry-run": true}` sent to a daemon that does not know it must never act.
    pub(super) fn done(self) -> Result<(), Failure> {
        match self.0.keys().min() {
            None => Ok(()),
            Some(key) => Err(Failure::new(ErrorKind::UnknownOption, format!("there is no option {:?} here", shortened(key)))),
        }
    }
}

fn wrong_type(key: &str, wanted: &str) -> Failure {
    Failure::new(ErrorKind::InvalidSpec, format!("option {:?} is not {wanted}", shortened(key)))
}

/// A specification or option as the tree that is parsed.
pub(super) fn node_of(value: &Variant<'_>, key: &str) -> Result<Node, Failure> {
    Ok(match value {
        Variant::Bool(flag) => Node::Boolean(*flag),
        Variant::U8(number) => Node::Integer((*number).into()),
        Variant::I16(number) => Node::Integer((*number).into()),
        Variant::U16(number) => Node::Integer((*number).into()),
        Variant::I32(number) => Node::Integer((*number).into()),
        Variant::U32(number) => Node::Integer((*number).into()),
        Variant::I64(number) => Node::Integer((*number).into()),
        Variant::U64(number) => Node::Integer((*number).into()),
        Variant::Str(text) => Node::Text(text.as_str().to_owned()),
        Variant::ObjectPath(path) => Node::Text(path.as_str().to_owned()),
        Variant::Variant(inner) => node_of(inner, key)?,
        Variant::Array(array) => match array.iter().map(byte_of).collect::<Option<Vec<_>>>() {
            Some(bytes) if !bytes.is_empty() => Node::Bytes(bytes),
            Some(_) | None => Node::List(array.iter().map(|element| node_of(element, key)).collect::<Result<_, _>>()?),
        },
        Variant::Dict(dict) => {
            let entry = |(name, value): (&Variant<'_>, &Variant<'_>)| match node_of(name, key)? {
                Node::Text(name) => Ok((name.clone(), node_of(value, &name)?)),
                Node::Integer(_) | Node::Boolean(_) | Node::Bytes(_) | Node::List(_) | Node::Table(_) => Err(wrong_type(key, "a{sv}")),
            };
            Node::Table(dict.iter().map(entry).collect::<Result<BTreeMap<_, _>, Failure>>()?)
        }
        Variant::F64(_) | Variant::Signature(_) | Variant::Structure(_) | Variant::Fd(_) => {
            return Err(wrong_type(key, "of a type that any key takes"));
        }
    })
}

/// A specification as the tree that is parsed.
pub(super) fn tree_of(spec: &Received) -> Result<Node, Failure> {
    let entries = spec.iter().map(|(key, value)| Ok((key.clone(), node_of(value, key)?)));
    Ok(Node::Table(entries.collect::<Result<_, Failure>>()?))
}

fn byte_of(value: &Variant<'_>) -> Option<u8> {
    if let Variant::U8(byte) = value { Some(*byte) } else { None }
}

/// What a caller sent, to tell it back: never at any length.
pub(super) fn shortened(text: &str) -> &str {
    text.char_indices().nth(64).map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_back_is_short_and_whole_letters() {
        assert_eq!(shortened("a/b"), "a/b");
        assert_eq!(shortened(&"ä".repeat(100)).chars().count(), 64);
    }

    #[test]
    fn what_no_option_takes_is_refused_by_its_key() {
        let options = Received::from([("colour".to_owned(), Variant::from(0.5).try_to_owned().unwrap())]);
        assert!(Options::new(options).err().unwrap().message.contains("\"colour\""));
        let mut left = Options::new(Received::from([("dry-run".to_owned(), Variant::from(true).try_to_owned().unwrap())])).unwrap();
        assert_eq!(left.flag("force"), Ok(false));
        assert_eq!(left.done().unwrap_err().kind, ErrorKind::UnknownOption);
    }
}
