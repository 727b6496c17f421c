//! Who holds a device: processes with one of its nodes open or mapped.
//!
//! A look at `/proc` is advisory: a driver can be in use by the kernel itself, or by a process that has left nothing to see. It
//! is made on demand, since it reads every process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

use crate::{Function, Host, PciAddress};

/// A process that holds a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// The device.
    pub device: PciAddress,
    /// The process.
    pub pid: u32,
    /// Its name (`comm`, at most 15 bytes).
    pub command: String,
    /// The systemd unit it runs in.
    pub unit: Option<String>,
    /// What it holds, below the root (`dev/vfio/31`).
    pub node: String,
    /// How.
    pub how: Hold,
}

/// How a process holds a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hold {
    /// An open file descriptor.
    Open,
    /// A memory mapping.
    Mapped,
}

/// What a look at all processes found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    /// Holders by device and process, each node once.
    pub found: Vec<Holder>,
    /// Processes whose descriptors may not be read: "nobody" would be a guess.
    pub unreadable: Vec<u32>,
}

impl Holders {
    /// Looks for processes that hold one of `functions`.
    pub fn of<'a>(host: &Host, functions: impl IntoIterator<Item = &'a Function>) -> Self {
        Look::new(host, all_nodes(host, functions)).at_all()
    }

    /// Looks for what the process `pid` holds of `functions`.
    pub fn by_pid<'a>(host: &Host, functions: impl IntoIterator<Item = &'a Function>, pid: u32) -> Self {
        let mut look = Look::new(host, all_nodes(host, functions));
        look.at(pid);
        look.holders
    }
}

/// The functions of each node: that of a group is the node of all its members.
type Nodes = BTreeMap<String, Vec<PciAddress>>;

fn all_nodes<'a>(host: &Host, functions: impl IntoIterator<Item = &'a Function>) -> Nodes {
    let mut all = Nodes::new();
    for (node, device) in functions.into_iter().flat_map(|function| nodes(host, function)) {
        all.entry(node).or_default().push(device);
    }
    all
}

/// The nodes by which a process can hold `function`, below the root.
fn nodes(host: &Host, function: &Function) -> Vec<(String, PciAddress)> {
    let dir = format!("sys/bus/pci/devices/{}", function.address);
    let mut nodes: Vec<String> = function.vfio_group_node().into_iter().collect();
    nodes.extend(function.vfio_device.as_deref().and_then(|device| Some(format!("dev/vfio/devices/{}", device.split_once('/')?.1))));
    nodes.extend(nvidia_minor(host, function.address).map(|minor| format!("dev/nvidia{minor}")));
    let drm = host.entries(format!("{dir}/drm")).ok().flatten().unwrap_or_default();
    nodes.extend(drm.into_iter().map(|name| format!("dev/dri/{name}")));
    let real = fs::canonicalize(host.path(&dir)).ok();
    let below = real.as_deref().and_then(|real| below_root(&canonical_root(host), real.to_str()?));
    nodes.extend(below.into_iter().flat_map(|dir| (0..6).map(move |index| format!("{dir}/resource{index}"))));
    nodes.into_iter().map(|node| (node, function.address)).collect()
}

/// The number of `/dev/nvidiaN`, of the driver's own `information` file (`kernel-open/nvidia/nv-procfs.c`).
fn nvidia_minor(host: &Host, address: PciAddress) -> Option<u32> {
    let text = host.read(format!("proc/driver/nvidia/gpus/{address}/information")).ok().flatten()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Device Minor:"))?;
    line.trim().parse().ok()
}

fn canonical_root(host: &Host) -> String {
    let root = fs::canonicalize(host.root()).unwrap_or_else(|_| host.root().to_owned());
    root.to_string_lossy().trim_end_matches('/').to_owned()
}

// Processes of a simulated host are real ones: what they hold has the host's root before it.
fn below_root(root: &str, path: &str) -> Option<String> {
    let inside = path.strip_prefix(root).unwrap_or(path);
    inside.strip_prefix('/').map(str::to_owned)
}

const ESRCH: i32 = 3;

/// What the descriptor of a VFIO device points to: no node, since a group hands it out.
const VFIO_DEVICE: &str = "anon_inode:[vfio-device]";

struct Look<'a> {
    host: &'a Host,
    root: String,
    nodes: Nodes,
    holders: Holders,
}

impl<'a> Look<'a> {
    fn new(host: &'a Host, nodes: Nodes) -> Self {
        Self { host, root: canonical_root(host), nodes, holders: Holders::default() }
    }

    fn at_all(mut self) -> Holders {
        // No list of processes is no proof that nobody holds a device: 0 stands for all of them.
        let Ok(processes) = self.host.entries("proc") else {
            self.holders.unreadable.push(0);
            return self.holders;
        };
        let processes = processes.unwrap_or_default();
        for pid in processes.iter().filter_map(|name| name.parse().ok()) {
            self.at(pid);
        }
        self.holders.found.sort();
        self.holders
    }

    fn at(&mut self, pid: u32) {
        let mut held = BTreeSet::new();
        // Our own descriptors are not in the way: we open no device.
        match fs::read_dir(self.host.path(format!("proc/{pid}/fd"))) {
            Ok(entries) => {
                for descriptor in entries.flatten() {
                    let Ok(target) = fs::read_link(descriptor.path()) else { continue };
                    held.extend(self.held_by(&target, Hold::Open));
                    if target == Path::new(VFIO_DEVICE) {
                        held.extend(self.opened(pid, &descriptor.file_name().to_string_lossy()));
                    }
                }
            }
            // The process has ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(ESRCH) => {}
            Err(_) => self.holders.unreadable.push(pid),
        }
        // A process in the middle of a fault on a stuck device keeps its map from being read.
        let maps = self.host.read_locked(format!("proc/{pid}/maps"));
        if maps.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            self.holders.unreadable.push(pid);
        }
        let maps = maps.ok().flatten().unwrap_or_default();
        let mapped = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
        held.extend(mapped.flat_map(|path| self.held_by(path, Hold::Mapped)));
        if !held.is_empty() {
            self.note(pid, held);
        }
    }

    // `vfio_device_show_fdinfo` (drivers/vfio/vfio_main.c, since Linux 6.18) says which device it is: its group may be closed by now.
    fn opened(&self, pid: u32, descriptor: &str) -> Option<(String, PciAddress, Hold)> {
        let information = self.host.read(format!("proc/{pid}/fdinfo/{descriptor}")).ok().flatten()?;
        let path = information.lines().find_map(|line| line.strip_prefix("vfio-device-syspath:"))?.trim();
        let device: PciAddress = path.rsplit('/').next()?.parse().ok()?;
        let is_wanted = self.nodes.values().flatten().any(|wanted| *wanted == device);
        is_wanted.then(|| (path.trim_start_matches('/').to_owned(), device, Hold::Open))
    }

    fn held_by(&self, target: &Path, how: Hold) -> Vec<(String, PciAddress, Hold)> {
        let Some(node) = target.to_str().and_then(|target| below_root(&self.root, target)) else { return Vec::new() };
        let devices = self.nodes.get(&node).into_iter().flatten();
        devices.map(|device| (node.clone(), *device, how)).collect()
    }

    fn note(&mut self, pid: u32, held: BTreeSet<(String, PciAddress, Hold)>) {
        let read = |name: &str| self.host.read(format!("proc/{pid}/{name}")).ok().flatten().unwrap_or_default();
        let (command, unit) = (read("comm"), unit(&read("cgroup")));
        let holder = |(node, device, how)| Holder { device, pid, command: command.clone(), unit: unit.clone(), node, how };
        self.holders.found.extend(held.into_iter().map(holder));
    }
}

/// The unit of a process, of `/proc/<pid>/cgroup` (`0::/system.slice/nvidia-persistenced.service`).
fn unit(cgroup: &str) -> Option<String> {
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::"))?;
    let named = |name: &&str| name.ends_with(".service") || name.ends_with(".scope");
    path.rsplit('/').find(named).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_is_the_innermost_service_or_scope() {
        assert_eq!(unit("0::/system.slice/nvidia-persistenced.service").as_deref(), Some("nvidia-persistenced.service"));
        assert_eq!(unit("0::/machine.slice/machine-qemu.scope/libvirt/emulator").as_deref(), Some("machine-qemu.scope"));
        assert_eq!(unit("0::/user.slice"), None);
        assert_eq!(unit(""), None);
    }
}
