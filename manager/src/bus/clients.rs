//! Clients whose claims end with their connection: known by their unique name and the bus that gave it, and watched on the bus.
//!
//! A unique name is never given twice by one bus, but a bus that starts anew begins with the same names.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::task::JoinHandle;
use zbus::Connection;
use zbus::export::ordered_stream::OrderedStreamExt;
use zbus::fdo::DBusProxy;
use zbus::message::Header;
use zbus::names::BusName;

use super::service::Service;
use crate::engine::EngineHandle;
use crate::failure::{ErrorKind, Failure};

/// Between a unique name and the bus that gave it.
const ON: char = '@';

/// The caller of `header`, as the engine knows it.
pub(super) fn caller(header: &Header<'_>, connection: &Connection) -> Result<String, Failure> {
    let sender = header.sender().ok_or_else(|| Failure::new(ErrorKind::NotAuthorized, "the message has no sender"))?;
    Ok(format!("{sender}{ON}{}", connection.server_guid()))
}

/// Tells the engine when a client with claims has left, until the engine ends.
pub(super) async fn watch(connection: Connection, service: Arc<Service>) {
    let mut view = service.view.clone();
    let mut watched: BTreeMap<String, JoinHandle<()>> = BTreeMap::new();
    loop {
        let clients: Vec<_> = view.borrow_and_update().claims.values().map(|claim| claim.client.clone()).collect();
        watched.retain(|client, task| {
            let stays = clients.contains(client);
            if !stays {
                task.abort();
            }
            stays
        });
        for client in clients.into_iter().filter(|client| !client.is_empty()) {
            let (connection, engine) = (connection.clone(), service.engine.clone());
            watched.entry(client.clone()).or_insert_with(|| tokio::spawn(until_left(connection, engine, client)));
        }
        // The sender is gone with the publisher, which ends with the engine.
        if view.changed().await.is_err() {
            return;
        }
    }
}

async fn until_left(connection: Connection, engine: EngineHandle, client: String) {
    match has_left(&connection, &client).await {
        Ok(()) => engine.client_left(client),
        // The claim stays: nobody can say that its client has gone.
        Err(error) => tracing::error!("client {client} cannot be watched, its claims stay: {error}"),
    }
}

/// Returns when a client is not on the bus any more.
async fn has_left(connection: &Connection, client: &str) -> zbus::Result<()> {
    let Some((name, bus)) = client.split_once(ON) else { return Ok(()) };
    if bus != connection.server_guid().as_str() {
        return Ok(());
    }
    let proxy = DBusProxy::new(connection).await?;
    // Subscribed before it is asked for: it may leave between the two.
    let mut changes = proxy.receive_name_owner_changed_with_args(&[(0, name)]).await?;
    if !proxy.name_has_owner(BusName::try_from(name)?).await? {
        return Ok(());
    }
    while let Some(change) = changes.next().await {
        if change.args()?.new_owner().is_none() {
            return Ok(());
        }
    }
    Err(zbus::fdo::Error::Disconnected("the bus has gone".into()).into())
}
