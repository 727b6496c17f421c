//! What befell each device: evidence that outlives jobs, claims and the daemon, kept by identity.
//!
//! One file a device, a line an entry, oldest first, in `history` of the state directory. It is written after what it tells of, and
//! never in its way: an entry that cannot be written is in the log instead. It is not synchronised: of the last seconds before a loss
//! of power some may be missing, and a torn line is dropped when it is read. A file that has grown to [`LONGEST`] loses its older half.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vfio::Identity;

mod moves;

pub use moves::between;

/// Most bytes of one device's file, about 4,000 entries.
const LONGEST: u64 = 1 << 20;

/// Most bytes of an entry's text and of each of its details; the rest is cut.
const LONGEST_TEXT: usize = 4096;

/// What befell a device, once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Entry {
    /// Seconds since 1970.
    pub time: u64,
    /// What it was.
    pub kind: Kind,
    /// The same for a person, with the reason.
    pub text: String,
    /// What else is known of it, by key: `address`, `claim`, `epoch`, `step-01`, …
    #[serde(default)]
    pub details: BTreeMap<String, String>,
}

/// What may befall a device: a closed list within version 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)] // the words are those of docs/glossary.md
pub enum Kind {
    Assigned,
    Released,
    ClaimMade,
    ClaimReleased,
    Reset,
    Sanitised,
    Checked,
    Recovered,
    Quarantined,
    QuarantineCleared,
    Stuck,
    StuckEnded,
    Drifted,
    DeviceGone,
    Restored,
}

impl Kind {
    /// Its word on the bus.
    pub fn word(self) -> &'static str {
        match self {
            Self::Assigned => "assigned",
            Self::Released => "released",
            Self::ClaimMade => "claim-made",
            Self::ClaimReleased => "claim-released",
            Self::Reset => "reset",
            Self::Sanitised => "sanitised",
            Self::Checked => "checked",
            Self::Recovered => "recovered",
            Self::Quarantined => "quarantined",
            Self::QuarantineCleared => "quarantine-cleared",
            Self::Stuck => "stuck",
            Self::StuckEnded => "stuck-ended",
            Self::Drifted => "drifted",
            Self::DeviceGone => "device-gone",
            Self::Restored => "restored",
        }
    }
}

impl Entry {
    /// Something that happens now.
    pub fn new(kind: Kind, text: impl Into<String>) -> Self {
        Self { time: crate::engine::now(), kind, text: text.into(), details: BTreeMap::new() }
    }

    /// Adds a detail.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl ToString) -> Self {
        self.details.insert(key.into(), value.to_string());
        self
    }

    fn shortened(mut self) -> Self {
        for text in self.details.values_mut().chain(std::iter::once(&mut self.text)) {
            if let Some((end, _)) = text.char_indices().find(|(at, letter)| at + letter.len_utf8() > LONGEST_TEXT) {
                text.truncate(end);
            }
        }
        self
    }
}

/// Which entries are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// How many, the newest ones. Entries of one second stay together, so that the next page misses none: there may be a few more.
    pub limit: usize,
    /// Only older ones than this, in seconds since 1970.
    pub before: Option<u64>,
}

/// Adds an entry to the history of the device `identity`. Where that fails, it is logged: nothing waits for a history.
pub fn append(state_dir: &Path, identity: &Identity, entry: Entry) {
    let path = path(state_dir, &identity.to_string());
    let entry = entry.shortened();
    if let Err(error) = write(&path, &entry) {
        tracing::error!(
            "{identity}: {} ({}) is not in its history: cannot write {}: {error}",
            entry.kind.word(),
            entry.text,
            path.display()
        );
    }
}

/// The history of a device, newest first. A serial number that could not be read at times does not hide what was written then.
///
/// # Errors
/// A file that is there and cannot be read.
pub fn read(state_dir: &Path, identity: &Identity, page: Page) -> io::Result<Vec<Entry>> {
    let mut entries = entries_in(&path(state_dir, &identity.to_string()))?;
    if identity.serial.is_some() {
        let nameless = Identity { serial: None, ..identity.clone() };
        entries.extend(entries_in(&path(state_dir, &nameless.to_string()))?);
        entries.sort_by_key(|entry| entry.time);
    }
    entries.reverse();
    entries.retain(|entry| page.before.is_none_or(|before| entry.time < before));
    let last = page.limit.checked_sub(1).and_then(|last| entries.get(last)).map(|entry| entry.time);
    entries.retain(|entry| last.is_none_or(|last| entry.time >= last));
    Ok(entries)
}

/// `/` becomes `+`; whatever else is not plain becomes `%` and two digits, so that no identity leaves the folder or meets another's.
fn path(state_dir: &Path, identity: &str) -> PathBuf {
    let plain = |byte: u8| match byte {
        b'/' => "+".to_owned(),
        b'.' | b':' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => char::from(byte).to_string(),
        other => format!("%{other:02x}"),
    };
    let name: String = identity.bytes().map(plain).collect();
    state_dir.join("history").join(format!("{name}.jsonl"))
}

fn write(path: &Path, entry: &Entry) -> io::Result<()> {
    let mut line = serde_json::to_vec(entry)?;
    line.push(b'\n');
    let mut file = open(path)?;
    let length = file.metadata()?.len();
    if length + line.len() as u64 > LONGEST {
        return replace(path, &line);
    }
    // What a crash tore is ended, so that it does not take this entry with it.
    if length > 0 && !ends_a_line(&mut file)? {
        line.insert(0, b'\n');
    }
    file.write_all(&line)
}

fn open(path: &Path) -> io::Result<File> {
    let open = || OpenOptions::new().create(true).read(true).append(true).open(path);
    match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::create_dir_all(path.parent().unwrap_or(Path::new("")))?;
            open()
        }
        opened => opened,
    }
}

fn ends_a_line(file: &mut File) -> io::Result<bool> {
    let mut last = [0];
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}

fn replace(path: &Path, line: &[u8]) -> io::Result<()> {
    let text = fs::read(path)?;
    let newer = &text[text.len() / 2..];
    let whole = newer.iter().position(|byte| *byte == b'\n').map_or(newer.len(), |end| end + 1);
    let mut kept = newer[whole..].to_vec();
    kept.extend(line);
    let beside = path.with_extension("new");
    fs::write(&beside, kept)?;
    fs::rename(beside, path)
}

fn entries_in(path: &Path) -> io::Result<Vec<Entry>> {
    match fs::read(path) {
        // A line that is torn, or that a newer version wrote, is passed over.
        Ok(text) => Ok(text.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use vfio::Ids;

    use super::*;

    fn identity(slot: &str) -> Identity {
        Identity { slot: slot.into(), ids: Ids { vendor: 0x10de, device: 0x2330, ..Ids::default() }, serial: Some(0x42) }
    }

    fn at(time: u64, text: &str) -> Entry {
        Entry { time, ..Entry::new(Kind::Reset, text) }
    }

    fn texts(state: &Path, identity: &Identity, limit: usize, before: Option<u64>) -> Vec<String> {
        read(state, identity, Page { limit, before }).unwrap().into_iter().map(|entry| entry.text).collect()
    }

    #[test]
    fn the_newest_come_first_and_pages_miss_none() {
        let (state, card) = (tempfile::tempdir().unwrap(), identity("pci0000:40/01.0/00.0"));
        assert!(texts(state.path(), &card, 9, None).is_empty());
        for (time, text) in [(1, "a"), (2, "b"), (2, "c"), (3, "d")] {
            append(state.path(), &card, at(time, text));
        }
        assert_eq!(texts(state.path(), &card, 9, None), ["d", "c", "b", "a"]);
        assert_eq!(texts(state.path(), &card, 2, None), ["d", "c", "b"], "one second is not divided");
        assert_eq!(texts(state.path(), &card, 2, Some(2)), ["a"]);
        assert!(texts(state.path(), &identity("pci0000:40/02.0/00.0"), 9, None).is_empty());
    }

    #[test]
    fn what_was_written_while_the_serial_number_was_unreadable_is_not_lost() {
        let (state, card) = (tempfile::tempdir().unwrap(), identity("pci0000:40/01.0/00.0"));
        append(state.path(), &Identity { serial: None, ..card.clone() }, at(2, "asleep"));
        append(state.path(), &card, at(1, "awake"));
        assert_eq!(texts(state.path(), &card, 9, None), ["asleep", "awake"]);
    }

    #[test]
    fn a_torn_line_costs_itself_alone() {
        let (state, card) = (tempfile::tempdir().unwrap(), identity("pci0000:40/01.0/00.0"));
        append(state.path(), &card, at(1, "a"));
        append(state.path(), &card, at(2, "b"));
        let file = path(state.path(), &card.to_string());
        let whole = fs::read(&file).unwrap();
        let first = whole.iter().position(|byte| *byte == b'\n').unwrap();
        for length in 1..whole.len() {
            fs::write(&file, &whole[..length]).unwrap();
            append(state.path(), &card, at(3, "c"));
            let expected: &[&str] = match length {
                _ if length < first => &["c"],
                _ if length < whole.len() - 1 => &["c", "a"],
                _ => &["c", "b", "a"],
            };
            assert_eq!(texts(state.path(), &card, 9, None), expected, "cut at {length}");
        }
    }

    #[test]
    fn a_file_that_has_grown_too_long_loses_its_older_half() {
        let (state, card) = (tempfile::tempdir().unwrap(), identity("pci0000:40/01.0/00.0"));
        let file = path(state.path(), &card.to_string());
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let line = serde_json::to_string(&at(1, &"x".repeat(1000))).unwrap() + "\n";
        fs::write(&file, line.repeat(LONGEST as usize / line.len() + 1)).unwrap();
        append(state.path(), &card, at(2, "last"));
        let left = read(state.path(), &card, Page { limit: usize::MAX, before: None }).unwrap();
        assert_eq!((left[0].text.as_str(), left.len()), ("last", LONGEST as usize / line.len() / 2 + 1));
        assert!(fs::metadata(&file).unwrap().len() <= LONGEST / 2 + 4000);
    }

    #[test]
    fn no_identity_leaves_the_folder_or_meets_another() {
        let state = Path::new("/state");
        for hostile in ["../../etc/passwd", "..", "a\0b", "ä\n"] {
            let path = path(state, hostile);
            assert_eq!(path.parent(), Some(Path::new("/state/history")), "{hostile:?}");
        }
        assert_ne!(path(state, "a+b"), path(state, "a/b"));
    }

    #[test]
    fn a_text_is_cut_between_letters() {
        let entry = at(1, &"ä".repeat(LONGEST_TEXT)).shortened();
        assert_eq!(entry.text.len(), LONGEST_TEXT);
    }

    #[test]
    fn a_history_that_cannot_be_written_stops_nobody() {
        append(Path::new("/proc/self/nowhere"), &identity("pci0000:40/01.0/00.0"), at(1, "a"));
    }
}
