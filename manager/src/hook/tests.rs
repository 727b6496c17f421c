use super::*;

const OURS: &str = "11111111-1111-4111-8111-111111111111";
const FOREIGN: &str = "22222222-2222-4222-8222-222222222222";
const PREPARE: Call<'_> = Call { domain: "guest", operation: "prepare", suboperation: "begin" };

fn domain(uuid: &str, slot: u8) -> String {
    format!(
        "<domain type='kvm'><name>guest</name><uuid>{uuid}</uuid><devices><hostdev mode='subsystem' type='pci' managed='no'>
        <source><address domain='0x0000' bus='0x41' slot='0x{slot:02x}' function='0x0'/></source></hostdev></devices></domain>"
    )
}

// 41:00.0 belongs to OURS, 41:01.0 is in the pool, 41:02.0 is nobody's.
fn ask(call: Call<'_>, xml: &str) -> Result<(), Refused> {
    let folder = tempfile::tempdir().unwrap();
    let owned = folder.path().join("owned.json");
    let nobody = Uuid::nil();
    fs::write(&owned, format!("{{\"0000:41:00.0\": \"{OURS}\", \"0000:41:01.0\": \"{nobody}\"}}")).unwrap();
    check(call, &mut xml.as_bytes(), &owned)
}

#[test]
fn our_machine_gets_its_device() {
    ask(PREPARE, &domain(OURS, 0)).unwrap();
}

#[test]
fn a_foreign_domain_is_refused_our_device_by_name() {
    for operation in ["prepare", "migrate", "restore"] {
        let refused = ask(Call { operation, ..PREPARE }, &domain(FOREIGN, 0)).unwrap_err().to_string();
        assert!(refused.starts_with(&format!("0000:41:00.0 is held through gpuward by domain {OURS}")), "{refused}");
    }
}

#[test]
fn nobody_gets_a_device_of_the_pool() {
    for uuid in [OURS, FOREIGN] {
        let refused = ask(PREPARE, &domain(uuid, 1)).unwrap_err().to_string();
        assert!(refused.starts_with("0000:41:01.0 is in gpuward's pool"), "{refused}");
    }
}

#[test]
fn a_device_that_is_not_ours_is_not_our_business() {
    ask(PREPARE, &domain(FOREIGN, 2)).unwrap();
}

#[test]
fn a_guest_that_runs_already_is_never_refused() {
    for (operation, suboperation) in [("reconnect", "begin"), ("started", "begin"), ("stopped", "end"), ("release", "end")] {
        ask(Call { operation, suboperation, ..PREPARE }, &domain(FOREIGN, 0)).unwrap();
    }
}

#[test]
fn without_the_owners_file_everything_is_allowed() {
    let nowhere = tempfile::tempdir().unwrap().path().join("owned.json");
    check(PREPARE, &mut domain(FOREIGN, 0).as_bytes(), &nowhere).unwrap();
}

#[test]
fn with_a_damaged_owners_file_only_domains_without_devices_start() {
    let owned = tempfile::NamedTempFile::new().unwrap();
    fs::write(&owned, "{").unwrap();
    let refused = check(PREPARE, &mut domain(FOREIGN, 0).as_bytes(), owned.path()).unwrap_err();
    assert!(matches!(refused, Refused::OwnersUnreadable { .. }), "{refused}");
    let plain = format!("<domain><uuid>{FOREIGN}</uuid></domain>");
    check(PREPARE, &mut plain.as_bytes(), owned.path()).unwrap();
}

#[test]
fn xml_that_is_none_is_refused() {
    for xml in ["", "<domain>", "<domain><devices/></domain><domain/>"] {
        assert!(matches!(ask(PREPARE, xml), Err(Refused::Unreadable { .. })), "{xml}");
    }
}
