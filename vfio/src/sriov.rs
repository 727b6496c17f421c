//! Virtual functions: how many there are, and making them.
//!
//! The kernel's drivers make them through `sriov_numvfs`, which may make fewer than asked with a warning in its log only
//! (`sriov_numvfs_store`, drivers/pci/iov.c), and whose links appear a while later (P54). NVIDIA's refuses that: its `sriov-manage`
//! makes all or none, outside this process' sandbox.

use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::{Deadlines, Host, HostError, PciAddress, StoreError, UnitAsk, attribute};

/// NVIDIA's tool, below the host's root.
const SRIOV_MANAGE: &str = "usr/lib/nvidia/sriov-manage";

/// How many `sriov_numvfs` says there are; `None` without such a file.
pub(crate) fn count(host: &Host, device: PciAddress) -> Result<Option<u16>, HostError> {
    let text = host.read_locked(attribute(device, "sriov_numvfs"))?;
    Ok(text.and_then(|text| text.trim().parse().ok()))
}

/// Whether there are exactly `count`, each with its link and, where the physical function has one, its IOMMU group.
pub(crate) fn is_whole(host: &Host, device: PciAddress, wanted: u16) -> bool {
    let has_groups = host.exists(attribute(device, "iommu_group"));
    let is_there = |number: u16| {
        let link = attribute(device, &format!("virtfn{number}"));
        host.exists(link.join("vendor")) && (!has_groups || host.exists(link.join("iommu_group")))
    };
    let is_counted = count(host, device).is_ok_and(|says| says == Some(wanted));
    is_counted && (0..wanted).all(is_there) && !host.exists(attribute(device, &format!("virtfn{wanted}")))
}

/// Whether virtual functions of `device` are made by NVIDIA's tool, all or none.
pub fn is_made_by_nvidia(host: &Host, device: PciAddress) -> bool {
    host.exists(SRIOV_MANAGE) && host.link_name(attribute(device, "driver")).is_ok_and(|driver| driver.as_deref() == Some("nvidia"))
}

/// Makes as many as `wanted`, from whatever there is, and waits for them. Where fewer come, all are taken away again.
pub(crate) fn make(host: &Host, device: PciAddress, wanted: u16, deadlines: &Deadlines) -> Result<(), StoreError> {
    let store = |count: u16| {
        if is_made_by_nvidia(host, device) { run(host, device, count, deadlines) } else { say(host, device, count, deadlines) }
    };
    let says = count(host, device).ok().flatten().unwrap_or_default();
    // From one number to another the way leads over none (`EBUSY`).
    if says != 0 && says != wanted {
        store(0)?;
    }
    if says != wanted && wanted != 0 {
        store(wanted)?;
    }
    if is_whole_in_time(host, device, wanted, deadlines) {
        return Ok(());
    }
    store(0)?;
    let source = io::Error::other(format!("fewer than {wanted} virtual functions appeared, and were taken away again"));
    Err(StoreError::Refused { attribute: attribute(device, "sriov_numvfs"), value: wanted.to_string(), source })
}

fn is_whole_in_time(host: &Host, device: PciAddress, wanted: u16, deadlines: &Deadlines) -> bool {
    let until = Instant::now() + deadlines.appear;
    while !is_whole(host, device, wanted) {
        if Instant::now() >= until {
            return false;
        }
        thread::sleep(Duration::from_millis(20));
    }
    true
}

fn say(host: &Host, device: PciAddress, count: u16, deadlines: &Deadlines) -> Result<(), StoreError> {
    let attribute = attribute(device, "sriov_numvfs");
    host.store(&attribute, &count.to_string(), Instant::now() + deadlines.of(&attribute))
}

fn run(host: &Host, device: PciAddress, count: u16, deadlines: &Deadlines) -> Result<(), StoreError> {
    let word = if count == 0 { "-d" } else { "-e" };
    let name = device.to_string().replace(':', "-");
    let command = vec![Path::new("/").join(SRIOV_MANAGE).to_string_lossy().into_owned(), word.to_owned(), device.to_string()];
    let ask = UnitAsk::Run { unit: format!("gpuward-sriov-{name}.service"), command };
    host.unit(&ask, Instant::now() + deadlines.sriov).map_err(|error| StoreError::Refused {
        attribute: SRIOV_MANAGE.into(),
        value: format!("{word} {device}"),
        source: io::Error::other(error),
    })
}
