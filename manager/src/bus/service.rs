//! What every object shares: the last view, the way to the engine, and the question who may.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};
use vfio::{Host, PciAddress};
use zbus::message::Header;

use super::authority::{Action, Authority, Caller};
use super::dict::{Options, Received};
use super::error::BusError;
use super::guard::Belongs;
use super::paths::{self, Path};
use crate::engine::EngineHandle;
use crate::failure::{ErrorKind, Failure};
use crate::request::{Ask, Reply, Request, Submission};
use crate::view::View;

/// The longest request id; it goes into the journal, the ledger and a domain's metadata.
const LONGEST_REQUEST_ID: usize = 128;

/// What every object shares.
pub(super) struct Service {
    pub(super) view: watch::Receiver<Arc<View>>,
    pub(super) engine: EngineHandle,
    pub(super) authority: Authority,
    pub(super) host: Host,
    pub(super) instance: String,
    /// Answered when all that the engine handed out before is on the bus.
    pub(super) reached: mpsc::UnboundedSender<oneshot::Sender<()>>,
}

/// The conditions that every change takes.
#[derive(Debug, Default)]
pub(super) struct Conditions {
    request_id: String,
    if_generation: Option<u64>,
}

impl Conditions {
    pub(super) fn take(options: &mut Options) -> Result<Self, Failure> {
        let request_id = options.text("request-id")?.unwrap_or_default();
        if request_id.len() > LONGEST_REQUEST_ID || request_id.chars().any(char::is_control) {
            let problem = format!("request-id is longer than {LONGEST_REQUEST_ID} bytes or has control characters");
            return Err(Failure::new(ErrorKind::InvalidSpec, problem));
        }
        Ok(Self { request_id, if_generation: options.number("if-generation")? })
    }

    /// Conditions and nothing else.
    pub(super) fn only(received: Received) -> Result<Self, Failure> {
        let mut options = Options::new(received)?;
        let conditions = Self::take(&mut options)?;
        options.done().map(|()| conditions)
    }
}

impl Service {
    /// What was published last.
    pub(super) fn view(&self) -> Arc<View> {
        self.view.borrow().clone()
    }

    /// Whether the caller may do `action`, to `what`.
    pub(super) async fn check(&self, header: &Header<'_>, action: Action, what: &str) -> Result<Caller, Failure> {
        self.authority.check(header, action, &[("object", what)]).await
    }

    /// Whether the caller may do `action` to `what`: to what is their own `use-own` is enough.
    pub(super) async fn check_own(&self, header: &Header<'_>, (action, belongs): (Action, Belongs), what: &str) -> Result<Caller, Failure> {
        let who = self.authority.who(header).await?;
        let details = [("object", what)];
        if belongs.is_own(&self.view(), &who)
            && let Ok(caller) = self.authority.check_uid(header, who.uid, Action::UseOwn, &details).await
        {
            return Ok(caller);
        }
        self.authority.check_uid(header, who.uid, action, &details).await
    }

    /// Hands a change to the engine and gives the path of its job, which is on the bus by then.
    pub(super) async fn submit(&self, caller: Caller, request: Request, conditions: Conditions) -> Result<Path, BusError> {
        let Conditions { request_id, if_generation } = conditions;
        let submission = Submission { request, uid: caller.uid, request_id, if_generation };
        let job = self.ask(|reply| Ask::Submit(submission, reply)).await?;
        self.published().await?;
        Ok(paths::job(job))
    }

    /// Asks the engine and waits for its answer.
    pub(super) async fn ask<T: Send + 'static>(&self, ask: impl FnOnce(Reply<T>) -> Ask) -> Result<T, Failure> {
        let (answer, answered) = oneshot::channel();
        let reply: Reply<T> = Box::new(move |result| {
            if answer.send(result).is_err() {
                tracing::debug!("a caller left before it was answered");
            }
        });
        self.engine.ask(ask(reply));
        answered.await.map_err(|_| stopping())?
    }

    /// Waits until all that the engine has handed out is on the bus.
    pub(super) async fn published(&self) -> Result<(), Failure> {
        let (sender, reached) = oneshot::channel();
        self.reached.send(sender).map_err(|_| stopping())?;
        reached.await.map_err(|_| stopping())
    }
}

/// What is answered while the daemon ends.
pub(super) fn stopping() -> Failure {
    Failure::new(ErrorKind::HostNotReady, "the daemon is stopping").remedy("call again when it is back")
}

/// The device that a caller names by address.
pub(super) fn parse_device(text: &str) -> Result<PciAddress, Failure> {
    text.parse().map_err(|error: vfio::InvalidAddress| Failure::new(ErrorKind::InvalidSpec, error.to_string()))
}
