//! The keys of a TOML table, taken one by one: what is left over is unknown and named by its full path.

use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::Fault;

/// A file being read, and what was found wrong with it.
pub(super) struct Source<'a> {
    file: &'a Path,
    text: &'a str,
    faults: RefCell<Vec<Fault>>,
}

impl<'a> Source<'a> {
    pub(super) fn new(file: &'a Path, text: &'a str) -> Self {
        Self { file, text, faults: RefCell::default() }
    }

    pub(super) fn fault(&self, span: Range<usize>, message: impl Into<String>) {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        let line = 1 + before.matches('\n').count();
        self.faults.borrow_mut().push(Fault { file: self.file.into(), line, message: message.into() });
    }

    pub(super) fn into_faults(self) -> Vec<Fault> {
        self.faults.into_inner()
    }

    /// The top level of the file.
    pub(super) fn keys(&'a self) -> Option<Keys<'a>> {
        match DeTable::parse(self.text) {
            Ok(table) => Some(Keys { source: self, path: String::new(), span: 0..0, table: table.into_inner() }),
            Err(error) => {
                self.fault(error.span().unwrap_or(0..0), error.message());
                None
            }
        }
    }
}

/// A table whose keys are taken one by one.
pub(super) struct Keys<'a> {
    source: &'a Source<'a>,
    path: String,
    span: Range<usize>,
    table: DeTable<'a>,
}

/// A value with where it stands.
pub(super) struct At<T> {
    pub value: T,
    pub path: String,
    pub span: Range<usize>,
}

impl<'a> Keys<'a> {
    fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.into() } else { format!("{}.{key}", self.path) }
    }

    fn take(&mut self, key: &str) -> Option<At<DeValue<'a>>> {
        let value = self.table.remove(key)?;
        Some(At { path: self.path_of(key), span: value.span(), value: value.into_inner() })
    }

    fn wrong(&self, at: &At<DeValue<'a>>, wanted: &str) {
        self.source.fault(at.span.clone(), format!("{} is to be {wanted}", at.path));
    }

    /// A string.
    pub(super) fn string(&mut self, key: &str) -> Option<At<String>> {
        let at = self.take(key)?;
        match &at.value {
            DeValue::String(text) => Some(At { value: text.to_string(), path: at.path, span: at.span }),
            _ => {
                self.wrong(&at, "a string");
                None
            }
        }
    }

    /// A string that `parse` understands; `wanted` says what it is to be.
    pub(super) fn parsed<T>(&mut self, key: &str, wanted: &str, parse: impl FnOnce(&str) -> Option<T>) -> Option<T> {
        let at = self.string(key)?;
        let parsed = parse(&at.value);
        if parsed.is_none() {
            self.source.fault(at.span, format!("{} is to be {wanted}, not {:?}", at.path, at.value));
        }
        parsed
    }

    /// An integer from 1.
    pub(super) fn count(&mut self, key: &str) -> Option<At<usize>> {
        let at = self.take(key)?;
        let number = match &at.value {
            DeValue::Integer(number) => usize::from_str_radix(number.as_str(), number.radix()).ok().filter(|number| *number > 0),
            _ => None,
        };
        if number.is_none() {
            self.wrong(&at, "an integer of at least 1");
        }
        number.map(|value| At { value, path: at.path, span: at.span })
    }

    /// An array of strings.
    pub(super) fn strings(&mut self, key: &str) -> Option<Vec<String>> {
        let at = self.take(key)?;
        let text = |item: &Spanned<DeValue<'a>>| match item.get_ref() {
            DeValue::String(text) => Some(text.to_string()),
            _ => None,
        };
        let strings = match &at.value {
            DeValue::Array(items) => items.iter().map(text).collect::<Option<Vec<_>>>(),
            _ => None,
        };
        if strings.is_none() {
            self.wrong(&at, "an array of strings");
        }
        strings
    }

    /// A table.
    pub(super) fn table(&mut self, key: &str) -> Option<Keys<'a>> {
        let at = self.take(key)?;
        match at.value {
            DeValue::Table(table) => Some(Keys { source: self.source, path: at.path, span: at.span, table }),
            _ => {
                self.wrong(&at, "a table");
                None
            }
        }
    }

    /// An array of tables.
    pub(super) fn tables(&mut self, key: &str) -> Vec<Keys<'a>> {
        let Some(at) = self.take(key) else { return Vec::new() };
        let DeValue::Array(items) = at.value else {
            self.wrong(&at, "an array of tables");
            return Vec::new();
        };
        let mut tables = Vec::new();
        for (index, item) in items.into_iter().enumerate() {
            let (path, span) = (format!("{}[{index}]", at.path), item.span());
            match item.into_inner() {
                DeValue::Table(table) => tables.push(Keys { source: self.source, path, span, table }),
                _ => self.source.fault(span, format!("{path} is to be a table")),
            }
        }
        tables
    }

    /// Says what is wrong with the table as a whole.
    pub(super) fn fault(&self, message: &str) {
        let path = if self.path.is_empty() { "the file" } else { &self.path };
        self.source.fault(self.span.clone(), format!("{path} {message}"));
    }

    /// Names every key that nobody took.
    pub(super) fn finish(self) {
        for key in self.table.keys() {
            self.source.fault(key.span(), format!("{} is not known", self.path_of(key.get_ref())));
        }
    }
}
