//! The keys of a TOML table, taken one by one: what is left over is unknown and named by its full path.

use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;

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

    fn take_as<T>(&mut self, key: &str, wanted: &str, read: impl FnOnce(DeValue<'a>) -> Option<T>) -> Option<At<T>> {
        let value = self.table.remove(key)?;
        let (path, span) = (self.path_of(key), value.span());
        match read(value.into_inner()) {
            Some(value) => Some(At { value, path, span }),
            None => {
                self.source.fault(span, format!("{path} is to be {wanted}"));
                None
            }
        }
    }

    /// A string.
    pub(super) fn string(&mut self, key: &str) -> Option<At<String>> {
        self.take_as(key, "a string", text)
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
        self.take_as(key, "an integer of at least 1", |value| {
            let DeValue::Integer(number) = value else { return None };
            usize::from_str_radix(number.as_str(), number.radix()).ok().filter(|number| *number > 0)
        })
    }

    /// True or false.
    pub(super) fn flag(&mut self, key: &str) -> Option<At<bool>> {
        self.take_as(key, "true or false", |value| if let DeValue::Boolean(flag) = value { Some(flag) } else { None })
    }

    /// An array of strings.
    pub(super) fn strings(&mut self, key: &str) -> Option<Vec<String>> {
        let strings = self.take_as(key, "an array of strings", |value| {
            let DeValue::Array(items) = value else { return None };
            items.into_iter().map(|item| text(item.into_inner())).collect()
        });
        strings.map(|at| at.value)
    }

    /// A table.
    pub(super) fn table(&mut self, key: &str) -> Option<Keys<'a>> {
        let at = self.take_as(key, "a table", table)?;
        Some(Keys { source: self.source, path: at.path, span: at.span, table: at.value })
    }

    /// An array of tables.
    pub(super) fn tables(&mut self, key: &str) -> Vec<Keys<'a>> {
        let items = self.take_as(key, "an array of tables", |value| {
            let DeValue::Array(items) = value else { return None };
            Some(items)
        });
        let Some(At { value: items, path, .. }) = items else { return Vec::new() };
        let mut tables = Vec::new();
        for (index, item) in items.into_iter().enumerate() {
            let (path, span) = (format!("{path}[{index}]"), item.span());
            match table(item.into_inner()) {
                Some(table) => tables.push(Keys { source: self.source, path, span, table }),
                None => self.source.fault(span, format!("{path} is to be a table")),
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

fn text(value: DeValue<'_>) -> Option<String> {
    let DeValue::String(text) = value else { return None };
    Some(text.into_owned())
}

fn table(value: DeValue<'_>) -> Option<DeTable<'_>> {
    let DeValue::Table(table) = value else { return None };
    Some(table)
}
