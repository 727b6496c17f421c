//! How people name things: devices by address or libvirt's name, machines with or without their tenant.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use vfio::{InvalidAddress, PciAddress};

use crate::client::{ENTRY, Objects, Record};
use crate::id::TenantId;

/// Reads `0000:41:00.0`, `41:00.0` or `pci_0000_41_00_0`.
pub(super) fn parse_device(text: &str) -> Result<PciAddress, InvalidAddress> {
    if let Some(address) = from_node_device_name(text) {
        return Ok(address);
    }
    text.parse().or_else(|error| format!("0000:{text}").parse().map_err(|_| error))
}

/// The device whose object path this is.
pub(super) fn device_of_path(path: &str) -> Option<PciAddress> {
    from_node_device_name(path.strip_prefix(ENTRY)?.strip_prefix("/device/")?)
}

/// The number in the last element of an object path: a job's, a group's.
pub(super) fn number_of_path(path: &str) -> Option<u64> {
    path.rsplit('/').next()?.parse().ok()
}

/// What an object path is about, for a person: `0000:41:00.0`, `job 17`, `claim c…`; other text as it is.
pub(super) fn subject_of_path(path: &str) -> String {
    if let Some(device) = device_of_path(path) {
        return device.to_string();
    }
    path.strip_prefix(ENTRY).map_or_else(|| path.to_owned(), |below| below.trim_start_matches('/').replacen('/', " ", 1))
}

/// As [`subject_of_path`]; machines that are known by `tenant/name`.
pub(super) fn called(objects: &Objects, path: &str) -> String {
    let machine = objects.get(path).and_then(|interfaces| interfaces.get("Machine"));
    machine.map_or_else(|| subject_of_path(path), |machine| machine_name(objects, machine))
}

/// `tenant/name` of a machine's properties.
pub(super) fn machine_name(objects: &Objects, machine: &Record) -> String {
    format!("{}/{}", tenant_name(objects, machine.text("Tenant")), machine.text("Name"))
}

/// The name of the tenant at `path`; of one that the caller does not see the path's last word.
pub(super) fn tenant_name(objects: &Objects, path: &str) -> String {
    let tenant = objects.get(path).and_then(|interfaces| interfaces.get("Tenant"));
    let last = || path.rsplit('/').next().unwrap_or_default().to_owned();
    tenant.map_or_else(last, |tenant| tenant.text("Name").to_owned())
}

fn from_node_device_name(text: &str) -> Option<PciAddress> {
    let mut parts = text.strip_prefix("pci_")?.split('_');
    let (domain, bus, device, function) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    format!("{domain}:{bus}:{device}.{function}").parse().ok()
}

/// A machine: `train-1` or `acme/train-1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MachineName {
    pub tenant: String,
    pub name: String,
}

impl FromStr for MachineName {
    type Err = Infallible;

    // What a name may be is the service's to say.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        let (tenant, name) = text.split_once('/').unwrap_or((TenantId::BUILT_IN_NAME, text));
        Ok(Self { tenant: tenant.into(), name: name.into() })
    }
}

impl fmt::Display for MachineName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tenant, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_may_be_named_in_three_ways() {
        for text in ["0000:41:00.0", "41:00.0", "pci_0000_41_00_0"] {
            assert_eq!(parse_device(text).unwrap().to_string(), "0000:41:00.0", "{text}");
        }
        assert_eq!(parse_device("pci_10000_e1_00_0").unwrap().to_string(), "10000:e1:00.0");
    }

    #[test]
    fn what_is_no_device_is_refused_as_it_was_typed() {
        for text in ["", "gpu0", "pci_0000_41_00", "41:00", "pci_0000_41_00_0_1", "0000:0000:41:00.0"] {
            let error = parse_device(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{text:?} is no PCI address")), "{error}");
        }
    }

    #[test]
    fn a_machine_without_a_tenant_is_the_built_in_tenants() {
        assert_eq!("train-1".parse::<MachineName>().unwrap().to_string(), "default/train-1");
        assert_eq!("acme/train-1".parse::<MachineName>().unwrap().to_string(), "acme/train-1");
    }

    #[test]
    fn an_object_path_says_what_it_is_about() {
        let cases = [
            ("/org/gpuward1/device/pci_0000_41_00_0", "0000:41:00.0"),
            ("/org/gpuward1/job/17", "job 17"),
            ("a reason/with a slash", "a reason/with a slash"),
        ];
        for (path, subject) in cases {
            assert_eq!(subject_of_path(path), subject);
        }
    }
}
