use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::*;

const XML: &str = "<domain type='test'><name>gpuward-00000001</name><uuid>00000001-0000-4000-8000-000000000001</uuid>
    <memory unit='MiB'>64</memory><os><type>hvm</type></os></domain>";

fn uuid() -> Uuid {
    "00000001-0000-4000-8000-000000000001".parse().unwrap()
}

// The state of `test:///default` is shared within the process: each test has a file, thus a host, of its own.
fn host() -> (tempfile::NamedTempFile, Connect) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, "<node><cpu><nodes>1</nodes></cpu><memory>8388608</memory></node>").unwrap();
    start_event_loop();
    let connect = Connect::open(Some(&format!("test://{}", file.path().display()))).unwrap();
    (file, connect)
}

fn started(source: Source) -> (Libvirt, mpsc::Receiver<Notice>) {
    let (sender, notices) = mpsc::channel();
    (Libvirt::start(source, Arc::new(move |notice| sender.send(notice).unwrap_or(()))), notices)
}

fn next(notices: &mpsc::Receiver<Notice>) -> Notice {
    notices.recv_timeout(Duration::from_secs(10)).unwrap()
}

#[test]
fn a_domain_comes_is_seen_and_goes() {
    let (_file, connect) = host();
    let (libvirt, notices) = started(Source::Open(connect, std::env::temp_dir()));
    let Notice::Connected(facts) = next(&notices) else { panic!("not connected") };
    assert_eq!((facts.domain_type, facts.memory), (DomainType::Test, 8 << 30));

    assert_eq!(libvirt.presence(uuid()).unwrap(), Presence::Absent);
    libvirt.create(XML.into(), Duration::from_secs(5)).unwrap();
    assert_eq!(next(&notices), Notice::Changed(uuid()));
    let Presence::Active(domain) = libvirt.presence(uuid()).unwrap() else { panic!("not active") };
    assert_eq!((domain.name.as_str(), domain.paused), ("gpuward-00000001", false));
    assert_eq!(libvirt.active().unwrap(), [Listed { uuid: domain.uuid, name: domain.name, xml: domain.xml }]);

    libvirt.destroy(uuid()).unwrap();
    assert_eq!(next(&notices), Notice::Changed(uuid()));
    assert_eq!(libvirt.presence(uuid()).unwrap(), Presence::Absent);
    libvirt.destroy(uuid()).expect("ended already is ended");
}

#[test]
fn libvirt_that_is_absent_is_said_once_and_named_in_the_failure() {
    let (libvirt, notices) = started(Source::Uri("test:///nowhere/at/all".into()));
    assert!(matches!(next(&notices), Notice::Lost { .. }));
    let failure = crate::failure::Failure::from(libvirt.presence(uuid()).unwrap_err());
    assert_eq!(failure.kind, crate::failure::ErrorKind::HypervisorFailed);
    assert_eq!(failure.message, "libvirt at test:///nowhere/at/all cannot be reached");
    assert!(failure.remedy.contains("libvirtd.socket"));
    assert!(notices.recv_timeout(Duration::from_millis(600)).is_err(), "told again");
}

#[test]
fn a_connection_that_answers_nothing_is_made_anew() {
    let (_file, connect) = host();
    let (libvirt, notices) = started(Source::Open(connect, std::env::temp_dir()));
    assert!(matches!(next(&notices), Notice::Connected(_)));
    let hang = |_: &Connect| {
        std::thread::sleep(Duration::from_secs(2));
        Ok(())
    };
    for _ in 0..8 {
        let error = libvirt.call("look up", Duration::from_millis(1), hang).unwrap_err();
        assert!(matches!(error, LibvirtError::NoAnswer { .. }), "{error}");
    }
    assert_eq!(next(&notices), Notice::Lost { reason: "libvirt has not answered 8 calls".into() });
    assert!(matches!(next(&notices), Notice::Connected(_)));
    libvirt.create(XML.into(), Duration::from_secs(5)).unwrap();
    assert_eq!(next(&notices), Notice::Changed(uuid()));
}

#[test]
fn a_call_that_does_not_return_is_named_at_its_deadline() {
    let asked = Instant::now();
    let hang = || {
        std::thread::sleep(Duration::from_secs(2));
        Ok(())
    };
    let error = call::within("create", Duration::from_millis(50), hang).unwrap_err();
    assert!(asked.elapsed() < Duration::from_secs(1));
    assert!(!error.is_answer());
    assert!(error.to_string().starts_with("libvirt has not answered create"));
}
