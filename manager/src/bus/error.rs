//! Failures as errors of the bus: `org.gpuward1.Error.<kind>` with the body `(s message, a{sv} {why as, remedy s})`.

use zbus::message::{Header, Message};
use zbus::names::ErrorName;
use zbus::{DBusError, fdo};

use super::dict::Dict;
use crate::failure::{ErrorKind, Failure};

/// A failure on its way to a caller.
#[derive(Debug)]
pub struct BusError {
    failure: Failure,
    name: String,
}

/// What the bus answers about a path without an object.
pub(super) fn no_object(call: Option<&Header<'_>>) -> fdo::Error {
    let path = call.and_then(|call| call.path()).map(|path| path.as_str()).unwrap_or_default();
    fdo::Error::UnknownObject(format!("Unknown object '{path}'"))
}

impl From<Failure> for BusError {
    fn from(failure: Failure) -> Self {
        let name = format!("org.gpuward1.Error.{}", failure.kind);
        Self { failure, name }
    }
}

// Sending a signal or an answer failed: the caller has gone, or the bus has.
impl From<zbus::Error> for BusError {
    fn from(error: zbus::Error) -> Self {
        Failure::of(ErrorKind::Internal, &error).into()
    }
}

impl DBusError for BusError {
    fn create_reply(&self, call: &Header<'_>) -> zbus::Result<Message> {
        let mut detail = Dict::new();
        detail.put("why", self.failure.why.clone());
        detail.put("remedy", self.failure.remedy.clone());
        Message::error(call, self.name()).build(&(&self.failure.message, detail.into_map()))
    }

    fn name(&self) -> ErrorName<'_> {
        ErrorName::from_str_unchecked(&self.name)
    }

    fn description(&self) -> Option<&str> {
        Some(&self.failure.message)
    }
}
