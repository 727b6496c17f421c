//! Saving what is read of a host, as a tree that [`Host::captured`](crate::Host::captured) reads like the host itself.
//!
//! What to save is not listed here: the host is observed, and every path that the observation asked for is laid again. So nothing is
//! read that gpuward does not read anyway, and a capture can never lack what a newer version has learnt to read.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};

use crate::config_space::ConfigSpace;
use crate::{Host, Inventory};

/// The longest file that is saved.
const LONGEST: u64 = 16 << 20;
/// The most links on the way to a file: a loop ends there.
const MOST_LINKS: u32 = 16;

/// What was saved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Captured {
    /// Files and links saved.
    pub saved: usize,
    /// Files that could not be read, as `path: reason`.
    pub unreadable: Vec<String>,
}

/// The place for a capture cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}", path.display())]
pub struct CaptureError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Saves what observing `host` reads below `dir`, which must not be there yet. Serial numbers of devices are blanked.
///
/// # Errors
/// `dir` is there, or cannot be written.
pub fn capture(host: &Host, dir: &Path) -> Result<Captured, CaptureError> {
    fs::create_dir(dir).map_err(|source| CaptureError { path: dir.into(), source })?;
    let (host, asked) = host.noting();
    Inventory::observe(&host, 0);
    let asked = asked.lock().map(|asked| asked.clone()).unwrap_or_default();
    let mut copy = Copy { from: host.root(), to: dir, captured: Captured::default() };
    for path in asked {
        copy.lay(&path, MOST_LINKS)?;
    }
    Ok(copy.captured)
}

struct Copy<'a> {
    from: &'a Path,
    to: &'a Path,
    captured: Captured,
}

impl Copy<'_> {
    /// Lays `path` (below the root) with the links and directories on the way to it.
    fn lay(&mut self, path: &Path, links: u32) -> Result<(), CaptureError> {
        let mut at = PathBuf::new();
        let mut rest = path.components();
        while let Some(component) = rest.next() {
            at.push(component);
            let Ok(found) = fs::symlink_metadata(self.from.join(&at)) else { return Ok(()) };
            if found.is_symlink() {
                return match self.link(&at)? {
                    Some(target) if links > 0 && !rest.as_path().as_os_str().is_empty() => {
                        self.lay(&target.join(rest.as_path()), links - 1)
                    }
                    Some(_) | None => Ok(()),
                };
            }
            if found.is_file() && found.permissions().mode() & 0o444 == 0 {
                // It takes stores only; that it is there is all there is to save.
                return self.written(&at, |to| fs::write(to, ""));
            }
            if found.is_file() {
                return self.file(&at);
            }
            self.written(&at, |to| fs::create_dir_all(to))?;
        }
        self.children(&at)
    }

    /// Lays the link at `at`; where it points to, below the root.
    fn link(&mut self, at: &Path) -> Result<Option<PathBuf>, CaptureError> {
        let Ok(target) = fs::read_link(self.from.join(at)) else { return Ok(None) };
        if fs::symlink_metadata(self.to.join(at)).is_err() {
            self.written(at, |to| symlink(&target, to))?;
            self.captured.saved += 1;
        }
        Ok(Some(normal(&at.parent().unwrap_or(Path::new("")).join(target))))
    }

    /// The names in a directory that was listed. Files in it are laid where they were read themselves.
    fn children(&mut self, dir: &Path) -> Result<(), CaptureError> {
        for entry in fs::read_dir(self.from.join(dir)).into_iter().flatten().flatten() {
            let (at, Ok(kind)) = (dir.join(entry.file_name()), entry.file_type()) else { continue };
            if kind.is_symlink() {
                self.link(&at)?;
            } else if kind.is_dir() {
                self.written(&at, |to| fs::create_dir_all(to))?;
            }
        }
        Ok(())
    }

    fn file(&mut self, at: &Path) -> Result<(), CaptureError> {
        let mut bytes = Vec::new();
        let read = File::open(self.from.join(at)).and_then(|file| file.take(LONGEST).read_to_end(&mut bytes));
        if let Err(error) = read {
            self.captured.unreadable.push(format!("{}: {}", at.display(), error.kind()));
            return Ok(());
        }
        self.captured.saved += 1;
        self.written(at, |to| fs::write(to, without_private(at, bytes)))
    }

    fn written(&self, at: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), CaptureError> {
        let to = self.to.join(at);
        write(&to).map_err(|source| CaptureError { path: to, source })
    }
}

// Serial numbers are the owner's business; of the module aliases only those of VFIO drivers are of use.
fn without_private(at: &Path, bytes: Vec<u8>) -> Vec<u8> {
    if at.file_name().is_some_and(|name| name == "config") {
        return ConfigSpace::new(bytes).without_serial();
    }
    if at.file_name().is_some_and(|name| name == "modules.alias") {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        return text.lines().filter(|line| line.starts_with("alias vfio_pci:")).flat_map(|line| [line, "\n"]).collect::<String>().into();
    }
    bytes
}

// Without `..`, and never above the root.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => normal.push(name),
            Component::ParentDir => {
                normal.pop();
            }
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_never_leads_above_the_root() {
        let cases =
            [("sys/bus/../devices/a", "sys/devices/a"), ("../../etc/shadow", "etc/shadow"), ("/sys/devices", "sys/devices"), ("", "")];
        for (path, expected) in cases {
            assert_eq!(normal(Path::new(path)), Path::new(expected));
        }
    }

    #[test]
    fn of_the_aliases_only_those_of_vfio_drivers_are_saved() {
        let text = b"alias pci:v000010DE* nvidia\nalias vfio_pci:v000010DE* nvgrace_gpu_vfio_pci\n".to_vec();
        let kept = without_private(Path::new("lib/modules/6.12/modules.alias"), text);
        assert_eq!(kept, b"alias vfio_pci:v000010DE* nvgrace_gpu_vfio_pci\n");
    }
}
