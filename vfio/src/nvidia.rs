//! NVIDIA's own protection of a GPU in use: `/proc/driver/nvidia/gpus/<address>/unbindLock` (kernel-open/nvidia/nv-procfs.c of the
//! open kernel modules).
//!
//! Unbinding a GPU that is in use hangs in the driver. 1 is taken only while nobody uses it, and keeps everybody out until 0 is
//! stored or the driver leaves; reading it back says whether it was taken.

use std::io;
use std::path::PathBuf;
use std::time::Instant;

use rustix::io::Errno;

use crate::{Deadlines, Host, PciAddress, StoreError};

fn lock(device: PciAddress) -> PathBuf {
    format!("proc/driver/nvidia/gpus/{device}/unbindLock").into()
}

fn is_locked(host: &Host, device: PciAddress) -> bool {
    host.read_locked(lock(device)).is_ok_and(|value| value.as_deref() == Some("1"))
}

/// Keeps everybody from using a GPU, where its driver can; `EBUSY` where somebody uses it.
pub(crate) fn take(host: &Host, device: PciAddress, deadlines: &Deadlines) -> Result<(), StoreError> {
    let attribute = lock(device);
    if !host.exists(&attribute) {
        return Ok(());
    }
    host.store(&attribute, "1", Instant::now() + deadlines.of(&attribute))?;
    // One that is taken and cannot be read back has left with its driver.
    if is_locked(host, device) || !host.exists(&attribute) {
        return Ok(());
    }
    let source = io::Error::from(Errno::BUSY);
    Err(StoreError::Refused { attribute, value: "1".into(), source })
}

/// Lets everybody use a GPU again that its driver still has.
pub(crate) fn give_back(host: &Host, device: PciAddress, deadlines: &Deadlines) -> Result<(), StoreError> {
    let attribute = lock(device);
    if !is_locked(host, device) {
        return Ok(());
    }
    host.store(&attribute, "0", Instant::now() + deadlines.of(&attribute))
}

/// Whether a GPU is kept from everybody although its driver has it.
pub(crate) fn is_kept(host: &Host, device: PciAddress) -> bool {
    host.exists(lock(device)) && is_locked(host, device)
}
