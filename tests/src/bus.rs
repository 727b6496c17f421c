//! A message bus of one's own: Debian's `dbus-daemon` with a configuration that lets everybody own and call everything.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// What everybody may do on a private bus, unless a test brings the shipped policy.
pub const OPEN_POLICY: &str = r#"
  <policy context="default">
    <allow user="*"/>
    <allow own="*"/>
    <allow send_type="method_call"/>
    <allow send_destination="*" eavesdrop="true"/>
    <allow eavesdrop="true"/>
  </policy>"#;

/// A running bus, ended when dropped.
#[derive(Debug)]
pub struct PrivateBus {
    address: String,
    daemon: Child,
}

impl PrivateBus {
    /// Starts a bus with its socket and configuration in `dir`, which exists.
    ///
    /// # Errors
    /// No `dbus-daemon`, or it does not start.
    pub fn start(dir: &Path) -> io::Result<Self> {
        Self::with_policy(dir, OPEN_POLICY)
    }

    /// Starts a bus with these `<policy>` elements.
    ///
    /// # Errors
    /// As [`PrivateBus::start`].
    pub fn with_policy(dir: &Path, policy: &str) -> io::Result<Self> {
        let file = dir.join("bus.conf");
        fs::write(&file, configuration(dir, policy))?;
        // It complains there about limits that only root may raise.
        let log = fs::File::create(dir.join("bus.log"))?;
        let mut daemon = Command::new("dbus-daemon")
            .arg(format!("--config-file={}", file.display()))
            .args(["--nofork", "--print-address"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            // Ctrl-C is meant for whoever uses the bus.
            .process_group(0)
            .spawn()
            .map_err(|error| io::Error::new(error.kind(), format!("dbus-daemon (package dbus) does not start: {error}")))?;
        let mut address = String::new();
        if let Some(output) = daemon.stdout.take() {
            BufReader::new(output).read_line(&mut address)?;
        }
        let bus = Self { address: address.trim_end().to_owned(), daemon };
        if bus.address.is_empty() {
            return Err(io::Error::other(format!("dbus-daemon ended before it had an address; see {}", dir.join("bus.log").display())));
        }
        Ok(bus)
    }

    /// Its address, as in `DBUS_SYSTEM_BUS_ADDRESS`.
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for PrivateBus {
    fn drop(&mut self) {
        // It may have ended already; then there is nothing to end.
        if self.daemon.kill().is_ok() {
            self.daemon.wait().map(drop).unwrap_or_default();
        }
    }
}

fn configuration(dir: &Path, policy: &str) -> String {
    format!(
        r#"<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>custom</type>
  <listen>unix:dir={}</listen>
  <auth>EXTERNAL</auth>{policy}
</busconfig>
"#,
        dir.display()
    )
}
