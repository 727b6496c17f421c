//! Text that XML can hold.

use std::fmt;

/// Text without the characters that XML 1.0 forbids (section 2.2): escaping cannot save those.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Text(String);

/// Text with a character that XML cannot hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} has the character U+{:04X}, which XML cannot hold", u32::from(*character))]
pub struct BadText {
    text: String,
    character: char,
}

impl Text {
    /// Takes `text` where XML can hold it.
    ///
    /// # Errors
    /// The first character that it cannot hold.
    pub fn new(text: impl Into<String>) -> Result<Self, BadText> {
        let text = text.into();
        match text.chars().find(|character| !is_allowed(*character)) {
            Some(character) => Err(BadText { text: text.chars().take(64).collect(), character }),
            None => Ok(Self(text)),
        }
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

// Line ends and tabs are legal in XML, and turn into spaces in attributes: a value that came back changed would be a trap.
fn is_allowed(character: char) -> bool {
    matches!(character, '\u{20}'..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..='\u{10ffff}')
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<&str> for Text {
    type Error = BadText;

    fn try_from(text: &str) -> Result<Self, BadText> {
        Self::new(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_xml_cannot_hold_are_refused() {
        for text in ["\0", "a\u{1b}[31m", "\u{fffe}", "line\nbreak", "tab\t"] {
            assert!(Text::new(text).is_err(), "{text:?}");
        }
        assert_eq!(Text::new("Zürich <&'\"> 🦀").unwrap().as_str(), "Zürich <&'\"> 🦀");
    }
}
