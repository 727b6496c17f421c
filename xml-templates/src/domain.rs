//! What a domain is made of.

use vfio::PciAddress;

use crate::{Mmio64, Text};

/// A transient domain of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// libvirt's `type`.
    pub domain_type: DomainType,
    /// `gpuward-<8 hex>`.
    pub name: Text,
    /// The machine's UUID, hyphenated.
    pub uuid: Text,
    /// Whose it is, for adoption.
    pub metadata: Metadata,
    /// Bytes of RAM, a multiple of 1 KiB.
    pub memory: u64,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// The guest's processor.
    pub cpu: Cpu,
    /// What boots it.
    pub firmware: Firmware,
    /// A kernel booted directly.
    pub direct_boot: Option<DirectBoot>,
    /// Disks; the first is the boot disk.
    pub disks: Vec<Disk>,
    /// Network interfaces.
    pub interfaces: Vec<Interface>,
    /// Where the serial console is logged, a path that libvirt opens.
    pub serial_log: Option<Text>,
    /// Whether the guest can be spoken to over vsock.
    pub vsock: bool,
    /// Devices given to it.
    pub hostdevs: Vec<Hostdev>,
    /// Room for their BARs above 4 GiB.
    pub mmio64: Mmio64,
}

/// libvirt's `<domain type=…>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DomainType {
    /// Hardware virtualization.
    Kvm,
    /// Software emulation.
    Qemu,
    /// libvirt's test driver.
    Test,
}

/// What gpuward finds its own domains by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    /// The tenant's id.
    pub tenant: Text,
    /// The caller's name for the request that started it; may be empty.
    pub request_id: Text,
    /// The claims it runs on.
    pub claims: Vec<Claim>,
}

/// A claim with its epoch: an older epoch is another owner's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The claim's id.
    pub id: Text,
    /// Its epoch.
    pub epoch: u64,
}

/// The guest's processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cpu {
    /// As the host's, with its physical address width.
    HostPassthrough,
    /// The nearest model that libvirt knows.
    HostModel,
    /// All that software emulation can do.
    Maximum,
}

/// What boots a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Firmware {
    /// SeaBIOS.
    Bios,
    /// OVMF as libvirt's firmware descriptors choose.
    Uefi,
    /// OVMF with secure boot and enrolled keys.
    UefiSecure,
}

/// A kernel booted directly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectBoot {
    /// Path of the kernel.
    pub kernel: Text,
    /// Path of the initial RAM disk.
    pub initrd: Option<Text>,
    /// Kernel command line.
    pub cmdline: Option<Text>,
}

/// A virtio disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Where its bytes are.
    pub source: DiskSource,
    /// How they are laid out.
    pub format: DiskFormat,
    /// What backs it, nearest first; empty: nothing. `None`: libvirt reads that out of the image's header.
    pub backing: Option<Vec<Backing>>,
    /// The guest may not write.
    pub readonly: bool,
}

/// An image that backs another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// Where its bytes are.
    pub path: Text,
    /// That is a block device, not a file.
    pub block: bool,
    /// How they are laid out.
    pub format: DiskFormat,
}

/// Where a disk's bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskSource {
    /// A file or block device.
    Path(Text),
    /// A volume of a storage pool.
    Volume {
        /// The pool.
        pool: Text,
        /// The volume.
        volume: Text,
    },
}

/// How a disk's bytes are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum DiskFormat {
    Raw,
    Qcow2,
}

/// A virtio network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// What it is plugged into.
    pub source: InterfaceSource,
    /// Its hardware address.
    pub mac: Text,
}

/// What an interface is plugged into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InterfaceSource {
    /// A libvirt network.
    Network(Text),
    /// A bridge of the host.
    Bridge(Text),
}

/// A PCI device given to a domain, in a root port of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hostdev {
    /// Where it sits on the host.
    pub address: PciAddress,
}

impl Hostdev {
    /// The alias it is found by in the running domain: `ua-gw-pci_0000_41_00_0`.
    pub fn alias(&self) -> String {
        format!("ua-gw-{}", self.address.node_device_name())
    }
}
