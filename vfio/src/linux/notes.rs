//! Notes of stores under way, one file a process: what the next daemon knows of stores that have not come back.
//!
//! A note names the process by its id and its start, so that another process with the same id is not taken for it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;

use super::child::Request;
use crate::StuckStore;

/// Notes that this process is about to make a store; gives the note's path.
pub(super) fn write(request: &Request) -> io::Result<PathBuf> {
    let pid = process::id();
    let start = start_of(pid).ok_or(io::ErrorKind::NotFound)?;
    let note = request.notes.join(pid.to_string());
    fs::write(&note, format!("start={start}\nattribute={}\nvalue={}", request.attribute.display(), request.value))?;
    Ok(note)
}

/// The stores whose processes live. Notes of processes that were ended are removed: their stores have returned.
pub(super) fn living(notes: &Path, root: &Path) -> Vec<StuckStore> {
    let mut living = Vec::new();
    for entry in fs::read_dir(notes).into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // One that is being written, or was removed meanwhile.
        let Some((start, attribute, value)) = fs::read_to_string(entry.path()).ok().and_then(|text| parse(&text)) else { continue };
        if start_of(pid) == Some(start) {
            let attribute = attribute.strip_prefix(root).unwrap_or(&attribute).to_owned();
            living.push(StuckStore { attribute, value, pid });
        } else if let Err(error) = fs::remove_file(entry.path()).or_else(absent) {
            tracing::warn!("the note of a store that was ended cannot be removed: {error}");
        }
    }
    living.sort();
    living
}

fn absent(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

fn parse(text: &str) -> Option<(u64, PathBuf, String)> {
    let (start, rest) = text.strip_prefix("start=")?.split_once('\n')?;
    let (attribute, value) = rest.strip_prefix("attribute=")?.split_once('\n')?;
    Some((start.parse().ok()?, attribute.into(), value.strip_prefix("value=")?.to_owned()))
}

/// When a process was started, in clock ticks since boot: field 22 of its `stat` (proc_pid_stat(5)). `None` where it has ended.
pub(super) fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its name, in brackets, may have anything in it: fields are counted after the last one.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    // One that has ended and was not waited for has returned.
    fields.next().filter(|state| *state != "Z")?;
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(folder: &Path, pid: u32, start: u64) {
        let text = format!("start={start}\nattribute=/sys/bus/pci/devices/0000:41:00.0/driver_override\nvalue=\n");
        fs::write(folder.join(pid.to_string()), text).unwrap();
    }

    #[test]
    fn a_living_process_is_told_with_its_store() {
        let folder = tempfile::tempdir().unwrap();
        let pid = process::id();
        note(folder.path(), pid, start_of(pid).unwrap());
        let attribute = "sys/bus/pci/devices/0000:41:00.0/driver_override".into();
        assert_eq!(living(folder.path(), Path::new("/")), [StuckStore { attribute, value: "\n".into(), pid }]);
    }

    #[test]
    fn another_process_with_its_id_is_not_taken_for_it() {
        let folder = tempfile::tempdir().unwrap();
        note(folder.path(), process::id(), start_of(process::id()).unwrap() + 1);
        note(folder.path(), u32::MAX, 1);
        fs::write(folder.path().join("4711"), "start=").unwrap();
        assert_eq!(living(folder.path(), Path::new("/")), []);
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["4711"], "half a note is left to its writer");
    }
}
