//! The polkit stand-in answers the client library that the daemon uses.
#![allow(clippy::expect_used)]

use std::collections::HashMap;

use tests::bus::PrivateBus;
use tests::polkit::{Polkit, Who};
use zbus::wire::Variant;

const ACTION: &str = "org.gpuward.assign";

async fn check(connection: &zbus::Connection, action: &str) -> bool {
    let name = connection.unique_name().expect("on a bus").to_string();
    let subject = ("system-bus-name", HashMap::from([("name", Variant::from(name))]));
    let details: HashMap<&str, &str> = HashMap::from([("device", "0000:1b:00.0")]);
    let reply = connection
        .call_method(
            Some("org.freedesktop.PolicyKit1"),
            "/org/freedesktop/PolicyKit1/Authority",
            Some("org.freedesktop.PolicyKit1.Authority"),
            "CheckAuthorization",
            &(subject, action, details, 1_u32, ""),
        )
        .await
        .expect("answered");
    let ((allowed, _, _),): ((bool, bool, HashMap<String, String>),) = reply.body().deserialize().expect("decoded");
    allowed
}

#[tokio::test]
async fn polkit_allows_what_it_was_told_and_keeps_what_it_was_asked() {
    let dir = tempfile::tempdir().expect("a directory");
    let bus = PrivateBus::start(dir.path()).expect("a bus");
    let polkit = Polkit::start(bus.address()).expect("on the bus");
    let client = zbus::connection::Builder::address(bus.address()).build().await.expect("connected");
    let authority = "/org/freedesktop/PolicyKit1/Authority";
    let introspect = Some("org.freedesktop.DBus.Introspectable");
    let xml = client.call_method(Some("org.freedesktop.PolicyKit1"), authority, introspect, "Introspect", &()).await.expect("answered");
    let xml: String = xml.body().deserialize().expect("text");
    for argument in [r#"type="(sa{sv})" direction="in""#, r#"type="(bba{ss})" direction="out""#] {
        assert!(xml.contains(argument), "as polkit's own: {xml}");
    }
    assert!(!check(&client, ACTION).await);
    polkit.allow(ACTION, Who::Uid(rustix::process::getuid().as_raw()));
    assert!(check(&client, ACTION).await);
    assert!(!check(&client, "org.gpuward.force").await);
    polkit.allow("*", Who::Name(client.unique_name().expect("on a bus").to_string()));
    assert!(check(&client, "org.gpuward.force").await);
    let asked = polkit.asked();
    assert_eq!(asked.iter().map(|asked| asked.allowed).collect::<Vec<_>>(), [false, true, false, true]);
    assert!(asked.iter().all(|asked| asked.interactive && asked.details["device"] == "0000:1b:00.0"));
}
