//! The host: a root to read from, and one narrow seam to write through.
//!
//! Reads name the attribute wanted and never walk a directory's files: reading a file of a driver can act (AMD's `gim` resets the
//! GPU when its `reset_gpu` is read). A missing file is `None`; every other failure is an error with the path in it. What the kernel
//! reads under a device's lock is read through the [`Kernel`], which gives up in time: a driver that is stuck holds that lock.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use crate::{Kernel, LateHook, ReadOnly, StoreError, StuckStore, UnitAsk, UnitError};

/// A file or link of the host that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} {}", path.display())]
pub struct HostError {
    verb: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

impl HostError {
    /// An error of `verb` ("read", "list") on `path`.
    pub fn new(verb: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self { verb, path: path.into(), source }
    }

    /// The kind of the failure underneath.
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }
}

/// A host: a root to read from and a kernel to store through. Cheap to clone.
#[derive(Clone)]
pub struct Host {
    root: PathBuf,
    kernel: Arc<dyn Kernel>,
    asked: Option<Asked>,
}

/// Every path that was asked for, below the root.
pub(crate) type Asked = Arc<Mutex<BTreeSet<PathBuf>>>;

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("root", &self.root).finish_non_exhaustive()
    }
}

/// How long a read waits for a device's lock: a driver that binds or leaves has it for moments, one that is stuck for ever.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// The longest attribute that is read; the kernel's own limit is one page, `/proc/iomem` and `modules.alias` are longer.
const LONGEST: u64 = 16 << 20;

impl Host {
    /// The host below `root`, whose stores `kernel` answers.
    pub fn new(root: impl Into<PathBuf>, kernel: Arc<dyn Kernel>) -> Self {
        Self { root: root.into(), kernel, asked: None }
    }

    /// A captured tree: read, never stored into.
    pub fn captured(root: impl Into<PathBuf>) -> Self {
        Self::new(root, Arc::new(ReadOnly))
    }

    /// The same host, noting every path that is asked for.
    pub(crate) fn noting(&self) -> (Self, Asked) {
        let asked = Asked::default();
        (Self { asked: Some(asked.clone()), ..self.clone() }, asked)
    }

    /// Where reads start: `/` on a real host.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The path of `file` (relative, such as `sys/bus/pci`) on this machine.
    pub fn path(&self, file: impl AsRef<Path>) -> PathBuf {
        if let Some(Ok(mut asked)) = self.asked.as_ref().map(|asked| asked.lock()) {
            asked.insert(file.as_ref().to_owned());
        }
        self.root.join(file)
    }

    /// The text of `file` without its trailing white space; `None` where there is no such file.
    ///
    /// Bytes that are no UTF-8 are replaced: sysfs is ASCII, and garbage must not hide a device.
    ///
    /// # Errors
    /// Any failure but a missing file or a device that has just left (`ENODEV`).
    pub fn read(&self, file: impl AsRef<Path>) -> Result<Option<String>, HostError> {
        let bytes = self.read_bytes(file, LONGEST)?;
        Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).trim_end().to_owned()))
    }

    /// The first `limit` bytes of `file`; `None` where there is no such file.
    ///
    /// # Errors
    /// Any failure but a missing file or a device that has just left (`ENODEV`).
    pub fn read_bytes(&self, file: impl AsRef<Path>, limit: u64) -> Result<Option<Vec<u8>>, HostError> {
        let path = self.path(file);
        let mut bytes = Vec::new();
        // A pipe in a captured tree has nothing to say, and is not waited for.
        let opened = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(&path);
        let read = opened.and_then(|file| file.take(limit).read_to_end(&mut bytes));
        present(read, "read", path).map(|read| read.map(|_| bytes))
    }

    /// As [`Host::read`], of a file that the kernel reads under a lock which a stuck driver may hold: the device's (`driver_override`,
    /// `sriov_numvfs`), or that of a process' memory (`/proc/<pid>/maps`).
    ///
    /// # Errors
    /// As [`Host::read`]; of the kind `WouldBlock` where the lock is not free for a second.
    pub fn read_locked(&self, file: impl AsRef<Path>) -> Result<Option<String>, HostError> {
        self.read_locked_within(file, LOCK_PATIENCE)
    }

    /// As [`Host::read_locked`], with the patience of one who may wait.
    ///
    /// # Errors
    /// As [`Host::read_locked`].
    pub fn read_locked_within(&self, file: impl AsRef<Path>, patience: Duration) -> Result<Option<String>, HostError> {
        let path = self.path(file);
        let read = self.kernel.read_locked(&path, Instant::now() + patience);
        let bytes = present(read, "read", path)?;
        Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).trim_end().to_owned()))
    }

    /// The last element of what the link `file` points to; `None` where there is no such link.
    ///
    /// # Errors
    /// Any failure but a missing link.
    pub fn link_name(&self, file: impl AsRef<Path>) -> Result<Option<String>, HostError> {
        let path = self.path(file);
        let target = present(fs::read_link(&path), "follow", path)?;
        Ok(target.and_then(|target| Some(target.file_name()?.to_string_lossy().into_owned())))
    }

    /// The names in the directory `dir`, sorted; `None` where there is no such directory.
    ///
    /// # Errors
    /// Any failure but a missing directory.
    pub fn entries(&self, dir: impl AsRef<Path>) -> Result<Option<Vec<String>>, HostError> {
        let path = self.path(dir);
        let names = fs::read_dir(&path).and_then(|entries| {
            let mut names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect::<io::Result<Vec<_>>>()?;
            names.sort();
            Ok(names)
        });
        present(names, "list", path)
    }

    /// Whether `file` is there (links are not followed).
    pub fn exists(&self, file: impl AsRef<Path>) -> bool {
        fs::symlink_metadata(self.path(file)).is_ok()
    }

    /// Stores `value` in `attribute` through this host's kernel.
    ///
    /// # Errors
    /// As [`Kernel::store`]; `Stuck` at once for a device with a store that has not returned: it never gets another.
    pub fn store(&self, attribute: impl AsRef<Path>, value: &str, deadline: Instant) -> Result<(), StoreError> {
        let store = StuckStore { attribute: attribute.as_ref().into(), value: value.into(), pid: 0 };
        if store.device().is_some() && self.stuck_stores().iter().any(|stuck| stuck.device() == store.device()) {
            return Err(StoreError::Stuck { attribute: store.attribute, value: store.value });
        }
        self.kernel.store(attribute.as_ref(), value, deadline)
    }

    /// Stores that have not returned, also those of a daemon that has ended.
    pub fn stuck_stores(&self) -> Vec<StuckStore> {
        self.kernel.stuck_stores()
    }

    /// Has `hook` called, from another thread, for each store that returns after its deadline.
    pub fn on_late_store(&self, hook: LateHook) {
        self.kernel.on_late_store(hook);
    }

    /// Whether a unit of the host's service manager is active.
    ///
    /// # Errors
    /// As [`Kernel::unit_is_active`].
    pub fn unit_is_active(&self, unit: &str, deadline: Instant) -> Result<bool, UnitError> {
        self.kernel.unit_is_active(unit, deadline)
    }

    /// Whether the host shuts down.
    ///
    /// # Errors
    /// As [`Kernel::is_shutting_down`].
    pub fn is_shutting_down(&self, deadline: Instant) -> Result<bool, UnitError> {
        self.kernel.is_shutting_down(deadline)
    }

    /// Asks the host's service manager, and waits until it is done.
    ///
    /// # Errors
    /// As [`Kernel::unit`].
    pub fn unit(&self, ask: &UnitAsk, deadline: Instant) -> Result<(), UnitError> {
        self.kernel.unit(ask, deadline)
    }
}

// A device can leave while we look: its files then answer ENOENT, ENOTDIR or ENODEV, and it simply is not there any more.
fn present<T>(result: io::Result<T>, verb: &'static str, path: PathBuf) -> Result<Option<T>, HostError> {
    const ENODEV: i32 = 19;
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(error) if error.raw_os_error() == Some(ENODEV) => Ok(None),
        Err(source) => Err(HostError { verb, path, source }),
    }
}
