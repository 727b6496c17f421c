//! The daemon: engine and bus together, until it is told to stop.
//!
//! Stopping leaves everything as it is: bindings, claims and running machines. The next start adopts them.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::bus;
use crate::engine::{self, Engine, EngineHandle, StartFailed};

/// What a daemon is made of.
#[derive(Clone, Debug)]
pub struct Options {
    /// The host, its files and what machines need.
    pub engine: engine::Options,
    /// Which bus to be on.
    pub bus: bus::Address,
}

/// Why a daemon does not start, or ends.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The engine does not start.
    #[error(transparent)]
    Engine(#[from] StartFailed),
    /// The bus cannot be reached, the name is taken, or the bus has gone.
    #[error("cannot serve {} on the bus", bus::NAME)]
    Bus(#[source] zbus::Error),
    /// The engine's thread has ended by itself.
    #[error("the engine has ended; the log says why")]
    EngineEnded,
    /// The system gives no threads or no signals.
    #[error("cannot set up the daemon")]
    System(#[source] std::io::Error),
}

/// Runs until SIGTERM or SIGINT; SIGHUP reads the configuration again.
///
/// # Errors
/// It does not start, or its bus goes away.
pub fn run(options: Options) -> Result<(), DaemonError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(DaemonError::System)?;
    let host = options.engine.host.clone();
    let (updates, published) = mpsc::unbounded_channel();
    let publish = move |update| {
        if updates.send(update).is_err() {
            tracing::debug!("an update came after the bus had gone");
        }
    };
    let connection = runtime.block_on(bus::connect(&options.bus)).map_err(DaemonError::Bus)?;
    let engine = Engine::start(options.engine, Box::new(publish))?;
    let served = runtime.block_on(async {
        let mut signals = Signals::new().map_err(DaemonError::System)?;
        let lost = connection.clone();
        tokio::select! {
            served = bus::serve(connection, engine.clone(), host, published) => served.map_err(DaemonError::Bus).and(Err(DaemonError::EngineEnded)),
            () = signals.until_stopped(&engine) => Ok(()),
            () = lost.closed() => Err(DaemonError::Bus(zbus::fdo::Error::Disconnected("the bus has gone".into()).into())),
        }
    });
    engine.stop();
    served
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn until_stopped(&mut self, engine: &EngineHandle) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => engine.reload(),
            }
        }
    }
}
