//! The journal of a job: what it is about to change, durable before each change.
//!
//! One file a job, a line a fact: a header, then a line before each unit that is paused and before each change that is begun. It lies in the run directory, because every knob
//! in it forgets its value at a reboot. Removed when the ledger says how the job ended; kept as `<job>.failed.jsonl` where undoing it
//! failed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vfio::Change;

use crate::id::JobId;
use crate::plan::{Move, VfMove};

/// The first line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Header {
    /// Whose journal it is.
    pub job: JobId,
    /// The boot it was written in (`/proc/sys/kernel/random/boot_id`).
    pub boot: String,
    /// The digest of the plan.
    pub digest: String,
    /// The bundles that the plan moves.
    pub moves: Vec<Move>,
    /// The physical functions whose virtual ones it changes.
    #[serde(default)]
    pub vfs: Vec<VfMove>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Line {
    Header(Header),
    Paused(String),
    Begin(Change),
}

/// A journal that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} {}", path.display())]
pub struct JournalError {
    verb: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// A journal being written.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
}

/// A journal that an earlier start left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// Where it lies.
    pub path: PathBuf,
    /// Its header.
    pub header: Header,
    /// Units that were paused: they may not have been started again.
    pub paused: Vec<String>,
    /// Changes that were begun, in order: the last one may or may not have been made.
    pub begun: Vec<Change>,
}

fn folder(run_dir: &Path) -> PathBuf {
    run_dir.join("journal")
}

impl Journal {
    /// Starts the journal of a job.
    ///
    /// # Errors
    /// It cannot be written durably: change nothing then.
    pub fn create(run_dir: &Path, header: Header) -> Result<Self, JournalError> {
        let path = folder(run_dir).join(format!("{}.jsonl", header.job));
        let failed = |source| JournalError { verb: "start", path: path.clone(), source };
        fs::create_dir_all(folder(run_dir)).map_err(failed)?;
        let file = OpenOptions::new().create_new(true).append(true).open(&path).map_err(failed)?;
        let mut journal = Self { path: path.clone(), file };
        journal.append(&Line::Header(header))?;
        sync(&folder(run_dir)).map_err(failed)?;
        Ok(journal)
    }

    /// Says that a change begins.
    ///
    /// # Errors
    /// It cannot be written durably: do not make the change.
    pub fn begin(&mut self, change: &Change) -> Result<(), JournalError> {
        self.append(&Line::Begin(change.clone()))
    }

    /// Says that a unit is about to be paused.
    ///
    /// # Errors
    /// It cannot be written durably: do not pause it.
    pub fn pause(&mut self, unit: &str) -> Result<(), JournalError> {
        self.append(&Line::Paused(unit.into()))
    }

    fn append(&mut self, line: &Line) -> Result<(), JournalError> {
        let written = serde_json::to_vec(line).map_err(io::Error::other).and_then(|mut text| {
            text.push(b'\n');
            self.file.write_all(&text)?;
            self.file.sync_data()
        });
        written.map_err(|source| JournalError { verb: "write", path: self.path.clone(), source })
    }

    /// The ledger says how the job ended: the journal is not needed any more.
    ///
    /// # Errors
    /// It cannot be removed; the next start looks at it once more.
    pub fn remove(self) -> Result<(), JournalError> {
        remove(&self.path)
    }

    /// Undoing failed: keeps the journal for a person.
    ///
    /// # Errors
    /// It cannot be renamed.
    pub fn keep_as_failed(self) -> Result<(), JournalError> {
        keep_as_failed(&self.path)
    }
}

/// Removes the journal at `path`.
///
/// # Errors
/// The file system's.
pub fn remove(path: &Path) -> Result<(), JournalError> {
    let removed = fs::remove_file(path).and_then(|()| path.parent().map_or(Ok(()), sync));
    removed.map_err(|source| JournalError { verb: "remove", path: path.into(), source })
}

/// Renames the journal at `path` to `<job>.failed.jsonl`.
///
/// # Errors
/// The file system's.
pub fn keep_as_failed(path: &Path) -> Result<(), JournalError> {
    let kept = fs::rename(path, path.with_extension("failed.jsonl")).and_then(|()| path.parent().map_or(Ok(()), sync));
    kept.map_err(|source| JournalError { verb: "keep", path: path.into(), source })
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// The journals that an earlier start left, by job. Those kept as failed are not among them.
///
/// A journal without a whole header began nothing and is removed; a torn last line means that its change did not begin.
///
/// # Errors
/// They cannot be read.
pub fn left(run_dir: &Path) -> Result<Vec<Left>, JournalError> {
    let folder = folder(run_dir);
    let failed = |source| JournalError { verb: "read", path: folder.clone(), source };
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut journals = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !name.ends_with(".jsonl") || name.ends_with(".failed.jsonl") {
            continue;
        }
        let text = fs::read(&path).map_err(|source| JournalError { verb: "read", path: path.clone(), source })?;
        match parse(&text) {
            Some((header, lines)) => journals.push(of_lines(path, header, lines)),
            None => remove(&path)?,
        }
    }
    journals.sort_by_key(|journal| journal.header.job);
    Ok(journals)
}

fn of_lines(path: PathBuf, header: Header, lines: Vec<Line>) -> Left {
    let (mut paused, mut begun) = (Vec::new(), Vec::new());
    for line in lines {
        match line {
            Line::Paused(unit) => paused.push(unit),
            Line::Begin(change) => begun.push(change),
            Line::Header(_) => break,
        }
    }
    Left { path, header, paused, begun }
}

fn parse(text: &[u8]) -> Option<(Header, Vec<Line>)> {
    let mut lines = text.split_inclusive(|byte| *byte == b'\n').map_while(|line| serde_json::from_slice(line.strip_suffix(b"\n")?).ok());
    let Some(Line::Header(header)) = lines.next() else { return None };
    Some((header, lines.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(to: bool) -> Change {
        Change::D3cold { device: "0000:41:00.0".parse().unwrap(), from: !to, to }
    }

    fn header(job: u64) -> Header {
        Header { job: JobId(job), boot: "b".into(), digest: "d".into(), moves: Vec::new(), vfs: Vec::new() }
    }

    #[test]
    fn what_was_begun_is_found_again() {
        let run = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(run.path(), header(7)).unwrap();
        journal.begin(&change(true)).unwrap();
        journal.begin(&change(false)).unwrap();
        let found = left(run.path()).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].header.clone(), found[0].begun.clone()), (header(7), vec![change(true), change(false)]));
        journal.remove().unwrap();
        assert_eq!(left(run.path()).unwrap(), []);
    }

    #[test]
    fn a_crash_may_tear_the_last_line_wherever_it_likes() {
        let run = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(run.path(), header(7)).unwrap();
        journal.begin(&change(true)).unwrap();
        let path = run.path().join("journal/7.jsonl");
        let whole = fs::read(&path).unwrap();
        let first = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
        for length in 0..=whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let found = left(run.path()).unwrap();
            match length {
                _ if length < first => assert_eq!((found.len(), path.exists()), (0, false), "cut at {length}"),
                _ => assert_eq!(found[0].begun.len(), usize::from(length == whole.len()), "cut at {length}"),
            }
        }
    }

    #[test]
    fn a_journal_kept_as_failed_is_not_mended_again() {
        let run = tempfile::tempdir().unwrap();
        Journal::create(run.path(), header(7)).unwrap().keep_as_failed().unwrap();
        assert_eq!(left(run.path()).unwrap(), []);
        assert!(run.path().join("journal/7.failed.jsonl").exists());
    }
}
