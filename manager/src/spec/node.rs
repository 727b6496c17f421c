//! One tree of values, whether it came as TOML or as `a{sv}`, and a reader that refuses what it was not asked for.

use std::collections::BTreeMap;

use crate::failure::{ErrorKind, Failure};

/// A value of a specification.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    /// `s`
    Text(String),
    /// Any integer type of the bus; TOML has one.
    Integer(i128),
    /// `b`
    Boolean(bool),
    /// `ay`
    Bytes(Vec<u8>),
    /// An array, of tables or of values.
    List(Vec<Node>),
    /// A dictionary, or a table of TOML.
    Table(BTreeMap<String, Node>),
}

impl Node {
    /// Reads TOML.
    ///
    /// # Errors
    /// `InvalidSpec` with the place, or a value that no specification has (a date, a fraction).
    pub fn from_toml(text: &str) -> Result<Self, Failure> {
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| invalid(error.to_string().trim_end()))?;
        from_toml(String::new(), toml::Value::Table(table))
    }

    /// About how many bytes it takes on the bus: what the limit of a specification is measured by.
    pub fn size(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Integer(_) | Self::Boolean(_) => 8,
            Self::Bytes(bytes) => bytes.len(),
            Self::List(nodes) => nodes.iter().map(Self::size).sum(),
            Self::Table(entries) => entries.iter().map(|(key, node)| key.len() + node.size()).sum(),
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "text",
            Self::Integer(_) => "an integer",
            Self::Boolean(_) => "true or false",
            Self::Bytes(_) => "bytes",
            Self::List(_) => "a list",
            Self::Table(_) => "a table",
        }
    }
}

fn from_toml(path: String, value: toml::Value) -> Result<Node, Failure> {
    Ok(match value {
        toml::Value::String(text) => Node::Text(text),
        toml::Value::Integer(number) => Node::Integer(number.into()),
        toml::Value::Boolean(flag) => Node::Boolean(flag),
        toml::Value::Float(_) | toml::Value::Datetime(_) => {
            return Err(invalid(format!("{path} is a fraction or a date, which no key of a specification takes")));
        }
        toml::Value::Array(values) => {
            let values = values.into_iter().enumerate();
            Node::List(values.map(|(index, value)| from_toml(format!("{path}[{index}]"), value)).collect::<Result<_, _>>()?)
        }
        toml::Value::Table(table) => {
            let entries = table.into_iter().map(|(key, value)| Ok((key.clone(), from_toml(below(&path, &key), value)?)));
            Node::Table(entries.collect::<Result<_, Failure>>()?)
        }
    })
}

/// A table being read: each key is taken once, what is left over is refused.
pub(super) struct Table {
    path: String,
    left: BTreeMap<String, Node>,
    known: Vec<&'static str>,
}

impl Table {
    /// Reads `node`, found at `path` (empty for the whole specification).
    pub(super) fn new(path: String, node: Node) -> Result<Self, Failure> {
        match node {
            Node::Table(left) => Ok(Self { path, left, known: Vec::new() }),
            Node::Text(_) | Node::Integer(_) | Node::Boolean(_) | Node::Bytes(_) | Node::List(_) => {
                Err(wrong_type(&path, "a table", &node))
            }
        }
    }

    /// The full path of `key` in the specification.
    pub(super) fn path(&self, key: &str) -> String {
        below(&self.path, key)
    }

    /// A failure about the value of `key`.
    pub(super) fn invalid(&self, key: &str, problem: impl AsRef<str>) -> Failure {
        invalid(format!("{} {}", self.path(key), problem.as_ref()))
    }

    /// A failure about a missing `key`.
    pub(super) fn missing(&self, key: &str) -> Failure {
        invalid(format!("{} is missing", self.path(key)))
    }

    pub(super) fn text(&mut self, key: &'static str) -> Result<Option<String>, Failure> {
        match self.take(key) {
            None => Ok(None),
            Some(Node::Text(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(&self.path(key), "text", &other)),
        }
    }

    pub(super) fn boolean(&mut self, key: &'static str, default: bool) -> Result<bool, Failure> {
        match self.take(key) {
            None => Ok(default),
            Some(Node::Boolean(flag)) => Ok(flag),
            Some(other) => Err(wrong_type(&self.path(key), "true or false", &other)),
        }
    }

    pub(super) fn number(&mut self, key: &'static str) -> Result<Option<u32>, Failure> {
        match self.take(key) {
            None => Ok(None),
            Some(Node::Integer(number)) => match u32::try_from(number) {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(self.invalid(key, format!("is {number}; it takes 0 to {}", u32::MAX))),
            },
            Some(other) => Err(wrong_type(&self.path(key), "an integer", &other)),
        }
    }

    /// Whether `key` is this text; then it is taken.
    pub(super) fn is_text(&mut self, key: &'static str, text: &str) -> bool {
        let is_it = self.left.get(key).is_some_and(|node| matches!(node, Node::Text(found) if found == text));
        is_it && self.take(key).is_some()
    }

    /// The values of the list `key`, at most `limit`.
    pub(super) fn list(&mut self, key: &'static str, limit: usize) -> Result<Vec<Node>, Failure> {
        match self.take(key) {
            None => Ok(Vec::new()),
            Some(Node::List(nodes)) if nodes.len() > limit => {
                Err(self.invalid(key, format!("has {} entries, more than {limit}", nodes.len())))
            }
            Some(Node::List(nodes)) => Ok(nodes),
            Some(other) => Err(wrong_type(&self.path(key), "a list", &other)),
        }
    }

    /// Bytes: an integer, or text with KiB, MiB or GiB.
    pub(super) fn size(&mut self, key: &'static str) -> Result<Option<u64>, Failure> {
        let size = match self.take(key) {
            None => return Ok(None),
            Some(Node::Integer(number)) => u64::try_from(number).ok(),
            Some(Node::Text(text)) => parse_size(&text),
            Some(other) => return Err(wrong_type(&self.path(key), "a size", &other)),
        };
        size.map(Some).ok_or_else(|| self.invalid(key, "is no size; write bytes, or a number with KiB, MiB or GiB (\"64GiB\")"))
    }

    /// One of `words`, each with what it means; the first is the default.
    pub(super) fn word<T: Copy>(&mut self, key: &'static str, words: &[(&str, T)]) -> Result<T, Failure> {
        let Some(text) = self.text(key)? else { return Ok(words[0].1) };
        if let Some((_, value)) = words.iter().find(|(word, _)| *word == text) {
            return Ok(*value);
        }
        let words: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        Err(self.invalid(key, format!("is {text:?}; it takes {}", words.join(", "))))
    }

    /// The table `key`.
    pub(super) fn table(&mut self, key: &'static str) -> Result<Option<Self>, Failure> {
        let path = self.path(key);
        self.take(key).map(|node| Self::new(path, node)).transpose()
    }

    /// The tables of the array `key`, at most `limit`.
    pub(super) fn tables(&mut self, key: &'static str, limit: usize) -> Result<Vec<Self>, Failure> {
        let path = self.path(key);
        match self.take(key) {
            None => Ok(Vec::new()),
            Some(Node::List(nodes)) if nodes.len() > limit => {
                Err(self.invalid(key, format!("has {} entries, more than {limit}", nodes.len())))
            }
            Some(Node::List(nodes)) => {
                nodes.into_iter().enumerate().map(|(index, node)| Self::new(format!("{path}[{index}]"), node)).collect()
            }
            Some(other) => Err(wrong_type(&path, "an array of tables", &other)),
        }
    }

    /// Everything in it, as text to text.
    pub(super) fn into_texts(self) -> Result<BTreeMap<String, String>, Failure> {
        let texts = self.left.into_iter().map(|(key, node)| match node {
            Node::Text(text) => Ok((key, text)),
            Node::Integer(_) | Node::Boolean(_) | Node::Bytes(_) | Node::List(_) | Node::Table(_) => {
                Err(wrong_type(&below(&self.path, &key), "text", &node))
            }
        });
        texts.collect()
    }

    /// Refuses a key that this gpuward knows and cannot honour yet.
    pub(super) fn not_yet(&mut self, key: &'static str) -> Result<(), Failure> {
        if self.take(key).is_none() {
            return Ok(());
        }
        Err(not_supported(format!("{} is not supported by this version of gpuward", self.path(key))))
    }

    /// Refuses what was not asked for.
    pub(super) fn finish(self) -> Result<(), Failure> {
        let Some(key) = self.left.keys().next() else { return Ok(()) };
        let failure = invalid(format!("{} is no key of a specification", self.path(key)));
        Err(failure.remedy(format!("the keys there are {}", self.known.join(", "))))
    }

    fn take(&mut self, key: &'static str) -> Option<Node> {
        self.known.push(key);
        self.left.remove(key)
    }
}

/// Bytes, or a number with KiB, MiB or GiB.
pub(crate) fn parse_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].trim_start() {
        "" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    let digits = digits.trim_end();
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn below(path: &str, key: &str) -> String {
    if path.is_empty() { key.into() } else { format!("{path}.{key}") }
}

fn wrong_type(path: &str, wanted: &str, found: &Node) -> Failure {
    let path = if path.is_empty() { "the specification" } else { path };
    invalid(format!("{path} is {}; it takes {wanted}", found.kind()))
}

pub(super) fn invalid(message: impl Into<String>) -> Failure {
    Failure::new(ErrorKind::InvalidSpec, message)
}

pub(super) fn not_supported(message: impl Into<String>) -> Failure {
    Failure::new(ErrorKind::NotSupported, message)
}

#[cfg(test)]
mod tests;
