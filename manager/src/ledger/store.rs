//! Where the ledger lies: read once, replaced as a whole, one daemon at a time.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::Deserialize;
use uuid::Uuid;
use vfio::PciAddress;

use super::{FORMAT, Format, Ledger};
use crate::id::TenantId;
use crate::spec::TenantSpec;

/// A file of gpuward's own that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreFailed {
    /// Another daemon runs.
    #[error("another gpuwardd runs here: it holds {}", path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
    },
    /// Reading or writing failed.
    #[error("cannot {verb} {}", path.display())]
    Io {
        /// "read", "replace".
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Its text is not what gpuward writes.
    #[error("{} is damaged", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where.
        #[source]
        source: serde_json::Error,
    },
    /// Another version of gpuward wrote it.
    #[error("{} has format {}.{}, this version knows {}.{}; another gpuward wrote it", path.display(), found.major, found.minor, FORMAT.major, FORMAT.minor)]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: Format,
    },
}

/// The exclusive right to this host's run directory; given up when dropped.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// How long a lock is waited for: a process that its last holder was starting has a copy of it until it runs its own program.
const LOCK_GRACE: Duration = Duration::from_millis(500);

/// Takes the lock of `run_dir`, before anything else is read.
///
/// # Errors
/// [`StoreFailed::Locked`] where another daemon has it.
pub fn lock(run_dir: &Path) -> Result<Lock, StoreFailed> {
    let path = run_dir.join("lock");
    let io = |source| StoreFailed::Io { verb: "open", path: path.clone(), source };
    fs::create_dir_all(run_dir).map_err(io)?;
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(io)?;
    let until = Instant::now() + LOCK_GRACE;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Lock { _file: file }),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => thread::sleep(Duration::from_millis(10)),
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(StoreFailed::Locked { path }),
            Err(errno) => return Err(io(errno.into())),
        }
    }
}

/// Reads the ledger in `state_dir`; a new one where there is none.
///
/// # Errors
/// It cannot be read, is damaged, or a newer version wrote it: nothing may be stored then.
pub fn load(state_dir: &Path) -> Result<Ledger, StoreFailed> {
    let path = state_dir.join("ledger.json");
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Ledger::default()),
        Err(source) => return Err(StoreFailed::Io { verb: "read", path, source }),
    };
    #[derive(Deserialize)]
    struct Head {
        format: Format,
    }
    let damaged = |source| StoreFailed::Damaged { path: path.clone(), source };
    let found = serde_json::from_slice::<Head>(&text).map_err(damaged)?.format;
    if found.major != FORMAT.major || found.minor > FORMAT.minor + 1 {
        return Err(StoreFailed::Foreign { path, found });
    }
    let mut ledger: Ledger = serde_json::from_slice(&text).map_err(damaged)?;
    ledger.tenants.entry(TenantId::BUILT_IN).or_insert_with(TenantSpec::built_in);
    // What a newer version added is not known here, nor written again.
    Ok(Ledger { format: FORMAT, ..ledger })
}

/// Replaces the ledger in `state_dir`.
///
/// # Errors
/// The file could not be replaced; the old one is still there.
pub fn save(state_dir: &Path, ledger: &Ledger) -> Result<(), StoreFailed> {
    replace(&state_dir.join("ledger.json"), &serde_json::to_vec_pretty(ledger))
}

/// Replaces `owned.json` in `run_dir`: address to the UUID of the domain that may use it, for the libvirt hook.
///
/// # Errors
/// The file could not be replaced; the old one is still there.
pub fn save_owners(run_dir: &Path, owners: &BTreeMap<PciAddress, Uuid>) -> Result<(), StoreFailed> {
    replace(&run_dir.join("owned.json"), &serde_json::to_vec_pretty(owners))
}

/// Reads `owned.json`; `None` where there is none.
///
/// # Errors
/// It cannot be read or is damaged.
pub fn load_owners(run_dir: &Path) -> Result<Option<BTreeMap<PciAddress, Uuid>>, StoreFailed> {
    let path = run_dir.join("owned.json");
    match fs::read(&path) {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|source| StoreFailed::Damaged { path, source }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(StoreFailed::Io { verb: "read", path, source }),
    }
}

// A reader sees the old file or the new one, also after a power cut: data first, then the name, then the folder.
fn replace(path: &Path, text: &Result<Vec<u8>, serde_json::Error>) -> Result<(), StoreFailed> {
    let written = match text {
        Ok(text) => write_over(path, text),
        Err(error) => Err(io::Error::other(error.to_string())),
    };
    written.map_err(|source| StoreFailed::Io { verb: "replace", path: path.into(), source })
}

/// Replaces a file of gpuward's own by `text`, as the ledger is.
///
/// # Errors
/// The file could not be replaced; the old one is still there.
pub(crate) fn replace_text(path: &Path, text: &str) -> Result<(), StoreFailed> {
    write_over(path, text.as_bytes()).map_err(|source| StoreFailed::Io { verb: "replace", path: path.into(), source })
}

fn write_over(path: &Path, text: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    let mut file = tempfile::Builder::new().prefix(".new-").tempfile_in(folder)?;
    file.write_all(text)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ledger_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(load(folder.path()).unwrap(), Ledger::default(), "none yet");
        let ledger = Ledger { next_job: 17, next_epoch: 4, ..Ledger::default() };
        save(folder.path(), &ledger).unwrap();
        assert_eq!(load(folder.path()).unwrap(), ledger);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_told_with_its_path() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        let error = save(&folder.path().join("file"), &Ledger::default()).unwrap_err();
        assert!(error.to_string().starts_with("cannot replace ") && error.to_string().ends_with("ledger.json"), "{error}");
    }
}
