//! Reading is for those who see everything: one check before any property of any object, and before the list of objects.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;

use async_trait::async_trait;
use zbus::message::{Header, Message};
use zbus::names::{InterfaceName, MemberName};
use zbus::object_server::{DispatchResult, Interface, SignalEmitter};
use zbus::{BoxDBusError, Connection, ObjectServer, OwnedVariant, Variant, fdo};

use super::error::BusError;
use super::service::Service;
use crate::failure::Failure;

/// An interface whose properties only those read who see everything.
///
/// The daemon's own reads, for signals, come without a message and are not asked about: the bus gives signals only to those
/// who see everything.
pub(super) struct Guarded<I> {
    pub(super) inner: I,
    service: Arc<Service>,
    /// Whether calls of methods are guarded too; else each method asks for itself.
    calls: bool,
}

impl<I> Guarded<I> {
    /// Guards properties.
    pub(super) fn new(inner: I, service: Arc<Service>) -> Self {
        Self { inner, service, calls: false }
    }

    /// Guards properties and methods.
    pub(super) fn whole(inner: I, service: Arc<Service>) -> Self {
        Self { inner, service, calls: true }
    }
}

async fn allowed(service: &Arc<Service>, header: Option<&Header<'_>>) -> Result<(), Failure> {
    let Some(header) = header else { return Ok(()) };
    // Not polkit, which may wait for a person: properties are read under the object server's lock.
    service.authority.sees_everything(header).await
}

#[async_trait]
impl<I: Interface> Interface for Guarded<I> {
    fn name() -> InterfaceName<'static> {
        I::name()
    }

    async fn get(
        &self,
        property: &str,
        server: &ObjectServer,
        connection: &Connection,
        header: Option<&Header<'_>>,
        emitter: &SignalEmitter<'_>,
    ) -> Option<Result<OwnedVariant, BoxDBusError>> {
        match allowed(&self.service, header).await {
            Ok(()) => self.inner.get(property, server, connection, header, emitter).await,
            Err(failure) => Some(Err(Box::new(BusError::from(failure)))),
        }
    }

    async fn get_all(
        &self,
        server: &ObjectServer,
        connection: &Connection,
        header: Option<&Header<'_>>,
        emitter: &SignalEmitter<'_>,
    ) -> fdo::Result<HashMap<String, OwnedVariant>> {
        allowed(&self.service, header).await.map_err(|failure| fdo::Error::AccessDenied(failure.message))?;
        self.inner.get_all(server, connection, header, emitter).await
    }

    async fn set_mut(
        &mut self,
        property: &str,
        value: &Variant<'_>,
        server: &ObjectServer,
        connection: &Connection,
        header: Option<&Header<'_>>,
        emitter: &SignalEmitter<'_>,
    ) -> Option<Result<(), BoxDBusError>> {
        self.inner.set_mut(property, value, server, connection, header, emitter).await
    }

    fn call<'call>(
        &'call self,
        server: &'call ObjectServer,
        connection: &'call Connection,
        message: &'call Message,
        name: MemberName<'call>,
    ) -> DispatchResult<'call> {
        let call = self.inner.call(server, connection, message, name);
        let DispatchResult::Async(answer) = call else { return call };
        if !self.calls {
            return DispatchResult::Async(answer);
        }
        DispatchResult::Async(Box::pin(async move {
            let refused = allowed(&self.service, Some(&message.header())).await;
            refused.map_err(|failure| Box::new(BusError::from(failure)) as BoxDBusError)?;
            answer.await
        }))
    }

    fn call_mut<'call>(
        &'call mut self,
        server: &'call ObjectServer,
        connection: &'call Connection,
        message: &'call Message,
        name: MemberName<'call>,
    ) -> DispatchResult<'call> {
        self.inner.call_mut(server, connection, message, name)
    }

    fn introspect_to_writer(&self, writer: &mut dyn Write, level: usize) {
        self.inner.introspect_to_writer(writer, level);
    }
}
