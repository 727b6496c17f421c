//! Lays a tree from a record of umockdev: `P:` names a device, `A:` a text attribute, `H:` a binary one in hexadecimal, `L:` a
//! link, `E:` a property of its uevent.
//!
//! Source of the format: `docs/script-format.txt` and the README of umockdev.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// One device of a record.
#[derive(Debug, Default)]
struct Device {
    path: String,
    lines: Vec<(char, String, String)>,
}

/// Lays the devices of `record` below `root`, with the links from the buses, drivers and groups that they name.
///
/// # Errors
/// The file system's.
pub fn lay(root: &Path, record: &str) -> io::Result<()> {
    for device in devices(record) {
        let dir = format!("sys{}", device.path);
        fs::create_dir_all(root.join(&dir))?;
        for (kind, name, value) in &device.lines {
            match kind {
                'A' => put(&root.join(&dir).join(name), unescape(value).as_bytes())?,
                'H' => put(&root.join(&dir).join(name), &bytes(value))?,
                'L' => link(root, &dir, name, value)?,
                _ => {}
            }
        }
        let properties = device.lines.iter().filter(|(kind, ..)| *kind == 'E');
        let uevent: String = properties.clone().map(|(_, name, value)| format!("{name}={value}\n")).collect();
        put(&root.join(&dir).join("uevent"), uevent.as_bytes())?;
        if let Some((_, _, bus)) = properties.clone().find(|(_, name, _)| name == "SUBSYSTEM") {
            back(root, &format!("sys/bus/{bus}/devices"), &dir)?;
        }
    }
    Ok(())
}

fn devices(record: &str) -> Vec<Device> {
    let mut devices: Vec<Device> = Vec::new();
    for line in record.lines() {
        let Some((kind, rest)) = line.split_once(": ") else { continue };
        if kind == "P" {
            devices.push(Device { path: rest.into(), lines: Vec::new() });
        } else if let (Some(device), Some((name, value)), Some(kind)) = (devices.last_mut(), rest.split_once('='), kind.chars().next()) {
            device.lines.push((kind, name.into(), value.into()));
        }
    }
    devices
}

fn put(file: &Path, content: &[u8]) -> io::Result<()> {
    fs::create_dir_all(file.parent().unwrap_or(Path::new("/")))?;
    fs::write(file, content)
}

/// A link of a device; drivers and groups also link back to it.
fn link(root: &Path, dir: &str, name: &str, target: &str) -> io::Result<()> {
    let link = root.join(dir).join(name);
    fs::create_dir_all(link.parent().unwrap_or(root))?;
    symlink(target, link)?;
    let named = resolve(dir, target);
    match name {
        "driver" => {
            for file in ["bind", "unbind"] {
                put(&root.join(&named).join(file), b"")?;
            }
            back(root, &named, dir)
        }
        "iommu_group" => back(root, &format!("{named}/devices"), dir),
        _ => Ok(()),
    }
}

/// The link in `from` to the device in `dir`.
fn back(root: &Path, from: &str, dir: &str) -> io::Result<()> {
    fs::create_dir_all(root.join(from))?;
    let up = "../".repeat(from.split('/').count());
    let name = dir.rsplit('/').next().unwrap_or(dir);
    symlink(format!("{up}{dir}"), root.join(from).join(name))
}

/// Where the relative `target` of a link in `dir` is, below the root.
fn resolve(dir: &str, target: &str) -> String {
    let mut path = PathBuf::from(dir);
    for part in target.split('/') {
        if part == ".." {
            path.pop();
        } else {
            path.push(part);
        }
    }
    path.to_string_lossy().into_owned()
}

fn unescape(text: &str) -> String {
    text.replace("\\n", "\n").replace("\\\\", "\\")
}

/// The bytes of hexadecimal text; what is no pair of digits ends them.
fn bytes(text: &str) -> Vec<u8> {
    let pairs = text.as_bytes().chunks_exact(2);
    pairs.map_while(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}
