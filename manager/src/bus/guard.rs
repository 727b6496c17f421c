//! Reading is for those who may see an object: one check before any property of any object, and before the list of objects.
//!
//! What is a tenant's is seen by those who see everything and by its owners. To anybody else it looks as if it were not there, whatever
//! is asked of it: existence is not told.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;

use async_trait::async_trait;
use zbus::fdo::ObjectManager;
use zbus::message::{Header, Message};
use zbus::names::{InterfaceName, MemberName};
use zbus::object_server::{DispatchResult, Interface, SignalEmitter};
use zbus::{BoxDBusError, Connection, ObjectServer, OwnedVariant, Variant, fdo};

use super::authority::{Action, Who, not_yours};
use super::device::{Device, Sriov, VirtualFunction};
use super::error::{BusError, no_object};
use super::group::IommuGroup;
use super::manager::Manager;
use super::service::Service;
use crate::failure::Failure;
use crate::id::TenantId;
use crate::view::View;

/// Whose an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Belongs {
    /// The host's: seen by those who see everything.
    ToHost,
    /// A tenant's (`None`: one that is not known, or of none), and whoever started it where it is a job.
    ToTenant(Option<TenantId>, Option<u32>),
}

impl Belongs {
    /// Whether it is this caller's own.
    pub(super) fn is_own(self, view: &View, who: &Who) -> bool {
        match self {
            Self::ToHost => false,
            Self::ToTenant(tenant, uid) => uid == Some(who.uid) || tenant.is_some_and(|tenant| view.is_owner(tenant, who.uid, &who.groups)),
        }
    }
}

/// An object that is somebody's.
pub(super) trait Owned {
    /// Whose it is.
    fn belongs(&self, _view: &View) -> Belongs {
        Belongs::ToHost
    }
}

impl Owned for ObjectManager {}
impl Owned for Manager {}
impl Owned for Device {}
impl Owned for Sriov {}
impl Owned for VirtualFunction {}
impl Owned for IommuGroup {}

/// An interface whose properties only those read who may see the object.
///
/// The daemon's own reads, for signals, come without a message and are not asked about: the bus gives signals only to those
/// who see everything.
pub(super) struct Guarded<I> {
    pub(super) inner: I,
    service: Arc<Service>,
    /// Whether calls of the host's methods are guarded too; else each method asks for itself.
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

/// Why a caller does not get an answer.
enum Refused {
    /// The object is the host's.
    NotYours(Failure),
    /// The object is a tenant's: there is none for this caller.
    NoObject(fdo::Error),
}

impl Refused {
    fn into_error(self) -> BoxDBusError {
        match self {
            Self::NotYours(failure) => Box::new(BusError::from(failure)),
            Self::NoObject(error) => Box::new(error),
        }
    }
}

// Not polkit, which may wait for a person: properties are read under the object server's lock.
async fn allowed(service: &Service, belongs: Belongs, header: Option<&Header<'_>>) -> Result<(), Refused> {
    let Some(header) = header else { return Ok(()) };
    let who = service.authority.who(header).await.map_err(Refused::NotYours)?;
    if who.sees_everything || belongs.is_own(&service.view(), &who) {
        return Ok(());
    }
    match belongs {
        Belongs::ToHost => Err(Refused::NotYours(not_yours())),
        Belongs::ToTenant(..) => Err(Refused::NoObject(no_object(Some(header)))),
    }
}

// Whoever may not see a tenant's object may not call its methods either; polkit may let them see it.
async fn may_call(service: &Service, belongs: Belongs, header: &Header<'_>) -> Result<(), Refused> {
    let refused = match allowed(service, belongs, Some(header)).await {
        Err(Refused::NoObject(error)) => error,
        seen => return seen,
    };
    match service.check(header, Action::Inspect, "object").await {
        Ok(_) => Ok(()),
        Err(_) => Err(Refused::NoObject(refused)),
    }
}

fn unknown_method(name: &MemberName<'_>) -> BoxDBusError {
    Box::new(fdo::Error::UnknownMethod(format!("Unknown method '{name}'")))
}

#[async_trait]
impl<I: Interface + Owned> Interface for Guarded<I> {
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
        let belongs = self.inner.belongs(&self.service.view());
        match allowed(&self.service, belongs, header).await {
            Ok(()) => self.inner.get(property, server, connection, header, emitter).await,
            Err(refused) => Some(Err(refused.into_error())),
        }
    }

    async fn get_all(
        &self,
        server: &ObjectServer,
        connection: &Connection,
        header: Option<&Header<'_>>,
        emitter: &SignalEmitter<'_>,
    ) -> fdo::Result<HashMap<String, OwnedVariant>> {
        let belongs = self.inner.belongs(&self.service.view());
        allowed(&self.service, belongs, header).await.map_err(|refused| match refused {
            Refused::NotYours(failure) => fdo::Error::AccessDenied(failure.message),
            Refused::NoObject(error) => error,
        })?;
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
        let belongs = self.inner.belongs(&self.service.view());
        let answer = match self.inner.call(server, connection, message, name.clone()) {
            DispatchResult::Async(answer) => answer,
            // Else a misspelt method would tell of an object.
            DispatchResult::NotFound if belongs != Belongs::ToHost => Box::pin(async move { Err(unknown_method(&name)) }),
            other @ (DispatchResult::NotFound | DispatchResult::RequiresMut) => return other,
        };
        if belongs == Belongs::ToHost && !self.calls {
            return DispatchResult::Async(answer);
        }
        DispatchResult::Async(Box::pin(async move {
            match may_call(&self.service, belongs, &message.header()).await {
                Ok(()) => answer.await,
                Err(refused) => Err(refused.into_error()),
            }
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
