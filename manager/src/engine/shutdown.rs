//! While the host shuts down nothing is begun: whatever ends then keeps its claim, which the next boot closes as unclean.

use std::sync::atomic::Ordering;

use super::{Engine, external, machines};

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
