//! A stand-in for polkit on a private bus: allows what it is told to, and keeps what it was asked.
//!
//! Members and signatures are those of `org.freedesktop.PolicyKit1.Authority`.

use std::collections::HashMap;
use std::io;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use tokio::sync::oneshot;
use zbus::fdo::DBusProxy;
use zbus::names::BusName;
use zbus::wire::OwnedVariant;
use zbus::{Connection, connection, interface};

/// Whom a rule of the stand-in is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Who {
    /// Every caller.
    Anybody,
    /// Callers that run as this user.
    Uid(u32),
    /// The connection with this unique name.
    Name(String),
}

/// What polkit was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The action (`org.gpuward.assign`).
    pub action: String,
    /// Unique name of the connection that wants to do it; empty where the subject was named otherwise.
    pub name: String,
    /// The user it runs as.
    pub uid: Option<u32>,
    /// Details for the dialog.
    pub details: HashMap<String, String>,
    /// Whether a person may be asked.
    pub interactive: bool,
    /// What it answered.
    pub allowed: bool,
}

#[derive(Debug, Default)]
struct State {
    allowed: Vec<(String, Who)>,
    asked: Vec<Asked>,
}

/// A running stand-in; leaves the bus when dropped.
#[derive(Debug)]
pub struct Polkit {
    state: Arc<Mutex<State>>,
    _leave: oneshot::Sender<()>,
}

impl Polkit {
    /// Takes polkit's name on the bus at `address`, in a thread of its own. Allows nothing yet.
    ///
    /// # Errors
    /// The bus cannot be reached, or the name is taken.
    pub fn start(address: &str) -> io::Result<Self> {
        let state = Arc::new(Mutex::new(State::default()));
        let (leave, left) = oneshot::channel();
        let (ready, is_ready) = mpsc::channel();
        let (shared, address) = (Arc::clone(&state), address.to_owned());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        thread::Builder::new().name("polkit".into()).spawn(move || runtime.block_on(serve(address, shared, ready, left)))?;
        match is_ready.recv() {
            Ok(Ok(())) => Ok(Self { state, _leave: leave }),
            Ok(Err(error)) => Err(io::Error::other(error)),
            Err(_) => Err(io::Error::other("the polkit stand-in's thread ended")),
        }
    }

    /// Allows `who` the `action`; `*` is every action.
    pub fn allow(&self, action: &str, who: Who) {
        lock(&self.state).allowed.push((action.into(), who));
    }

    /// Allows nothing any more.
    pub fn forbid_all(&self) {
        lock(&self.state).allowed.clear();
    }

    /// What it was asked, oldest first.
    pub fn asked(&self) -> Vec<Asked> {
        lock(&self.state).asked.clone()
    }
}

type Ready = mpsc::Sender<Result<(), zbus::Error>>;

async fn serve(address: String, state: Arc<Mutex<State>>, ready: Ready, left: oneshot::Receiver<()>) {
    let opened = open(&address, state).await;
    let (connection, answer) = match opened {
        Ok(connection) => (Some(connection), Ok(())),
        Err(error) => (None, Err(error)),
    };
    if ready.send(answer).is_ok() && connection.is_some() {
        // Ends with an error when the stand-in is dropped: that is the sign.
        left.await.unwrap_or_default();
    }
}

async fn open(address: &str, state: Arc<Mutex<State>>) -> Result<Connection, zbus::Error> {
    connection::Builder::address(address)
        .serve_at("/org/freedesktop/PolicyKit1/Authority", Authority { state })
        .name("org.freedesktop.PolicyKit1")
        .build()
        .await
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Authority {
    state: Arc<Mutex<State>>,
}

type Subject = (String, HashMap<String, OwnedVariant>);
type Answer = (bool, bool, HashMap<String, String>);

#[interface(name = "org.freedesktop.PolicyKit1.Authority")]
impl Authority {
    #[zbus(out_args("result"))]
    async fn check_authorization(
        &self,
        subject: Subject,
        action_id: String,
        details: HashMap<String, String>,
        flags: u32,
        _cancellation_id: String,
        #[zbus(connection)] connection: &Connection,
    ) -> (Answer,) {
        let name = match subject.1.get("name") {
            Some(name) if subject.0 == "system-bus-name" => name.downcast_ref::<String>().unwrap_or_default(),
            _ => String::new(),
        };
        let uid = uid_of(connection, &name).await;
        let mut state = lock(&self.state);
        let allowed = state.allowed.iter().any(|(action, who)| (action == "*" || *action == action_id) && who.is(&name, uid));
        state.asked.push(Asked { action: action_id, name, uid, details, interactive: flags & 1 == 1, allowed });
        ((allowed, false, HashMap::new()),)
    }

    async fn cancel_check_authorization(&self, _cancellation_id: String) {}

    #[zbus(property)]
    fn backend_name(&self) -> &str {
        "stand-in"
    }

    #[zbus(property)]
    fn backend_version(&self) -> &str {
        "0"
    }

    #[zbus(property)]
    fn backend_features(&self) -> u32 {
        0
    }
}

impl Who {
    fn is(&self, name: &str, uid: Option<u32>) -> bool {
        match self {
            Self::Anybody => true,
            Self::Uid(wanted) => uid == Some(*wanted),
            Self::Name(wanted) => name == wanted,
        }
    }
}

async fn uid_of(connection: &Connection, name: &str) -> Option<u32> {
    let bus = DBusProxy::new(connection).await.ok()?;
    bus.get_connection_unix_user(BusName::try_from(name).ok()?).await.ok()
}
