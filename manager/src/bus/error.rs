//! Failures as errors of the bus: `org.gpuward1.Error.<kind>` with the body `(s message, a{sv} {why as, remedy s})`.

use zbus::DBusError;
use zbus::message::{Header, Message};
use zbus::names::ErrorName;

use super::dict::Dict;
use crate::failure::{ErrorKind, Failure};

/// A failure on its way to a caller.
#[derive(Debug)]
pub struct BusError {
    failure: Failure,
    name: String,
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
