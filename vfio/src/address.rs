//! Where a PCI function sits: domain, bus, device and function number.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The address of one PCI function, printed as the kernel prints it (`0000:41:00.0`).
///
/// The domain has 16 bits on most hosts; Intel VMD makes domains above `ffff`, which are printed with more digits
/// (`10000:e1:00.0`). An address says where a function is now: it is not an identity, cards renumber.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// Text that is no PCI address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no PCI address; write it as 0000:41:00.0 (domain, bus, device and function in hexadecimal)")]
pub struct InvalidAddress {
    text: String,
}

impl PciAddress {
    /// The function at these numbers; `None` where device is above 31 or function above 7.
    pub fn new(domain: u32, bus: u8, device: u8, function: u8) -> Option<Self> {
        (device < 32 && function < 8).then_some(Self { domain, bus, device, function })
    }

    /// PCI domain (segment).
    pub fn domain(self) -> u32 {
        self.domain
    }

    /// Bus number.
    pub fn bus(self) -> u8 {
        self.bus
    }

    /// Device number, 0 to 31.
    pub fn device(self) -> u8 {
        self.device
    }

    /// Function number, 0 to 7.
    pub fn function(self) -> u8 {
        self.function
    }

    /// The name libvirt gives the node device, `pci_0000_41_00_0`; also the last element of the D-Bus object path.
    pub fn node_device_name(self) -> String {
        format!("pci_{:04x}_{:02x}_{:02x}_{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = InvalidAddress;

    fn from_str(text: &str) -> Result<Self, InvalidAddress> {
        parse(text).ok_or_else(|| InvalidAddress { text: text.chars().take(64).collect() })
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let (rest, function) = text.split_once('.')?;
    let mut parts = rest.split(':');
    let (domain, bus, device) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() || !(4..=8).contains(&domain.len()) || bus.len() != 2 || device.len() != 2 {
        return None;
    }
    if function.len() != 1 || ![domain, bus, device, function].iter().all(|part| is_hex(part)) {
        return None;
    }
    let byte = |part| u8::from_str_radix(part, 16).ok();
    PciAddress::new(u32::from_str_radix(domain, 16).ok()?, byte(bus)?, byte(device)?, byte(function)?)
}

// `from_str_radix` takes a leading sign, an address has none.
fn is_hex(part: &str) -> bool {
    part.bytes().all(|byte| byte.is_ascii_hexdigit())
}

impl TryFrom<String> for PciAddress {
    type Error = InvalidAddress;

    fn try_from(text: String) -> Result<Self, InvalidAddress> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_prints_as_the_kernel_prints_it() {
        for text in ["0000:41:00.0", "ffff:ff:1f.7", "10000:e1:00.0"] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn the_node_device_name_is_libvirts() {
        let address: PciAddress = "0000:41:00.0".parse().unwrap();
        assert_eq!(address.node_device_name(), "pci_0000_41_00_0");
    }

    #[test]
    fn text_that_is_no_address_is_refused() {
        let wrong = [
            "",
            "41:00.0",
            "0000:41:00",
            "0000:41:20.0",
            "0000:41:00.8",
            "0000:41:00.0 ",
            "+000:41:00.0",
            "0000:41:00.0.0",
            "g000:41:00.0",
            "000000000:41:00.0",
            "0000:4100.0",
            "0000:41:00:00.0",
            "../0000:41:00.0",
        ];
        for text in wrong {
            assert!(text.parse::<PciAddress>().is_err(), "{text:?}");
        }
    }
}
