//! At boot, before libvirt: takes again what was in the pool, by the kernel alone, and ends.
//!
//! The daemon would do the same. Done here, guests that start at boot find their devices, and no host driver has used them long.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::engine::{Engine, Options, StartFailed};
use crate::failure::Failure;
use crate::view::{HostState, Update, View};

/// The longest that a boot waits for it.
const WITHIN: Duration = Duration::from_secs(60);

/// Why the pool is not as it was.
#[derive(Debug, thiserror::Error)]
pub enum RestoreFailed {
    /// No engine.
    #[error(transparent)]
    Engine(#[from] StartFailed),
    /// Files of gpuward's own cannot be used.
    #[error("nothing was restored: {reason}")]
    Degraded {
        /// Which, and what to do.
        reason: String,
    },
    /// Some devices are not where they were; the log has said which, and why.
    #[error("{count} of {total} devices are not as they were before the boot")]
    Devices {
        /// How many.
        count: usize,
        /// Of how many.
        total: usize,
    },
    /// Something else that a boot has to bring back failed.
    #[error("{0}")]
    Jobs(Failure),
    /// It took too long; what is under way is undone, and the daemon tries again.
    #[error("restoring took more than {} s", WITHIN.as_secs())]
    TooLong,
}

/// Starts an engine, waits until it has mended and restored everything, and ends it.
///
/// # Errors
/// Whatever is not as it was before the boot.
pub fn run(options: Options) -> Result<(), RestoreFailed> {
    let (updates, published) = mpsc::channel::<Update>();
    let publish = move |update| {
        if updates.send(update).is_err() {
            tracing::debug!("an update came after the end");
        }
    };
    let engine = Engine::start(options, Box::new(publish))?;
    let until = Instant::now() + WITHIN;
    let restored = loop {
        match published.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(update) => {
                if let Some(end) = end_of(&update.view) {
                    break end;
                }
            }
            Err(_) => break Err(RestoreFailed::TooLong),
        }
    };
    engine.stop();
    restored
}

// The engine asks for what is to be restored before it says that it is ready.
fn end_of(view: &View) -> Option<Result<(), RestoreFailed>> {
    match &view.host_state {
        HostState::Recovering => None,
        HostState::Degraded { reason } => Some(Err(RestoreFailed::Degraded { reason: reason.clone() })),
        HostState::Ready if view.jobs.values().any(|job| !job.state.is_over()) => None,
        HostState::Ready => {
            let count = view.restored.values().filter(|restored| !restored.is_as_it_was()).count();
            let failure = || view.jobs.values().find_map(|job| job.error.clone());
            Some(match count {
                0 => failure().map_or(Ok(()), |failure| Err(RestoreFailed::Jobs(failure))),
                count => Err(RestoreFailed::Devices { count, total: view.restored.len() }),
            })
        }
    }
}
