//! The tree of files that is the state of a simulated host: small moves on it, each leaving it as the kernel would show it.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Component, Path, PathBuf};

/// The tree below a root.
#[derive(Clone, Debug)]
pub struct Tree {
    root: PathBuf,
}

/// Where the simulation keeps what a real kernel keeps in memory.
pub const PRIVATE: &str = ".sim";

impl Tree {
    /// The tree below `root`, which exists.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Its root.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether `file` is there (links are not followed).
    pub fn exists(&self, file: impl AsRef<Path>) -> bool {
        fs::symlink_metadata(self.root.join(file)).is_ok()
    }

    /// The text of `file` without trailing white space; empty where there is none.
    pub fn read(&self, file: impl AsRef<Path>) -> String {
        fs::read_to_string(self.root.join(file)).unwrap_or_default().trim_end().to_owned()
    }

    /// The bytes of `file`.
    ///
    /// # Errors
    /// The file system's.
    pub fn bytes(&self, file: impl AsRef<Path>) -> io::Result<Vec<u8>> {
        fs::read(self.root.join(file))
    }

    /// The last element of what the link `file` points to.
    pub fn link_name(&self, file: impl AsRef<Path>) -> Option<String> {
        let target = fs::read_link(self.root.join(file)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }

    /// The names in `dir`, sorted; empty where there is none.
    pub fn entries(&self, dir: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.root.join(dir)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Makes `dir` and what is above it.
    ///
    /// # Errors
    /// The file system's.
    pub fn make_dir(&self, dir: impl AsRef<Path>) -> io::Result<()> {
        fs::create_dir_all(self.root.join(dir))
    }

    /// Lays `file` with `content`, and what is above it.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(&self, file: impl AsRef<Path>, content: impl AsRef<[u8]>) -> io::Result<()> {
        let path = self.root.join(file);
        match fs::write(&path, &content) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(path.parent().unwrap_or(&self.root))?;
                fs::write(&path, content)
            }
            written => written,
        }
    }

    /// Lays the link `file` to `target`, both below the root, relative as sysfs has it.
    ///
    /// # Errors
    /// The file system's.
    pub fn link(&self, file: impl AsRef<Path>, target: impl AsRef<Path>) -> io::Result<()> {
        let path = self.root.join(&file);
        let parent = file.as_ref().parent().unwrap_or(Path::new(""));
        fs::create_dir_all(self.root.join(parent))?;
        symlink(relative(parent, target.as_ref()), path)
    }

    /// Moves a directory.
    ///
    /// # Errors
    /// The file system's.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
        fs::rename(self.root.join(from), self.root.join(to))
    }

    /// Removes a file, link or directory with all below; nothing where there is none.
    ///
    /// # Errors
    /// The file system's.
    pub fn remove(&self, file: impl AsRef<Path>) -> io::Result<()> {
        let path = self.root.join(file);
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_dir() => fs::remove_dir_all(path),
            Ok(_) => fs::remove_file(path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Where `file` really is, below the root; `None` where it is not.
    pub fn resolve(&self, file: &Path) -> Option<PathBuf> {
        let root = fs::canonicalize(&self.root).ok()?;
        let path = fs::canonicalize(self.root.join(file)).ok()?;
        Some(path.strip_prefix(root).ok()?.to_owned())
    }

    /// Whether a process below `/proc` has `node` (`dev/vfio/31`) open: one of the host's own, or a real one that opened the
    /// file of this tree.
    pub fn is_open(&self, node: &Path) -> bool {
        let host_name = Path::new("/").join(node);
        let real_name = fs::canonicalize(self.root.join(node)).ok();
        let pids = self.entries("proc").into_iter().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
        let mut open = pids.flat_map(|pid| {
            let fds = self.root.join("proc").join(pid).join("fd");
            fs::read_dir(fds).into_iter().flatten().flatten().filter_map(|fd| fs::read_link(fd.path()).ok())
        });
        open.any(|target| target == host_name || Some(target) == real_name)
    }
}

/// How `target` is reached from the directory `from`, both below one root.
fn relative(from: &Path, target: &Path) -> PathBuf {
    let from: Vec<Component> = from.components().collect();
    let to: Vec<Component> = target.components().collect();
    let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = from[shared..].iter().map(|_| Component::ParentDir);
    up.chain(to[shared..].iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_relative_to_its_directory() {
        let cases = [
            ("sys/bus/pci/devices", "sys/devices/pci0000:00/0000:00:01.0", "../../../devices/pci0000:00/0000:00:01.0"),
            ("sys/devices/a/b", "sys/devices/a/c", "../c"),
        ];
        for (from, target, expected) in cases {
            assert_eq!(relative(Path::new(from), Path::new(target)), Path::new(expected));
        }
    }
}
