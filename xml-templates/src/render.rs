//! From specification to XML.

use askama::Template;

use crate::{Cpu, DiskFormat, DiskSource, Domain, DomainType, Firmware, Hostdev, InterfaceSource};

/// The XML namespace of gpuward's metadata in a domain.
pub const NAMESPACE: &str = "https://gpuward.org/xmlns/libvirt/1";

/// The name of the channel on which the guest's agent listens (`qemu-guest-agent`).
pub const AGENT_CHANNEL: &str = "org.qemu.guest_agent.0";

/// XML that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the XML of {what}")]
pub struct RenderError {
    what: String,
    #[source]
    source: askama::Error,
}

#[derive(Template)]
#[template(path = "domain.xml")]
struct DomainTemplate<'a> {
    domain: &'a Domain,
    namespace: &'static str,
    agent: &'static str,
}

#[derive(Template)]
#[template(path = "hostdev.xml")]
struct HostdevTemplate {
    address: vfio::PciAddress,
    alias: String,
}

/// The XML to create `domain` with (`virDomainCreateXML`).
///
/// # Errors
/// Never in practice: writing into memory.
pub fn render_domain(domain: &Domain) -> Result<String, RenderError> {
    let template = DomainTemplate { domain, namespace: NAMESPACE, agent: AGENT_CHANNEL };
    template.render().map_err(|source| RenderError { what: domain.name.to_string(), source })
}

/// The `<hostdev>` element for `hostdev`, for domains that others define.
///
/// # Errors
/// Never in practice: writing into memory.
pub fn render_hostdev(hostdev: &Hostdev) -> Result<String, RenderError> {
    let template = HostdevTemplate { address: hostdev.address, alias: hostdev.alias() };
    template.render().map_err(|source| RenderError { what: hostdev.alias(), source })
}

/// What the template asks of a specification, in libvirt's words.
impl DomainTemplate<'_> {
    fn domain_type(&self) -> &'static str {
        match self.domain.domain_type {
            DomainType::Kvm => "kvm",
            DomainType::Qemu => "qemu",
            DomainType::Test => "test",
        }
    }

    // The test driver knows one architecture and one machine, and no firmware.
    fn arch(&self) -> &'static str {
        if self.is_real() { "x86_64" } else { "i686" }
    }

    fn is_real(&self) -> bool {
        self.domain.domain_type != DomainType::Test
    }

    fn cpu_mode(&self) -> &'static str {
        match self.domain.cpu {
            Cpu::HostPassthrough => "host-passthrough",
            Cpu::HostModel => "host-model",
            Cpu::Maximum => "maximum",
        }
    }

    fn is_passthrough(&self) -> bool {
        self.domain.cpu == Cpu::HostPassthrough
    }

    fn is_uefi(&self) -> bool {
        self.is_real() && self.domain.firmware != Firmware::Bios
    }

    fn secure_boot(&self) -> &'static str {
        if self.domain.firmware == Firmware::UefiSecure { "yes" } else { "no" }
    }

    // Secure boot needs system management mode: the guest must not write its own variables.
    fn needs_smm(&self) -> bool {
        self.is_real() && self.domain.firmware == Firmware::UefiSecure
    }

    fn disk_target(&self, index: &usize) -> char {
        char::from(b'a' + u8::try_from(*index).unwrap_or_default() % 26)
    }

    fn disk_format(&self, format: &DiskFormat) -> &'static str {
        match format {
            DiskFormat::Raw => "raw",
            DiskFormat::Qcow2 => "qcow2",
        }
    }

    // The root complex is bus 0. The devices' ports come first, so that a device keeps its guest address whatever else the
    // machine has; libvirt makes the ports of its own devices behind them, without a gap.
    fn port(&self, index: &usize) -> usize {
        1 + index
    }
}

#[cfg(test)]
mod tests;
