//! A machine's domain: its specification with the devices that its claims give it, for the host that it runs on.

use sha2::{Digest, Sha256};
use uuid::Uuid;
use vfio::{Bar, Function};
use xml_templates::{BadText, BarSize, Cpu, Domain, Hostdev, Interface, Mmio64, Text, mmio64, render_domain};

use super::{BackedBy, Link, Metadata, domain_name};
use crate::failure::{ErrorKind, Failure};
use crate::libvirt::{DomainType, HostFacts};
use crate::spec::{CpuMode, DirectBoot, Disk, DiskFormat, DiskSource, Firmware, MachineSpec, NetworkSource};

/// Where what libvirt opens for a machine lies.
pub const GUEST_DIR: &str = "/var/lib/libvirt/gpuward";

/// What a machine's claims and its tenant's pools give to it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Given<'a> {
    /// Devices that its guest gets.
    pub devices: &'a [Function],
    /// What backs each of its disks, in their order.
    pub backing: &'a [BackedBy],
}

/// The XML of a machine's domain.
///
/// # Errors
/// The host cannot run it, or its specification has text that XML cannot hold.
pub fn domain_xml(spec: &MachineSpec, given: Given<'_>, metadata: &Metadata, host: &HostFacts) -> Result<String, Failure> {
    spec.check_fits(host)?;
    let domain = domain(spec, given, metadata, host).map_err(|error| Failure::of(ErrorKind::InvalidSpec, &error))?;
    render_domain(&domain).map_err(|error| Failure::of(ErrorKind::Internal, &error))
}

fn domain(spec: &MachineSpec, Given { devices, backing }: Given<'_>, metadata: &Metadata, host: &HostFacts) -> Result<Domain, BadText> {
    let name = domain_name(spec.uuid);
    Ok(Domain {
        domain_type: domain_type(host.domain_type),
        serial_log: Some(Text::new(format!("{GUEST_DIR}/{name}-serial.log"))?),
        name: Text::new(name)?,
        uuid: Text::new(spec.uuid.to_string())?,
        metadata: metadata.to_domain()?,
        memory: spec.memory,
        vcpus: spec.vcpus,
        cpu: cpu(spec.cpu_mode, host.domain_type),
        firmware: firmware(spec.firmware),
        direct_boot: spec.direct_boot.as_ref().map(direct_boot).transpose()?,
        disks: disks(&spec.disks, backing)?,
        interfaces: interfaces(spec)?,
        // A guest is spoken to when there is something to say: attestation.
        vsock: false,
        hostdevs: devices.iter().map(|function| Hostdev { address: function.address }).collect(),
        mmio64: window(devices, host, spec.firmware),
    })
}

fn domain_type(of_host: DomainType) -> xml_templates::DomainType {
    match of_host {
        DomainType::Kvm => xml_templates::DomainType::Kvm,
        DomainType::Qemu => xml_templates::DomainType::Qemu,
        DomainType::Test => xml_templates::DomainType::Test,
    }
}

// Emulation has no host processor to pass through.
fn cpu(mode: CpuMode, domain_type: DomainType) -> Cpu {
    match (domain_type, mode) {
        (DomainType::Kvm, CpuMode::HostPassthrough) => Cpu::HostPassthrough,
        (DomainType::Kvm | DomainType::Test, _) => Cpu::HostModel,
        (DomainType::Qemu, _) => Cpu::Maximum,
    }
}

fn firmware(firmware: Firmware) -> xml_templates::Firmware {
    match firmware {
        Firmware::Uefi => xml_templates::Firmware::Uefi,
        Firmware::UefiSecure => xml_templates::Firmware::UefiSecure,
        Firmware::Bios => xml_templates::Firmware::Bios,
    }
}

fn direct_boot(direct: &DirectBoot) -> Result<xml_templates::DirectBoot, BadText> {
    let given = |text: &str| if text.is_empty() { Ok(None) } else { Text::new(text).map(Some) };
    Ok(xml_templates::DirectBoot { kernel: Text::new(&*direct.kernel)?, initrd: given(&direct.initrd)?, cmdline: given(&direct.cmdline)? })
}

// A disk of whose backing nothing is known is left to libvirt, as an administrator's path is.
fn disks(disks: &[Disk], backing: &[BackedBy]) -> Result<Vec<xml_templates::Disk>, BadText> {
    let backing = backing.iter().map(Option::as_deref).chain(std::iter::repeat(None));
    disks.iter().zip(backing).map(|(of, backing)| disk(of, backing)).collect()
}

fn disk(disk: &Disk, backing: Option<&[Link]>) -> Result<xml_templates::Disk, BadText> {
    let link =
        |link: &Link| Ok(xml_templates::Backing { path: Text::new(&*link.path)?, block: link.block, format: disk_format(link.format) });
    Ok(xml_templates::Disk {
        source: match &disk.source {
            DiskSource::Path(path) => xml_templates::DiskSource::Path(Text::new(&**path)?),
            DiskSource::Volume { pool, volume } => {
                xml_templates::DiskSource::Volume { pool: Text::new(&**pool)?, volume: Text::new(&**volume)? }
            }
        },
        format: disk_format(disk.format),
        backing: backing.map(|links| links.iter().map(link).collect()).transpose()?,
        readonly: disk.readonly,
    })
}

fn disk_format(format: DiskFormat) -> xml_templates::DiskFormat {
    match format {
        DiskFormat::Raw => xml_templates::DiskFormat::Raw,
        DiskFormat::Qcow2 => xml_templates::DiskFormat::Qcow2,
    }
}

fn interfaces(spec: &MachineSpec) -> Result<Vec<Interface>, BadText> {
    let numbered = (0u8..).zip(&spec.networks);
    let interface = |(index, network): (u8, &crate::spec::Network)| {
        Ok(Interface {
            source: match &network.source {
                NetworkSource::Network(name) => xml_templates::InterfaceSource::Network(Text::new(&**name)?),
                NetworkSource::Bridge(name) => xml_templates::InterfaceSource::Bridge(Text::new(&**name)?),
            },
            mac: Text::new(network.mac.clone().unwrap_or_else(|| derived_mac(spec.uuid, index)))?,
        })
    };
    numbered.map(interface).collect()
}

// The same machine has the same addresses after each start; two machines hardly ever share one.
fn derived_mac(uuid: Uuid, index: u8) -> String {
    let digest = Sha256::new().chain_update(uuid.as_bytes()).chain_update([index]).finalize();
    format!("52:54:00:{:02x}:{:02x}:{:02x}", digest[0], digest[1], digest[2])
}

fn window(devices: &[Function], host: &HostFacts, firmware: Firmware) -> Mmio64 {
    let wide: Vec<_> = wide_bars(devices).map(|bar| BarSize(bar.size)).collect();
    mmio64(&wide, host.address_bits, firmware != Firmware::Bios)
}

/// The memory regions of devices that go above 4 GiB of a guest.
pub fn wide_bars(devices: &[Function]) -> impl Iterator<Item = &Bar> {
    /// The expansion ROM's number among a function's regions.
    const ROM: u8 = 6;
    devices.iter().flat_map(|function| &function.bars).filter(|bar| bar.memory && bar.wide && bar.index != ROM)
}

#[cfg(test)]
mod tests;
