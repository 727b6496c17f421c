//! What is printed: aligned columns, or JSON. Nothing that a device or a captured tree says reaches the terminal unescaped.

use std::borrow::Cow;
use std::env;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, StdoutLock, Write};

use comfy_table::{Cell, Color, ContentArrangement, Table, presets};
use serde::Serialize;
use serde_json::Value;

/// What stands where there is nothing.
pub(super) const NOTHING: &str = "–";

/// Standard output. Its failures are errors, so that a reader who has gone ends the command instead of a panic.
pub(super) struct Output {
    out: StdoutLock<'static>,
    json: bool,
    colour: bool,
}

impl Output {
    /// In colour on a terminal, unless `NO_COLOR` is set.
    pub(super) fn new(json: bool) -> Self {
        let wanted = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) && env::var_os("TERM").is_none_or(|term| term != "dumb");
        let out = io::stdout().lock();
        Self { colour: wanted && out.is_terminal(), json, out }
    }

    /// Whether JSON was asked for.
    pub(super) fn is_json(&self) -> bool {
        self.json
    }

    /// Prints a value as JSON on one line and sends it off.
    pub(super) fn json(&mut self, value: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, value)?;
        self.line("")
    }

    /// Prints a line that has been made safe, and sends it off.
    pub(super) fn line(&mut self, line: impl AsRef<str>) -> io::Result<()> {
        writeln!(self.out, "{}", line.as_ref())?;
        self.out.flush()
    }

    /// Prints bytes as they are.
    pub(super) fn raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.out.flush()
    }

    /// Prints columns two or more spaces apart.
    pub(super) fn table(&mut self, header: &[&str], rows: Vec<Vec<String>>) -> io::Result<()> {
        let state = header.iter().position(|name| *name == "STATE");
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        if self.colour {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        if !header.is_empty() {
            table.set_header(header);
        }
        for row in rows {
            table.add_row(row.into_iter().enumerate().map(|(column, text)| cell(&text, state == Some(column))));
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        let text = table.trim_fmt();
        self.line(text)
    }
}

fn cell(text: &str, is_state: bool) -> Cell {
    let cell = Cell::new(if text.is_empty() { Cow::Borrowed(NOTHING) } else { safe(text) });
    match text {
        "free" | "done" if is_state => cell.fg(Color::Green),
        "claimed" | "running" if is_state => cell.fg(Color::Cyan),
        "quarantined" | "stuck" | "failed" | "rollback-failed" | "gone" if is_state => cell.fg(Color::Red),
        "drifted" | "unknown" if is_state => cell.fg(Color::Yellow),
        _ => cell,
    }
}

/// The text with everything escaped that could move the cursor, change colours or turn the direction of writing.
pub(super) fn safe(text: &str) -> Cow<'_, str> {
    let unsafe_ =
        |c: char| c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}');
    if !text.contains(unsafe_) {
        return Cow::Borrowed(text);
    }
    let escape = |c: char| if unsafe_(c) { c.escape_default().to_string() } else { c.to_string() };
    Cow::Owned(text.chars().map(escape).collect())
}

/// A moment in seconds since 1970 as `2026-12-01T10:00:00Z`.
pub(super) fn moment(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March, in eras of 400 years: howardhinnant.github.io/date_algorithms.html, civil_from_days.
    let day = days + 719_468;
    let (era, day_of_era) = (day / 146_097, day % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

/// Bytes in the largest unit that divides them.
pub(super) fn size(bytes: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = units.iter().find(|(_, shift)| bytes >= 1 << shift && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(|| format!("{bytes} bytes"), |(name, shift)| format!("{} {name}", bytes >> shift))
}

/// A value of JSON for a person: text by its name, lists without brackets, of fractions two digits; nested objects not at all.
pub(super) fn said(value: &Value, name: impl Fn(&str) -> String + Copy) -> String {
    match value {
        Value::Null | Value::Object(_) => String::new(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) if number.is_f64() => format!("{:.2}", number.as_f64().unwrap_or_default()),
        Value::Number(number) => number.to_string(),
        Value::String(text) => name(text),
        Value::Array(values) => {
            let values = values.iter().map(|value| said(value, name)).filter(|text| !text.is_empty());
            values.collect::<Vec<_>>().join(",")
        }
    }
}

/// A title with `label  value` lines below it; those without a value are left out.
pub(super) fn details(title: &str, lines: &[(&str, String)]) -> String {
    let mut text = safe(title).into_owned();
    for (label, value) in lines.iter().filter(|(_, value)| !value.is_empty()) {
        for (index, line) in value.lines().enumerate() {
            let label = if index == 0 { label } else { "" };
            if write!(text, "\n  {label:<12} {}", safe(line)).is_err() {
                return text;
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_are_escaped() {
        let cases = [
            ("NVIDIA H100 SXM5 80GB", "NVIDIA H100 SXM5 80GB"),
            ("\u{1b}[2Jgone", "\\u{1b}[2Jgone"),
            ("two\nlines\tand a tab", "two\\nlines\\tand a tab"),
            ("\u{202e}DPUG", "\\u{202e}DPUG"),
            ("Größe – 16", "Größe – 16"),
        ];
        for (text, expected) in cases {
            assert_eq!(safe(text), expected);
        }
    }

    #[test]
    fn moments_are_written_as_people_read_them() {
        let cases = [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_796_119_506, "2026-12-01T10:05:06Z"),
        ];
        for (seconds, text) in cases {
            assert_eq!(moment(seconds), text);
        }
    }

    #[test]
    fn sizes_are_written_in_the_largest_unit_that_divides_them() {
        let cases = [(0, "0 bytes"), (512, "512 bytes"), (16 << 20, "16 MiB"), (80 << 30, "80 GiB"), (3 << 29, "1536 MiB")];
        for (bytes, text) in cases {
            assert_eq!(size(bytes), text);
        }
    }
}
