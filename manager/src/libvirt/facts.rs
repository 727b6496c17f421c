//! What libvirt says of the host and of domains, read out of its XML.

use roxmltree::{Document, Node};
use vfio::PciAddress;
use virt::connect::Connect;
use virt::error::Error;

/// What a new machine must know of the host. Read at each connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostFacts {
    /// The best kind of domain it can run.
    pub domain_type: DomainType,
    /// Processors that are online.
    pub cpus: u32,
    /// Bytes of RAM.
    pub memory: u64,
    /// libvirt's version: 1,000,000 × major + 1,000 × minor + release.
    pub libvirt: u32,
    /// Physical address width that a guest of the best kind can have.
    pub address_bits: u32,
}

/// Kinds of domain: libvirt's `<domain type=…>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DomainType {
    /// Hardware virtualization.
    Kvm,
    /// Software emulation: no `/dev/kvm` here.
    Qemu,
    /// libvirt's test driver.
    Test,
}

impl HostFacts {
    pub(super) fn read(connect: &Connect) -> Result<Self, Error> {
        let (node, capabilities) = (connect.node_info()?, connect.capabilities()?);
        let domain_type = domain_type(&capabilities);
        Ok(Self {
            domain_type,
            cpus: node.cpus,
            memory: node.memory << 10,
            libvirt: connect.lib_version()?,
            address_bits: address_bits(&capabilities, domain_type),
        })
    }
}

/// The best domain type that `capabilities` (virConnectGetCapabilities) offers for this host's own architecture.
fn domain_type(capabilities: &str) -> DomainType {
    let Ok(document) = Document::parse(capabilities) else { return DomainType::Qemu };
    let architecture = document.descendants().find(|node| node.has_tag_name("host")).and_then(|host| {
        let of_cpu = host.descendants().find(|node| node.has_tag_name("arch"))?;
        of_cpu.text()
    });
    let offered: Vec<&str> = document
        .descendants()
        .filter(|node| node.has_tag_name("arch") && node.attribute("name").is_some())
        .filter(|arch| architecture.is_none() || arch.attribute("name") == architecture)
        .flat_map(|arch| arch.children().filter(|node| node.has_tag_name("domain")).filter_map(|node| node.attribute("type")))
        .collect();
    match (offered.contains(&"kvm"), offered.contains(&"qemu"), is_test(&document)) {
        (true, _, _) => DomainType::Kvm,
        (false, false, true) => DomainType::Test,
        (false, _, _) => DomainType::Qemu,
    }
}

/// The host's own width (`<maxphysaddr bits=…/>`, since 8.7); emulated, and where libvirt does not say, QEMU's default.
fn address_bits(capabilities: &str, domain_type: DomainType) -> u32 {
    const OF_QEMU: u32 = 40;
    let of_host = || {
        let document = Document::parse(capabilities).ok()?;
        let width = document.descendants().find(|node| node.has_tag_name("maxphysaddr"))?;
        width.attribute("bits")?.parse().ok()
    };
    match domain_type {
        DomainType::Kvm => of_host().unwrap_or(OF_QEMU),
        DomainType::Qemu | DomainType::Test => OF_QEMU,
    }
}

fn is_test(document: &Document<'_>) -> bool {
    document.descendants().any(|node| node.has_tag_name("domain") && node.attribute("type") == Some("test"))
}

/// The host's PCI functions that a domain's XML gives to it, in its order.
///
/// # Errors
/// `xml` is not well-formed.
pub fn hostdevs(xml: &str) -> Result<Vec<PciAddress>, roxmltree::Error> {
    let document = Document::parse(xml)?;
    let hostdevs = document.descendants().filter(|node| node.has_tag_name("hostdev") && node.attribute("type") == Some("pci"));
    let sources = hostdevs.filter_map(|hostdev| child(hostdev, "source"));
    // An interface of type hostdev and a `<interface><driver name='vfio'/>` pool device carry the same source element.
    let interfaces = document.descendants().filter(|node| node.has_tag_name("interface") && node.attribute("type") == Some("hostdev"));
    let sources = sources.chain(interfaces.filter_map(|interface| child(interface, "source")));
    Ok(sources.filter_map(|source| child(source, "address")).filter_map(address).collect())
}

/// A device that a domain has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    /// Where it sits on the host.
    pub host: PciAddress,
    /// Where the guest finds it: buses as libvirt numbers them, which is how firmware finds the root ports of our domains.
    pub guest: PciAddress,
}

/// The devices that a live domain has by our aliases (`ua-gw-…`), in its order. What cannot be read has none.
pub fn given(xml: &str) -> Vec<Given> {
    let Ok(document) = Document::parse(xml) else { return Vec::new() };
    let hostdevs = document.descendants().filter(|node| node.has_tag_name("hostdev") && node.attribute("type") == Some("pci"));
    let read = |hostdev: Node<'_, '_>| {
        let host = address(child(child(hostdev, "source")?, "address")?)?;
        let guest = address(child(hostdev, "address")?)?;
        let alias = child(hostdev, "alias")?.attribute("name")?;
        (alias == xml_templates::Hostdev { address: host }.alias()).then_some(Given { host, guest })
    };
    hostdevs.filter_map(read).collect()
}

/// Whether the guest's agent has its end of the channel open, as libvirt says in a live domain's XML.
pub fn agent_is_connected(xml: &str) -> bool {
    let Ok(document) = Document::parse(xml) else { return false };
    let agent = |node: &Node<'_, '_>| node.has_tag_name("target") && node.attribute("name") == Some(xml_templates::AGENT_CHANNEL);
    document.descendants().filter(agent).any(|node| node.attribute("state") == Some("connected"))
}

pub(super) fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| child.has_tag_name(name))
}

// `<address domain='0x0000' bus='0x41' slot='0x00' function='0x0'/>`; libvirt takes decimal too, a missing one is 0.
fn address(node: Node<'_, '_>) -> Option<PciAddress> {
    let part = |name| match node.attribute(name) {
        None => Some(0),
        Some(text) => match text.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        },
    };
    let byte = |name| part(name).and_then(|value| u8::try_from(value).ok());
    PciAddress::new(part("domain")?, byte("bus")?, byte("slot")?, byte("function")?)
}

#[cfg(test)]
mod tests;
