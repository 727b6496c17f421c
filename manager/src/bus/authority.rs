//! Who may do what: polkit is asked about the caller, before anything is looked up.

use std::collections::HashMap;
use std::time::Duration;

use zbus::Connection;
use zbus::fdo::DBusProxy;
use zbus::message::{Flags, Header};
use zbus_polkit::policykit1::{AuthorityProxy, CheckAuthorizationFlags, Subject};

use crate::failure::{ErrorKind, Failure};

/// What callers need leave for. `data/org.gpuward1.policy` gives each its defaults; a test compares the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Look at devices, machines and jobs.
    Inspect,
    /// Create, start, stop, kill and remove machines.
    ManageMachines,
    /// Move devices between the host and the pool.
    Assign,
    /// Assign in spite of a warning (the boot display).
    Force,
    /// Name what is the administrator's: host paths, bridges, kernels.
    Configure,
}

impl Action {
    /// Every action.
    pub const ALL: [Self; 5] = [Self::Inspect, Self::ManageMachines, Self::Assign, Self::Force, Self::Configure];

    /// Its name for polkit.
    pub fn id(self) -> &'static str {
        match self {
            Self::Inspect => "org.gpuward.inspect",
            Self::ManageMachines => "org.gpuward.manage-machines",
            Self::Assign => "org.gpuward.assign",
            Self::Force => "org.gpuward.force",
            Self::Configure => "org.gpuward.configure",
        }
    }
}

/// A caller who was found to be allowed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller {
    pub(super) uid: u32,
}

/// How long polkit may take, without and with a person to be asked.
const PATIENCE: Duration = Duration::from_secs(30);
const PATIENCE_WITH_PEOPLE: Duration = Duration::from_secs(300);

/// Asks about callers.
#[derive(Debug)]
pub(super) struct Authority {
    connection: Connection,
}

impl Authority {
    pub(super) fn new(connection: Connection) -> Self {
        Self { connection }
    }

    /// Whether the caller of `header` may do `action`; `details` are for the dialog. Root may do everything.
    ///
    /// # Errors
    /// `NotAuthorized`, with no word about what the call was about.
    pub(super) async fn check(&self, header: &Header<'_>, action: Action, details: &[(&str, &str)]) -> Result<Caller, Failure> {
        let uid = self.uid(header).await.map_err(|error| refusal(action).because(format!("the bus does not say who calls: {error}")))?;
        if uid == 0 {
            return Ok(Caller { uid });
        }
        match self.ask(header, action, details).await {
            Ok(true) => Ok(Caller { uid }),
            Ok(false) => Err(refusal(action)),
            Err(error) => Err(refusal(action).because(format!("polkit gives no answer: {error}"))),
        }
    }

    async fn uid(&self, header: &Header<'_>) -> zbus::Result<u32> {
        let sender = header.sender().ok_or(zbus::Error::MissingField)?;
        Ok(DBusProxy::new(&self.connection).await?.get_connection_unix_user(sender.to_owned().into()).await?)
    }

    async fn ask(&self, header: &Header<'_>, action: Action, details: &[(&str, &str)]) -> Result<bool, String> {
        let interactive = header.primary().flags().contains(Flags::ALLOW_INTERACTIVE_AUTH);
        let (flags, patience) = match interactive {
            true => (CheckAuthorizationFlags::ALLOW_USER_INTERACTION, PATIENCE_WITH_PEOPLE),
            false => (CheckAuthorizationFlags::empty(), PATIENCE),
        };
        let details: HashMap<&str, &str> = details.iter().copied().collect();
        let asked = async {
            let subject = Subject::new_for_message_header(header).map_err(|error| error.to_string())?;
            let polkit = AuthorityProxy::new(&self.connection).await.map_err(|error| error.to_string())?;
            let answer = polkit.check_authorization(&subject, action.id(), &details, flags, "").await;
            answer.map(|answer| answer.is_authorized).map_err(|error| error.to_string())
        };
        tokio::time::timeout(patience, asked).await.unwrap_or_else(|_| Err(format!("not within {} s", patience.as_secs())))
    }
}

fn refusal(action: Action) -> Failure {
    Failure::new(ErrorKind::NotAuthorized, format!("you are not authorised ({})", action.id()))
        .remedy("ask an administrator to add you to the group gpuward, or to grant you this polkit action")
}
