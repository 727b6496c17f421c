//! The client's side of `org.gpuward1`: proxies, and a connection whose calls look synchronous.
//!
//! Options and records are dictionaries (`a{sv}`); a reader takes the keys it knows and leaves the rest, so that a newer service
//! can say more. A failure is an error named `org.gpuward1.Error.<ErrorKind>` with the body `(s message, a{sv} {why as, remedy s})`;
//! inside a dictionary it is the keys `error` (the kind, without its prefix), `message`, `why` and `remedy`.

mod wire;

use std::collections::{BTreeMap, HashMap};
use std::future::Future;

use tokio::runtime::Runtime;
use zbus::fdo::ObjectManagerProxy;
use zbus::{Connection, MatchRule, MessageStream, ObjectPath, OwnedFd, OwnedObjectPath, OwnedVariant, Variant, connection, fdo};

use crate::failure::{ErrorKind, Failure};

pub use wire::{Record, failure_in, text_of, to_json};

/// The service's name on the bus.
pub const SERVICE: &str = "org.gpuward1";
/// The path of its entry object.
pub const ENTRY: &str = "/org/gpuward1";
/// What its error names begin with.
pub const ERROR_PREFIX: &str = "org.gpuward1.Error.";

/// Options of a call: `request-id s`, `if-generation t`, `force b`, … Unknown keys are refused.
pub type Options<'a> = HashMap<&'a str, Variant<'a>>;

/// A specification, with the keys of `docs/machine-spec.md`.
pub type Spec = HashMap<String, Variant<'static>>;

/// A dictionary that the service answered.
pub type Dict = HashMap<String, OwnedVariant>;

/// The entry object.
#[zbus::proxy(interface = "org.gpuward1.Manager", default_service = "org.gpuward1", default_path = "/org/gpuward1")]
pub trait Manager {
    /// What stands between this host and handing out its devices: `{check s, subject s, severity s, message s, evidence as, remedy s}`.
    fn doctor(&self, options: Options<'_>) -> zbus::Result<Vec<Dict>>;

    /// What speaks against starting `machine s`, or one of `spec a{sv}`, of `tenant s`: `{code s, severity s, subject s, message s, evidence as, remedy s}`.
    #[zbus(allow_interactive_auth)]
    fn preflight(&self, request: Spec) -> zbus::Result<Vec<Dict>>;

    /// What would be done for goals `{goal s: assign or release, device s: address, force b}`.
    ///
    /// Answers `steps` (`{stage u, device s, knob s, from s, to s}`), `refusals` (failures as dictionaries), and the plan's `digest`.
    fn plan(&self, goals: Vec<Options<'_>>, options: Options<'_>) -> zbus::Result<Dict>;

    /// Carries out goals together; with `plan-digest s` exactly the plan that was looked at.
    #[zbus(allow_interactive_auth)]
    fn apply(&self, goals: Vec<Options<'_>>, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;

    /// The device with this address.
    fn get_device(&self, address: &str) -> zbus::Result<OwnedObjectPath>;

    /// The tenant with this name.
    fn get_tenant(&self, name: &str) -> zbus::Result<OwnedObjectPath>;

    /// Records a tenant; its specification has the keys of `docs/tenants.md`.
    #[zbus(allow_interactive_auth)]
    fn create_tenant(&self, spec: Spec, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;

    /// The tenants that the caller may see: `{tenant o, name s}`.
    fn list_tenants(&self, options: Options<'_>) -> zbus::Result<Vec<Dict>>;

    /// The machines that the caller may see: `{machine o, name s, tenant s, state s}`.
    fn list_machines(&self, options: Options<'_>) -> zbus::Result<Vec<Dict>>;

    /// The machine of a tenant, both by name.
    fn get_machine(&self, tenant: &str, name: &str) -> zbus::Result<OwnedObjectPath>;

    /// Records a machine, off; its specification has the keys of `docs/machine-spec.md`.
    #[zbus(allow_interactive_auth)]
    fn create_machine(&self, spec: Spec, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;

    /// Claims devices for a domain that another manager runs.
    #[zbus(allow_interactive_auth)]
    fn claim(&self, request: Spec, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;
}

/// A claim.
#[zbus::proxy(interface = "org.gpuward1.Claim", default_service = "org.gpuward1", assume_defaults = false)]
pub trait Claim {
    /// Ends it; `epoch t` has to be its own.
    #[zbus(allow_interactive_auth)]
    fn release(&self, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;

    /// The `<hostdev>` elements of its devices.
    #[zbus(name = "GetHostdevXML")]
    fn get_hostdev_xml(&self, options: Options<'_>) -> zbus::Result<String>;

    /// Grows with each claim ever made.
    #[zbus(property(emits_changed_signal = "const"))]
    fn epoch(&self) -> zbus::Result<u64>;
}

/// A device.
#[zbus::proxy(interface = "org.gpuward1.Device", default_service = "org.gpuward1", assume_defaults = false)]
pub trait Device {
    /// What has no property: `power-state s`, `link-speed s`, `link-width u`, `boot-vga b`, `unreadable as`, …
    fn describe(&self, options: Options<'_>) -> zbus::Result<Dict>;

    /// Who has it open: `{pid u, command s, unit s}` each.
    fn list_holders(&self, options: Options<'_>) -> zbus::Result<Vec<Dict>>;

    /// `gpu`, `virtual-function`, …
    #[zbus(property)]
    fn class(&self) -> zbus::Result<String>;

    /// What befell it, newest first: `{time t, kind s, text s, details a{sv}}` each; `limit u`, `before t`.
    fn get_history(&self, options: Options<'_>) -> zbus::Result<Vec<Dict>>;

    /// Resets its bundle, which is in the pool and nobody's.
    #[zbus(allow_interactive_auth)]
    fn reset(&self, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;

    /// Lets its bundle out of quarantine where it is sound.
    #[zbus(allow_interactive_auth)]
    fn clear_quarantine(&self, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;

    /// Takes its bundle, which is in quarantine, off the bus and has it found again.
    #[zbus(allow_interactive_auth)]
    fn recover(&self, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;
}

/// A tenant.
#[zbus::proxy(interface = "org.gpuward1.Tenant", default_service = "org.gpuward1", assume_defaults = false)]
pub trait Tenant {
    /// Gives it another specification.
    #[zbus(allow_interactive_auth)]
    fn set_policy(&self, spec: Spec, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;

    /// Forgets it.
    #[zbus(allow_interactive_auth)]
    fn remove(&self, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;
}

/// A machine.
#[zbus::proxy(interface = "org.gpuward1.Machine", default_service = "org.gpuward1", assume_defaults = false)]
pub trait Machine {
    /// Claims its devices and starts its domain.
    #[zbus(allow_interactive_auth)]
    fn start(&self, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;

    /// Asks the guest to shut down.
    #[zbus(allow_interactive_auth)]
    fn stop(&self, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;

    /// Ends the domain at once.
    #[zbus(allow_interactive_auth)]
    fn kill(&self, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;

    /// Asks the guest to reboot.
    #[zbus(allow_interactive_auth)]
    fn reboot(&self, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;

    /// A stream socket to and from its serial console.
    #[zbus(allow_interactive_auth)]
    fn open_console(&self, options: Options<'_>) -> zbus::Result<OwnedFd>;

    /// Why it is as it is: `state s`, `reason s`, `waits-for s`, `error a{sv}`, …
    fn explain(&self, options: Options<'_>) -> zbus::Result<Dict>;

    /// Forgets it.
    #[zbus(allow_interactive_auth)]
    fn remove(&self, options: Options<'_>) -> zbus::Result<OwnedObjectPath>;
}

/// A job.
#[zbus::proxy(interface = "org.gpuward1.Job", default_service = "org.gpuward1", assume_defaults = false)]
pub trait Job {
    /// Stops it before its next change and rolls it back.
    #[zbus(allow_interactive_auth)]
    fn cancel(&self) -> zbus::Result<()>;

    /// Answers when it is over: `state s`, `result a{sv}` with what it made, and the keys of its failure where it failed.
    fn wait(&self, options: Options<'_>) -> zbus::Result<Dict>;
}

/// Why a call brought no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The service answered with a failure.
    #[error(transparent)]
    Answered(Box<Failure>),
    /// There is no service, or no bus.
    #[error("the gpuward service is not there")]
    Absent(#[source] Box<zbus::Error>),
    /// The service has no object at the path of the call.
    #[error("the gpuward service knows nothing of it")]
    NoObject(#[source] Box<zbus::Error>),
    /// Something else went wrong between here and the service.
    #[error("cannot talk to the gpuward service")]
    Broken(#[source] Box<zbus::Error>),
}

impl From<zbus::Error> for CallError {
    fn from(error: zbus::Error) -> Self {
        if let zbus::Error::MethodError(name, text, message) = &error
            && let Some(failure) = wire::failure_of_reply(name, text.as_deref(), message)
        {
            return Self::Answered(Box::new(failure));
        }
        if let zbus::Error::FDO(named) = &error {
            return Self::of_named(named).unwrap_or(Self::Broken(Box::new(error)));
        }
        if matches!(error, zbus::Error::Connection(..) | zbus::Error::InputOutput(_) | zbus::Error::Handshake(_) | zbus::Error::Address(_))
        {
            return Self::Absent(Box::new(error));
        }
        Self::Broken(Box::new(error))
    }
}

impl CallError {
    fn of_named(error: &fdo::Error) -> Option<Self> {
        use fdo::Error as E;
        if let E::AccessDenied(text) | E::AuthFailed(text) | E::InteractiveAuthorizationRequired(text) = error {
            let failure = Failure::new(ErrorKind::NotAuthorized, format!("the message bus does not let you do this: {text}"));
            let failure = failure.remedy("run it as root, or as a member of group gpuward");
            return Some(Self::Answered(Box::new(failure)));
        }
        let boxed = || Box::new(zbus::Error::FDO(Box::new(error.clone())));
        if matches!(error, E::UnknownObject(_) | E::UnknownInterface(_) | E::UnknownMethod(_)) {
            return Some(Self::NoObject(boxed()));
        }
        let nobody_there = matches!(
            error,
            E::ServiceUnknown(_)
                | E::NameHasNoOwner(_)
                | E::NoServer(_)
                | E::NoReply(_)
                | E::Disconnected(_)
                | E::SpawnChildExited(_)
                | E::SpawnFailed(_)
                | E::SpawnServiceNotFound(_)
        );
        nobody_there.then(|| Self::Absent(boxed()))
    }
}

/// The objects of the service by path, each with the properties of its interfaces (named without `org.gpuward1.`).
pub type Objects = BTreeMap<String, BTreeMap<String, Record>>;

/// A connection to the service. Its calls block until they are answered.
pub struct Client {
    runtime: Runtime,
    connection: Connection,
}

impl Client {
    /// Connects to the bus at `address`; without one to the system bus (`DBUS_SYSTEM_BUS_ADDRESS`).
    ///
    /// # Errors
    /// There is no bus there.
    pub fn connect(address: Option<&str>) -> Result<Self, CallError> {
        let broken = |error: std::io::Error| CallError::Broken(Box::new(error.into()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(broken)?;
        let connection = runtime.block_on(async {
            let bus = address.map_or_else(connection::Builder::system, connection::Builder::address);
            bus.build().await
        })?;
        Ok(Self { runtime, connection })
    }

    /// The bus, for making proxies on.
    pub fn bus(&self) -> &Connection {
        &self.connection
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// As the call's.
    pub fn wait<T>(&self, answer: impl Future<Output = zbus::Result<T>>) -> Result<T, CallError> {
        Ok(self.runtime.block_on(answer)?)
    }

    /// Every object with its properties, in one round trip.
    ///
    /// # Errors
    /// There is no service, or the caller may not see the whole bus.
    pub fn objects(&self) -> Result<Objects, CallError> {
        let managed = self.wait(async {
            let manager = ObjectManagerProxy::builder(&self.connection).destination(SERVICE).path(ENTRY).build().await?;
            Ok(manager.get_managed_objects().await?)
        })?;
        let short = |name: &str| name.strip_prefix("org.gpuward1.").map(str::to_owned);
        let interfaces = |all: HashMap<zbus::names::OwnedInterfaceName, Dict>| {
            all.into_iter().filter_map(|(name, properties)| Some((short(name.as_str())?, Record(properties)))).collect()
        };
        Ok(managed.into_iter().map(|(path, all)| (path.to_string(), interfaces(all))).collect())
    }

    /// The properties of an interface (named without `org.gpuward1.`) of an object.
    ///
    /// # Errors
    /// There is no service, or no such object for this caller.
    pub fn properties(&self, path: &str, interface: &str) -> Result<Record, CallError> {
        let name = format!("{SERVICE}.{interface}");
        let get = async {
            let path = ObjectPath::try_from(path)?;
            let properties = fdo::PropertiesProxy::builder(&self.connection).destination(SERVICE).path(path).build().await?;
            Ok(properties.get_all(zbus::names::InterfaceName::try_from(name.as_str())?).await?)
        };
        self.wait(get).map(Record)
    }

    /// Every object that the caller may see. Whoever may not see the whole bus gets their own machines with their tenants and claims,
    /// one call each.
    ///
    /// # Errors
    /// As [`Self::objects`].
    pub fn visible(&self) -> Result<Objects, CallError> {
        match self.objects() {
            Err(CallError::Answered(failure)) if failure.kind == ErrorKind::NotAuthorized => self.own(),
            objects => objects,
        }
    }

    fn own(&self) -> Result<Objects, CallError> {
        let (tenants, machines) = self.wait(async {
            let manager = ManagerProxy::new(&self.connection).await?;
            Ok((manager.list_tenants(Options::new()).await?, manager.list_machines(Options::new()).await?))
        })?;
        let mut objects = Objects::new();
        for tenant in tenants.into_iter().map(Record) {
            self.add(&mut objects, tenant.text("tenant"), "Tenant")?;
        }
        for machine in machines.into_iter().map(Record) {
            for claim in self.add(&mut objects, machine.text("machine"), "Machine")? {
                self.add(&mut objects, &claim, "Claim")?;
            }
        }
        Ok(objects)
    }

    // What has gone since it was listed is left out. Gives the claims that it names.
    fn add(&self, objects: &mut Objects, path: &str, interface: &str) -> Result<Vec<String>, CallError> {
        let record = match self.properties(path, interface) {
            Err(CallError::NoObject(_)) => return Ok(Vec::new()),
            found => found?,
        };
        let claims = record.texts("Claims");
        objects.entry(path.to_owned()).or_default().insert(interface.to_owned(), record);
        Ok(claims)
    }

    /// Every signal of the service from now on.
    ///
    /// # Errors
    /// The bus refuses the subscription.
    pub fn signals(&self) -> Result<MessageStream, CallError> {
        self.wait(async {
            let rule = MatchRule::builder().msg_type(zbus::message::Type::Signal).sender(SERVICE).build()?;
            MessageStream::for_match_rule(rule, &self.connection, None).await
        })
    }

    /// Every change of who has the service's name, from now on.
    ///
    /// # Errors
    /// The bus refuses the subscription.
    pub fn owners(&self) -> Result<MessageStream, CallError> {
        self.wait(async {
            let rule = MatchRule::builder().msg_type(zbus::message::Type::Signal).sender("org.freedesktop.DBus");
            let rule = rule.member("NameOwnerChanged").arg(0, SERVICE).build()?;
            MessageStream::for_match_rule(rule, &self.connection, None).await
        })
    }
}
