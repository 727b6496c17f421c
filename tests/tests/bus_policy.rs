//! The bus policy that is shipped, on a bus with the rules of a system bus.
#![allow(clippy::expect_used)]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use manager::client::Options;
use tests::operated::{Operated, path_of};

const GPU: &str = "0000:1b:00.0";

/// What D-Bus itself ships for a system bus (`bus/system.conf.in`), and leave for polkit's stand-in.
const SYSTEM: &str = r#"
  <policy context="default">
    <allow user="*"/>
    <deny own="*"/>
    <deny send_type="method_call"/>
    <allow send_type="signal"/>
    <allow send_requested_reply="true" send_type="method_return"/>
    <allow send_requested_reply="true" send_type="error"/>
    <allow receive_type="method_call"/>
    <allow receive_type="method_return"/>
    <allow receive_type="error"/>
    <allow receive_type="signal"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus.Introspectable"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus.Properties"/>
    <allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus.Peer"/>
  </policy>
  <policy user="root">
    <allow own="org.freedesktop.PolicyKit1"/>
    <allow send_destination="org.freedesktop.PolicyKit1"/>
  </policy>"#;

/// The `<policy>` elements of the file that is shipped.
fn shipped() -> &'static str {
    let file = include_str!("../../manager/data/org.gpuward1.conf");
    let inside = file.split_once("<busconfig>").and_then(|(_, rest)| rest.split_once("</busconfig>"));
    inside.expect("a bus configuration").0
}

/// Listens to everything the service sends; gives what was heard when it is ended.
struct Listener(Child, BufReader<std::process::ChildStdout>);

impl Listener {
    fn start(mut command: Command, address: &str) -> Self {
        command.args(["--address", address, "type='signal',sender='org.gpuward1'"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("dbus-monitor runs");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        // Its own connection is the first that it hears of: it listens from then on.
        output.read_line(&mut String::new()).expect("it says something");
        Self(child, output)
    }

    fn end(mut self) -> String {
        self.0.kill().expect("it runs");
        self.0.wait().expect("it ends");
        std::io::read_to_string(self.1).expect("text")
    }
}

#[test]
#[cfg_attr(unprivileged, ignore = "only root can be somebody else")]
fn a_stranger_may_call_methods_and_neither_sees_nor_hears_anything() {
    let policy = format!("{SYSTEM}{}", shipped());
    let program = Path::new(env!("CARGO_BIN_EXE_gpuward-sim"));
    let host = Operated::with_policy("dgx-h100", program, &policy).expect("the daemon comes up");
    let ours = Listener::start(Command::new("dbus-monitor"), host.session.address());
    let theirs = Listener::start(host.as_stranger("dbus-monitor"), host.session.address());
    let device = path_of(GPU);
    let ended = host.finish((&device, "Device"), "Assign", &(Options::new(),)).expect("root may");
    assert_eq!(ended.text("state"), "done");
    // By now everything is sent: the answers below come after it.
    let calls = format!(
        "{device} org.gpuward1.Device Assign a{{sv}}\n\
         {device} org.freedesktop.DBus.Properties Get org.gpuward1.Device\n\
         {device} org.freedesktop.DBus.Introspectable Introspect -\n\
         /org/gpuward1 org.freedesktop.DBus.ObjectManager GetManagedObjects -\n"
    );
    let answers = host.asked_by_stranger(&calls).expect("asked");
    let denied = "org.freedesktop.DBus.Error.AccessDenied";
    assert_eq!(
        answers,
        format!(
            "Assign org.gpuward1.Error.NotAuthorized\nGet org.gpuward1.Error.NotAuthorized\nIntrospect {denied}\nGetManagedObjects {denied}\n"
        )
    );
    let (ours, theirs) = (ours.end(), theirs.end());
    assert!(ours.contains("JobRemoved"), "{ours}");
    assert!(!theirs.contains("gpuward"), "{theirs}");
}
