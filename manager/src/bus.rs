//! The service `org.gpuward1`: the only asynchronous part.
//!
//! A method parses, asks who may, and hands the request to the engine; its job's path is the answer, at once. Getters read the
//! last view. Objects come first and the name last, so that whoever sees the name sees everything.

mod authority;
mod claim;
mod clients;
mod device;
mod dict;
mod error;
mod explain;
mod group;
mod guard;
mod history;
mod job;
mod machine;
mod manager;
mod paths;
mod preflight;
mod publisher;
mod service;
mod shutdown;
mod systemd;
mod tenant;

use std::sync::Arc;

use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::sync::watch;
use vfio::Host;
use zbus::fdo::{ObjectManager, RequestNameFlags};
use zbus::{Connection, connection};

use crate::engine::EngineHandle;
use crate::view::Update;
pub use authority::Action;
use authority::Authority;
use guard::Guarded;
use manager::Manager;
use publisher::Publisher;
use service::Service;
pub use systemd::HostKernel;

/// The name on the bus.
pub const NAME: &str = "org.gpuward1";

/// Which bus to be on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// The system bus.
    System,
    /// A bus at this address (`unix:path=…`).
    At(String),
}

/// Connects to the bus.
///
/// # Errors
/// There is no bus there.
pub async fn connect(address: &Address) -> zbus::Result<Connection> {
    let builder = match address {
        Address::System => connection::Builder::system(),
        Address::At(address) => connection::Builder::address(address.as_str()),
    };
    builder.build().await
}

/// Serves `updates` of the engine on `connection`; takes the name after the first of them is published. Ends with the engine.
///
/// # Errors
/// The name is taken, or the bus has gone.
pub async fn serve(connection: Connection, engine: EngineHandle, host: Host, mut updates: UnboundedReceiver<Update>) -> zbus::Result<()> {
    let (board, view) = watch::channel(Arc::default());
    let instance = uuid::Uuid::new_v4().simple().to_string();
    let (reached, waiting) = mpsc::unbounded_channel();
    let service = Arc::new(Service { view, engine, authority: Authority::new(connection.clone()), host, instance, reached });
    let server = connection.object_server();
    server.at(paths::ENTRY, Guarded::whole(ObjectManager, service.clone())).await?;
    server.at(paths::ENTRY, Guarded::new(Manager(service.clone()), service.clone())).await?;
    let mut publisher = Publisher::new(connection.clone(), service, board);
    let Some(first) = updates.recv().await else { return Ok(()) };
    publisher.publish(first).await?;
    connection.request_name_with_flags(NAME, RequestNameFlags::DO_NOT_QUEUE).await?;
    let service = publisher.service.clone();
    let stops = shutdown::watch(connection.clone(), service.engine.clone());
    let watched = clients::watch(connection, service);
    tokio::select! {
        () = publisher.run(updates, waiting) => {}
        () = watched => {}
        () = stops => {}
    }
    Ok(())
}
