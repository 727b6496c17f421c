//! The child that makes stores which may never return.

use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::process::ExitCode;

use super::{helper, notes, write};

/// What the child is asked, in a frame: three strings, each with its length as four bytes, little-endian.
pub(super) struct Request {
    /// The attribute's path on this machine.
    pub(super) attribute: PathBuf,
    /// What to store.
    pub(super) value: String,
    /// Where children note themselves.
    pub(super) notes: PathBuf,
}

impl Request {
    pub(super) fn encode(&self) -> Vec<u8> {
        let parts = [self.attribute.as_os_str().as_bytes(), self.value.as_bytes(), self.notes.as_os_str().as_bytes()];
        let length = |part: &[u8]| u32::try_from(part.len()).unwrap_or(u32::MAX).to_le_bytes();
        parts.iter().flat_map(|part| [length(part).as_slice(), part].concat()).collect()
    }

    fn decode(mut bytes: &[u8]) -> Option<Self> {
        let mut part = || {
            let (length, rest) = bytes.split_first_chunk::<4>()?;
            let (part, rest) = rest.split_at_checked(u32::from_le_bytes(*length).try_into().ok()?)?;
            bytes = rest;
            Some(part.to_vec())
        };
        let path = |bytes| PathBuf::from(std::ffi::OsString::from_vec(bytes));
        let (attribute, value, notes) = (path(part()?), String::from_utf8(part()?).ok()?, path(part()?));
        bytes.is_empty().then_some(Self { attribute, value, notes })
    }
}

/// Makes each store that is asked for on standard input and answers its errno on standard output, until the input ends.
///
/// While a store is under way a note lies in the directory of notes: it lets the next daemon see that a store has not come
/// back. The note is a help, not a condition: a store is made without it where it cannot be written.
#[must_use]
pub fn run_store_child() -> ExitCode {
    let served = helper::serve(|asked| {
        let request = Request::decode(&asked).ok_or(io::ErrorKind::InvalidData)?;
        let note = notes::write(&request).ok();
        let stored = write(&request.attribute, &request.value);
        let removed = note.map_or(Ok(()), fs::remove_file);
        stored.and(removed).map(|()| Vec::new())
    });
    if served.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_survives_its_encoding() {
        let request = Request { attribute: "/sys/x".into(), value: "0000:41:00.0".into(), notes: "/run/n".into() };
        let decoded = Request::decode(&request.encode()).unwrap();
        assert_eq!((decoded.attribute, decoded.value, decoded.notes), (request.attribute, request.value, request.notes));
    }

    #[test]
    fn half_a_request_is_none() {
        let whole = Request { attribute: "/sys/x".into(), value: "1".into(), notes: "/run/n".into() }.encode();
        assert!((0..whole.len()).all(|length| Request::decode(&whole[..length]).is_none()));
    }
}
