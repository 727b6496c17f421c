//! Who may do what: polkit is asked about the caller, before anything is looked up.
//!
//! Two circles. Root, the user the daemon runs as and members of group `gpuward` see everything; a tenant's owners see what is the
//! tenant's. Methods need a polkit action each; to what is the caller's own tenant's it is `use-own`. Nothing here runs on the engine.

use std::collections::HashMap;
use std::time::Duration;

use rustix::process::geteuid;
use zbus::Connection;
use zbus::fdo::{ConnectionCredentials, DBusProxy};
use zbus::message::{Flags, Header};
use zbus_polkit::policykit1::{AuthorityProxy, CheckAuthorizationFlags, Subject};

use crate::failure::{ErrorKind, Failure};

/// What callers need leave for. `data/org.gpuward1.policy` gives each its defaults; a test compares the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Look at devices, machines and jobs.
    Inspect,
    /// Everything with machines and claims of a tenant that the caller owns.
    UseOwn,
    /// Create, start, stop, kill and remove machines of any tenant; claim devices for others' domains, and end such claims.
    ManageMachines,
    /// Make, change and remove tenants.
    ManageTenants,
    /// Move devices between the host and the pool.
    Assign,
    /// Reset devices of the pool.
    Reset,
    /// Let devices out of quarantine.
    ClearQuarantine,
    /// Assign in spite of a warning (the boot display).
    Force,
    /// Name what is the administrator's: host paths, bridges, kernels.
    Configure,
}

impl Action {
    /// Every action.
    pub const ALL: [Self; 9] = [
        Self::Inspect,
        Self::UseOwn,
        Self::ManageMachines,
        Self::ManageTenants,
        Self::Assign,
        Self::Reset,
        Self::ClearQuarantine,
        Self::Force,
        Self::Configure,
    ];

    /// Its name for polkit.
    pub fn id(self) -> &'static str {
        match self {
            Self::Inspect => "org.gpuward.inspect",
            Self::UseOwn => "org.gpuward.use-own",
            Self::ManageMachines => "org.gpuward.manage-machines",
            Self::ManageTenants => "org.gpuward.manage-tenants",
            Self::Assign => "org.gpuward.assign",
            Self::Reset => "org.gpuward.reset",
            Self::ClearQuarantine => "org.gpuward.clear-quarantine",
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

/// Who calls, as the bus knows it.
#[derive(Clone, Debug)]
pub(super) struct Who {
    pub(super) uid: u32,
    pub(super) groups: Vec<u32>,
    /// Whether they see everything.
    pub(super) sees_everything: bool,
}

/// How long polkit may take, without and with a person to be asked.
const PATIENCE: Duration = Duration::from_secs(30);
const PATIENCE_WITH_PEOPLE: Duration = Duration::from_secs(300);

/// The group that sees everything.
const GROUP: &str = "gpuward";

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
        let uid = self.who(header).await?.uid;
        self.check_uid(header, uid, action, details).await
    }

    /// As [`Self::check`], of a caller who is known.
    pub(super) async fn check_uid(
        &self,
        header: &Header<'_>,
        uid: u32,
        action: Action,
        details: &[(&str, &str)],
    ) -> Result<Caller, Failure> {
        if uid == 0 {
            return Ok(Caller { uid });
        }
        match self.ask(header, action, details).await {
            Ok(true) => Ok(Caller { uid }),
            Ok(false) => Err(refusal(action)),
            Err(error) => Err(refusal(action).because(format!("polkit gives no answer: {error}"))),
        }
    }

    /// Who calls.
    ///
    /// # Errors
    /// `NotAuthorized` where the bus does not say.
    pub(super) async fn who(&self, header: &Header<'_>) -> Result<Who, Failure> {
        let credentials = self.credentials(header).await?;
        let uid = credentials.unix_user_id().ok_or_else(|| nobody("it names no user"))?;
        let sees_everything = is_in_circle(&credentials);
        Ok(Who { uid, groups: credentials.unix_group_ids().cloned().unwrap_or_default(), sees_everything })
    }

    async fn credentials(&self, header: &Header<'_>) -> Result<ConnectionCredentials, Failure> {
        let sender = header.sender().ok_or_else(|| nobody("the message has no sender"))?;
        let asked = async { DBusProxy::new(&self.connection).await?.get_connection_credentials(sender.to_owned().into()).await };
        asked.await.map_err(|error| nobody(&error.to_string()))
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

// Whoever runs the daemon could do without it all that it does.
fn is_in_circle(credentials: &ConnectionCredentials) -> bool {
    let uid = credentials.unix_user_id();
    let is_member = |groups: &Vec<u32>| group_id(&read("/etc/group")).is_some_and(|group| groups.contains(&group));
    uid == Some(0) || uid == Some(geteuid().as_raw()) || credentials.unix_group_ids().is_some_and(is_member)
}

// The group is a local one: the package makes it. Who is in it is told by the bus, wherever its members come from.
fn group_id(groups: &str) -> Option<u32> {
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(GROUP)).then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

fn read(file: &str) -> String {
    std::fs::read_to_string(file).unwrap_or_default()
}

/// What is answered to whoever may not look at what is no tenant's.
pub(super) fn not_yours() -> Failure {
    Failure::new(ErrorKind::NotAuthorized, "you are not authorised to look at this")
        .remedy("ask an administrator to add you to the group gpuward")
}

fn nobody(reason: &str) -> Failure {
    Failure::new(ErrorKind::NotAuthorized, "you are not authorised").because(format!("the bus does not say who calls: {reason}"))
}

fn refusal(action: Action) -> Failure {
    Failure::new(ErrorKind::NotAuthorized, format!("you are not authorised ({})", action.id()))
        .remedy("ask an administrator to add you to the group gpuward, or to grant you this polkit action")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_is_found_by_its_whole_name() {
        assert_eq!(group_id("root:x:0:\nnot-gpuward:x:5:\ngpuward:x:998:alice,bob\n"), Some(998));
        assert_eq!(group_id("gpuwardens:x:5:\n"), None);
    }

    #[test]
    fn the_policy_file_has_these_actions_and_no_others() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/data/org.gpuward1.policy");
        let text = read(file);
        let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
        let policy = roxmltree::Document::parse_with_options(&text, options).unwrap();
        let mut shipped: Vec<_> =
            policy.descendants().filter(|node| node.has_tag_name("action")).map(|node| node.attribute("id").unwrap()).collect();
        let mut asked: Vec<_> = Action::ALL.iter().map(|action| action.id()).collect();
        shipped.sort_unstable();
        asked.sort_unstable();
        assert_eq!(shipped, asked);
    }
}
