//! A simulated host that is operated over its bus: a session with a client that may do everything.

use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use manager::client::{CallError, Client, Dict, Objects, Options, Record};
use manager::failure::Failure;
use rustix::process::getuid;
use serde::Serialize;
use zbus::wire::DynamicType;
use zbus::{Message, OwnedObjectPath, Variant};

use crate::bus::OPEN_POLICY;
use crate::polkit::Who;
use crate::session::{Session, SessionError};
use crate::simhost::SimRoot;

/// Somebody who is nobody to the daemon.
const STRANGER: &str = "65534";

/// A session and a client that polkit allows everything.
pub struct Operated {
    /// The daemon and what it needs.
    pub session: Session,
    /// The client.
    pub client: Client,
}

/// An interface of the service by its last word, at a path.
pub type At<'a> = (&'a str, &'a str);

/// The entry object.
pub const MANAGER: At<'static> = ("/org/gpuward1", "Manager");

impl Operated {
    /// The described host `name`, with the daemon `program` on it.
    ///
    /// # Errors
    /// As [`Session::start`], and where the bus cannot be reached.
    pub fn start(name: &str, program: &Path) -> Result<Self, Box<dyn std::error::Error>> {
        Self::with_policy(name, program, OPEN_POLICY)
    }

    /// As [`Self::start`], on a bus with these `<policy>` elements.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn with_policy(name: &str, program: &Path, policy: &str) -> Result<Self, Box<dyn std::error::Error>> {
        let root = SimRoot::temporary(name).map_err(SessionError::from)?;
        // The bus has to be in reach of strangers, as the system's is.
        std::fs::set_permissions(root.path(), PermissionsExt::from_mode(0o755))?;
        let session = Session::with_policy(root, program, policy)?;
        session.polkit.allow("*", Who::Uid(getuid().as_raw()));
        let client = Client::connect(Some(session.address()))?;
        Ok(Self { session, client })
    }

    /// Calls a method of the service.
    ///
    /// # Errors
    /// As the service answers.
    pub fn call<B: Serialize + DynamicType>(&self, (path, interface): At<'_>, member: &str, body: &B) -> Result<Message, CallError> {
        let interface = format!("org.gpuward1.{interface}");
        let bus = self.client.bus();
        self.client.wait(bus.call_method(Some("org.gpuward1"), path, Some(interface.as_str()), member, body))
    }

    /// The failure that a call ends with.
    ///
    /// # Panics
    /// It does not end with one of the service's.
    pub fn refused<B: Serialize + DynamicType>(&self, at: At<'_>, member: &str, body: &B) -> Failure {
        match self.call(at, member, body) {
            Err(CallError::Answered(failure)) => *failure,
            Err(error) => panic!("{member} ends with {error:?}"),
            Ok(answer) => panic!("{member} answers {:?}", answer.body()),
        }
    }

    /// Calls a method that makes a job, and gives the job's path.
    ///
    /// # Errors
    /// As the service answers.
    pub fn submit<B: Serialize + DynamicType>(&self, at: At<'_>, member: &str, body: &B) -> Result<OwnedObjectPath, CallError> {
        Ok(self.call(at, member, body)?.body().deserialize()?)
    }

    /// Calls a method that makes a job, and gives what the job came to.
    ///
    /// # Errors
    /// As the service answers.
    pub fn finish<B: Serialize + DynamicType>(&self, at: At<'_>, member: &str, body: &B) -> Result<Record, CallError> {
        let job = self.submit(at, member, body)?;
        let ended: Dict = self.call((&job, "Job"), "Wait", &(Options::new(),))?.body().deserialize()?;
        Ok(Record(ended))
    }

    /// Every object there is.
    ///
    /// # Errors
    /// As the service answers.
    pub fn objects(&self) -> Result<Objects, CallError> {
        self.client.objects()
    }

    /// Takes a GPU into the pool and starts a machine with it; gives the machine's path.
    ///
    /// # Errors
    /// As the service answers.
    ///
    /// # Panics
    /// A job fails.
    pub fn start_machine(&self, device: &str) -> Result<String, CallError> {
        let done = |ended: Record| assert_eq!(ended.text("state"), "done", "{ended:?}");
        done(self.finish((&path_of(device), "Device"), "Assign", &(Options::new(),))?);
        let disk = Options::from([("volume", Variant::from("tank/train-1"))]);
        let wish = Options::from([("kind", Variant::from("gpu"))]);
        let spec = Options::from([
            ("format", Variant::from(1_u32)),
            ("name", Variant::from("train-1")),
            ("vcpus", Variant::from(2_u32)),
            ("memory", Variant::from(1_u64 << 30)),
            ("disk", Variant::from(vec![disk])),
            ("device", Variant::from(vec![wish])),
        ]);
        let made = self.finish(MANAGER, "CreateMachine", &(spec, Options::new()))?;
        let machine = made.record("result").text("machine").to_owned();
        done(made);
        done(self.finish((&machine, "Machine"), "Start", &(Options::new(),))?);
        Ok(machine)
    }

    /// Runs a client program as somebody who is nobody to the daemon: another user where we may be that, else ourselves.
    pub fn as_stranger(&self, program: &str) -> Command {
        if !getuid().is_root() {
            return self.session.command(program);
        }
        let mut command = self.session.command("setpriv");
        command.args(["--reuid", STRANGER, "--regid", STRANGER, "--clear-groups", program]);
        command
    }

    /// Makes calls as [`Self::as_stranger`], each a line `PATH INTERFACE MEMBER SIGNATURE`, and gives a line for how each ended:
    /// `MEMBER ERROR-NAME`, or `MEMBER answered`.
    ///
    /// # Errors
    /// The client does not start, or does not end well.
    pub fn asked_by_stranger(&self, calls: &str) -> io::Result<String> {
        let mut command = self.as_stranger("/usr/bin/python3");
        // As text: a stranger need not be able to read this checkout.
        command.args(["-c", include_str!("../clients/stranger.py"), self.session.address()]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        child.stdin.take().map_or(Ok(()), |mut pipe| pipe.write_all(calls.as_bytes()))?;
        let output = child.wait_with_output()?;
        if !output.status.success() {
            return Err(io::Error::other(format!("the stranger's client ended with {}", output.status)));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Whether [`Self::as_stranger`] runs as another user than the daemon.
    pub fn has_strangers(&self) -> bool {
        getuid().is_root()
    }

    /// Runs a command and gives what it printed.
    ///
    /// # Errors
    /// It does not start, or does not end well.
    pub fn output(command: &mut Command) -> io::Result<String> {
        let output = command.output()?;
        if !output.status.success() {
            return Err(io::Error::other(format!("{command:?} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr))));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// The path of a device's object.
pub fn path_of(device: &str) -> String {
    format!("/org/gpuward1/device/pci_{}", device.replace([':', '.'], "_"))
}
