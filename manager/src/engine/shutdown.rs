//! While the host shuts down nothing is begun: whatever ends then keeps its claim, which the next boot closes as unclean.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vfio::Host;

use super::{Engine, external, machines};
use crate::failure::{ErrorKind, Failure};

/// How long the service manager may take to say whether the host shuts down.
const ASKING: Duration = Duration::from_secs(2);

/// Asks whether the host shuts down. A daemon that a shutdown ends may be told to end before it is told why. Where that cannot be told, the
/// host does not.
pub(super) fn has_begun(host: &Host) -> bool {
    host.is_shutting_down(Instant::now() + ASKING).unwrap_or_else(|error| {
        tracing::debug!("whether the host shuts down cannot be told: {}", Failure::of(ErrorKind::Internal, &error));
        false
    })
}

impl Engine {
    /// Whether the host shuts down.
    pub(super) fn host_stops(&self) -> bool {
        self.host_stops.load(Ordering::Relaxed)
    }

    pub(super) fn note_shutdown(&mut self, stops: bool) {
        if self.host_stops.swap(stops, Ordering::Relaxed) == stops {
            return;
        }
        if stops {
            tracing::info!("the host shuts down: nothing is begun any more");
            return;
        }
        tracing::info!("the host does not shut down after all");
        machines::look_at_all(self);
        external::look_at_all(self);
        self.dispatch();
        self.publish();
    }
}
