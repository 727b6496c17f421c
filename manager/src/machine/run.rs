//! Starting and ending a machine's domain, in a worker's thread.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use vfio::PciAddress;

use super::{Look, Running, Subject};
use crate::failure::{ErrorKind, Failure};
use crate::libvirt::hostdevs;

/// How long a process may take to show itself once libvirt has created its domain.
const TO_APPEAR: Duration = Duration::from_secs(20);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);

/// A domain to be started.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The machine.
    pub subject: Subject,
    /// Its domain's XML.
    pub xml: String,
    /// How long libvirt may take to create it: it pins the guest's whole memory first.
    pub within: Duration,
}

/// Creates the domain and waits until it runs with its process and every device.
///
/// # Errors
/// libvirt refuses or does not answer, or the domain is not as it should be. It may run all the same: end it.
pub fn start(launch: &Launch) -> Result<Running, Failure> {
    let subject = &launch.subject;
    subject.libvirt.create(launch.xml.clone(), launch.within)?;
    let until = Instant::now() + TO_APPEAR;
    loop {
        match subject.look() {
            Look::Running(running @ Running { process: Some(_), .. }) => {
                has_every_device(subject, &running)?;
                return Ok(running);
            }
            Look::Running(Running { process: None, .. }) if Instant::now() < until => thread::sleep(PAUSE),
            Look::Running(Running { process: None, .. }) => {
                let message = format!("machine {} runs by libvirt's word, but its process is nowhere to be found", subject.uuid);
                return Err(Failure::new(ErrorKind::HypervisorFailed, message).because("its pid file is missing or old"));
            }
            Look::Gone | Look::Ending { .. } => return Err(ended_at_once(subject)),
            Look::Unknown(failure) => return Err(failure),
        }
    }
}

fn ended_at_once(subject: &Subject) -> Failure {
    let name = super::domain_name(subject.uuid);
    Failure::new(ErrorKind::HypervisorFailed, format!("the domain {name} ended as soon as it had started"))
        .remedy(format!("QEMU's own words are in /var/log/libvirt/qemu/{name}.log"))
}

fn has_every_device(subject: &Subject, running: &Running) -> Result<(), Failure> {
    let failed = |why: String| Failure::new(ErrorKind::HypervisorFailed, format!("the domain {} {why}", running.domain.name));
    let present: BTreeSet<PciAddress> =
        hostdevs(&running.domain.xml).map_err(|error| failed(format!("has no usable XML: {error}")))?.into_iter().collect();
    match subject.devices.iter().find(|device| !present.contains(&device.address)) {
        Some(missing) => Err(failed(format!("runs without {}", missing.address))),
        None => Ok(()),
    }
}

/// Asks the guest to shut down and waits until the machine is gone, at most `within`.
///
/// # Errors
/// libvirt refuses or does not answer, or it is not gone in time.
pub fn shut_down(subject: &Subject, within: Duration) -> Result<(), Failure> {
    match subject.libvirt.shutdown(subject.uuid) {
        Err(error) if error.is_no_domain() => {}
        answer => answer?,
    }
    subject.wait_until_gone(within)
}

/// Asks the guest to reboot. Whether and when it does is the guest's.
///
/// # Errors
/// libvirt refuses or does not answer.
pub fn reboot(subject: &Subject) -> Result<(), Failure> {
    Ok(subject.libvirt.reboot(subject.uuid)?)
}

/// Ends the domain at once and waits until the machine is gone, at most `within`.
///
/// # Errors
/// libvirt refuses or does not answer, or something is left of it.
pub fn end_now(subject: &Subject, within: Duration) -> Result<(), Failure> {
    subject.libvirt.destroy(subject.uuid)?;
    subject.wait_until_gone(within)
}
