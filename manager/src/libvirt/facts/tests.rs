use super::*;

#[test]
fn a_host_with_kvm_runs_kvm_domains() {
    let xml = "<capabilities><host><cpu><arch>x86_64</arch></cpu></host>
        <guest><os_type>hvm</os_type><arch name='aarch64'><domain type='qemu'/></arch></guest>
        <guest><os_type>hvm</os_type><arch name='x86_64'><domain type='qemu'/><domain type='kvm'/></arch></guest></capabilities>";
    assert_eq!(domain_type(xml), DomainType::Kvm);
}

#[test]
fn kvm_of_another_architecture_does_not_count() {
    let xml = "<capabilities><host><cpu><arch>x86_64</arch></cpu></host>
        <guest><arch name='i686'><domain type='kvm'/></arch></guest>
        <guest><arch name='x86_64'><domain type='qemu'/></arch></guest></capabilities>";
    assert_eq!(domain_type(xml), DomainType::Qemu);
}

#[test]
fn hostdevs_of_both_spellings_are_found() {
    let xml = "<domain><devices>
        <hostdev mode='subsystem' type='pci' managed='yes'>
          <source><address domain='0x0000' bus='0x41' slot='0x00' function='0x1'/></source>
          <address type='pci' domain='0x0000' bus='0x07' slot='0x00' function='0x0'/>
        </hostdev>
        <hostdev mode='subsystem' type='usb'><source><address bus='1' device='2'/></source></hostdev>
        <interface type='hostdev'><source><address type='pci' bus='66' slot='0'/></source></interface>
        </devices></domain>";
    let found: Vec<String> = hostdevs(xml).unwrap().iter().map(ToString::to_string).collect();
    assert_eq!(found, ["0000:41:00.1", "0000:42:00.0"]);
}

#[test]
fn xml_that_is_none_is_an_error() {
    assert!(hostdevs("<domain>").is_err());
}

#[test]
fn devices_of_ours_are_found_by_their_alias_with_where_the_guest_has_them() {
    let hostdev = |alias: &str| {
        format!(
            "<hostdev mode='subsystem' type='pci'><source><address domain='0x0000' bus='0x41' slot='0x00' function='0x1'/></source>
             <alias name='{alias}'/><address type='pci' domain='0x0000' bus='0x02' slot='0x00' function='0x0'/></hostdev>"
        )
    };
    let xml = format!("<domain><devices>{}{}</devices></domain>", hostdev("ua-gw-pci_0000_41_00_1"), hostdev("hostdev0"));
    let found = given(&xml);
    assert_eq!(found, [Given { host: "0000:41:00.1".parse().unwrap(), guest: "0000:02:00.0".parse().unwrap() }]);
    assert!(given("<domain>").is_empty());
}

#[test]
fn an_agent_listens_where_libvirt_says_so_of_its_own_channel() {
    let channel =
        |name: &str, state: &str| format!("<domain><channel><target type='virtio' name='{name}' state='{state}'/></channel></domain>");
    assert!(agent_is_connected(&channel("org.qemu.guest_agent.0", "connected")));
    assert!(!agent_is_connected(&channel("org.qemu.guest_agent.0", "disconnected")));
    assert!(!agent_is_connected(&channel("com.redhat.spice.0", "connected")));
}
