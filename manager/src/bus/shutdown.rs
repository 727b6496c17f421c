//! The host shuts down: told by logind, and by systemd for a shutdown that logind was not asked for.
//!
//! Guests are stopped then while services still run. A device must not be reset or bound elsewhere meanwhile: nobody would wait for it.

use std::pin::pin;

use zbus::export::ordered_stream::{OrderedStreamExt, join};
use zbus::message::Type;
use zbus::{Connection, MatchRule, Message, MessageStream};

use crate::engine::EngineHandle;

/// The unit that systemd starts to shut down.
const TARGET: &str = "shutdown.target";
const SYSTEMD: (&str, &str, &str) = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager");
const LOGIND: (&str, &str, &str) = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager");

/// Tells the engine that the host begins to shut down, or does not after all. Ends with the bus.
pub(super) async fn watch(connection: Connection, engine: EngineHandle) {
    if let Err(error) = listen(&connection, &engine).await {
        tracing::warn!("a shutdown of the host will not be noticed: {error}");
    }
    // Not to be heard is no reason to end.
    std::future::pending().await
}

async fn listen(connection: &Connection, engine: &EngineHandle) -> zbus::Result<()> {
    let prepare = signals(connection, LOGIND, "PrepareForShutdown", None).await?;
    let begun = signals(connection, SYSTEMD, "JobNew", Some(TARGET)).await?;
    let ended = signals(connection, SYSTEMD, "JobRemoved", Some(TARGET)).await?;
    // systemd tells of jobs only where somebody has asked for that.
    let (name, path, interface) = SYSTEMD;
    if let Err(error) = connection.call_method(Some(name), path, Some(interface), "Subscribe", &()).await {
        tracing::info!("systemd does not tell of its jobs, logind has to: {error}");
    }
    let mut all = pin!(join(prepare, join(begun, ended)));
    while let Some(signal) = all.next().await {
        if let Some(stops) = says(&signal?) {
            engine.host_stops(stops);
        }
    }
    Ok(())
}

async fn signals(
    connection: &Connection,
    (sender, path, interface): (&'static str, &'static str, &'static str),
    member: &'static str,
    unit: Option<&'static str>,
) -> zbus::Result<MessageStream> {
    let rule = MatchRule::builder().msg_type(Type::Signal).sender(sender).path(path).interface(interface).member(member);
    let rule = match unit {
        Some(unit) => rule.arg(2, unit),
        None => rule,
    };
    MessageStream::for_match_rule(rule.build()?, connection, None).await
}

/// Whether a signal says that the host stops; `None` where it says neither.
fn says(signal: &Message) -> Option<bool> {
    let body = signal.body();
    match signal.header().member()?.as_str() {
        "PrepareForShutdown" => body.deserialize().ok(),
        "JobNew" => Some(true),
        // A shutdown that was carried out is not told of any more.
        "JobRemoved" => Some(false),
        _ => None,
    }
}
