//! What libvirt says that it can run: asked of libvirt itself, as it asked QEMU and the firmware's descriptors.

use std::time::Duration;

use roxmltree::{Document, Node};
use virt::error::ErrorNumber;

use super::facts::child;
use super::{DomainType, Libvirt, LibvirtError};

/// The first time libvirt runs QEMU to ask it; then it remembers the answer.
const ASK: Duration = Duration::from_secs(30);

/// What domains of one kind, of machine type q35, can have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Path of the program that runs them.
    pub emulator: String,
    /// Its version: 1,000,000 × major + 1,000 × minor + release.
    pub version: Option<u32>,
    /// The most virtual CPUs; `None` where libvirt does not say.
    pub most_vcpus: Option<u32>,
    /// Kinds of firmware that it chooses by itself: `efi`, `bios`.
    pub firmware: Vec<String>,
    /// Whether one of them has secure boot.
    pub secure_boot: bool,
    /// CPU modes: `host-passthrough`, `host-model`, `maximum`, …
    pub cpu_modes: Vec<String>,
    /// Kinds of host devices: `pci`, `usb`, …
    pub host_devices: Vec<String>,
}

/// What came of asking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// An answer.
    Can(Capabilities),
    /// It can run no such domain: its word.
    Cannot(String),
    /// Nothing is known: why.
    Unknown(String),
}

impl Libvirt {
    /// What domains of a kind can have (`virConnectGetDomainCapabilities`).
    pub fn capabilities(&self, kind: DomainType) -> Told {
        let kind = match kind {
            DomainType::Kvm => "kvm",
            DomainType::Qemu => "qemu",
            DomainType::Test => return Told::Unknown("libvirt's test driver runs no guests".into()),
        };
        let asked = self.call("ask what it can run", ASK, move |connect| {
            let xml = connect.domain_capabilities(None, Some("x86_64"), Some("q35"), Some(kind), 0)?;
            Ok((xml, connect.hyp_version().ok()))
        });
        match asked {
            Ok((xml, version)) => read(&xml, version).map_or_else(|error| Told::Unknown(error.to_string()), Told::Can),
            Err(LibvirtError::Refused { source, .. }) if source.code() != ErrorNumber::NoSupport.into() => {
                Told::Cannot(source.message().to_owned())
            }
            Err(error) => Told::Unknown(error.to_string()),
        }
    }
}

// https://libvirt.org/formatdomaincaps.html
fn read(xml: &str, version: Option<u32>) -> Result<Capabilities, roxmltree::Error> {
    let document = Document::parse(xml)?;
    let root = document.root_element();
    let os = child(root, "os");
    let loader = os.and_then(|os| child(os, "loader"));
    let hostdev = child(root, "devices").and_then(|devices| child(devices, "hostdev")).filter(is_supported);
    let modes = child(root, "cpu").into_iter().flat_map(|cpu| cpu.children()).filter(|node| node.has_tag_name("mode"));
    Ok(Capabilities {
        emulator: child(root, "path").and_then(|path| path.text()).unwrap_or_default().to_owned(),
        version,
        most_vcpus: child(root, "vcpu").and_then(|vcpu| vcpu.attribute("max")?.parse().ok()),
        firmware: values(os, "firmware"),
        secure_boot: values(loader, "secure").iter().any(|value| value == "yes"),
        cpu_modes: modes.filter(is_supported).filter_map(|mode| mode.attribute("name")).map(str::to_owned).collect(),
        host_devices: values(hostdev, "subsysType"),
    })
}

fn is_supported(node: &Node<'_, '_>) -> bool {
    node.attribute("supported") == Some("yes")
}

fn values(of: Option<Node<'_, '_>>, name: &str) -> Vec<String> {
    let list = of.into_iter().flat_map(|node| node.children()).filter(|node| node.has_tag_name("enum"));
    let values = list.filter(|node| node.attribute("name") == Some(name)).flat_map(|list| list.children());
    values.filter(|node| node.has_tag_name("value")).filter_map(|value| value.text()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF_QEMU: &str = "<domainCapabilities>
  <path>/usr/bin/qemu-system-x86_64</path><domain>kvm</domain><machine>pc-q35-10.0</machine><arch>x86_64</arch>
  <vcpu max='288'/>
  <os supported='yes'>
    <enum name='firmware'><value>bios</value><value>efi</value></enum>
    <loader supported='yes'>
      <value>/usr/share/OVMF/OVMF_CODE_4M.fd</value>
      <enum name='type'><value>rom</value><value>pflash</value></enum>
      <enum name='secure'><value>yes</value><value>no</value></enum>
    </loader>
  </os>
  <cpu>
    <mode name='host-passthrough' supported='yes'><enum name='hostPassthroughMigratable'><value>on</value></enum></mode>
    <mode name='maximum' supported='yes'/>
    <mode name='host-model' supported='no'/>
  </cpu>
  <devices>
    <disk supported='yes'><enum name='bus'><value>virtio</value></enum></disk>
    <hostdev supported='yes'>
      <enum name='mode'><value>subsystem</value></enum>
      <enum name='subsysType'><value>usb</value><value>pci</value><value>scsi</value></enum>
      <enum name='pciBackend'><value>default</value><value>vfio</value></enum>
    </hostdev>
  </devices>
</domainCapabilities>";

    #[test]
    fn what_matters_to_a_machine_is_read_out_of_its_own_place() {
        let read = read(OF_QEMU, Some(10_000_007)).unwrap();
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let expected = Capabilities {
            emulator: "/usr/bin/qemu-system-x86_64".into(),
            version: Some(10_000_007),
            most_vcpus: Some(288),
            firmware: words(&["bios", "efi"]),
            secure_boot: true,
            cpu_modes: words(&["host-passthrough", "maximum"]),
            host_devices: words(&["usb", "pci", "scsi"]),
        };
        assert_eq!(read, expected);
    }

    #[test]
    fn what_is_not_supported_is_not_there() {
        let none = read(&OF_QEMU.replace("<hostdev supported='yes'", "<hostdev supported='no'"), None).unwrap();
        assert_eq!(none.host_devices, [] as [String; 0]);
        let bare = read("<domainCapabilities/>", None).unwrap();
        assert_eq!(bare, Capabilities::default());
        assert!(read("<domainCapabilities>", None).is_err());
    }
}
