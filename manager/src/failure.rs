//! Why something was not done: a closed set of names, each with what a person needs to go on.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A refusal or failure as users meet it: on the bus, in job results and in the command.
///
/// The text says what could not be done and to what; `why` what was found; `remedy` what to do next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Its name on the bus, below `org.gpuward1.Error.`.
    pub kind: ErrorKind,
    /// What could not be done, to what, and why, in one sentence.
    pub message: String,
    /// What was found, one fact a line; at most 4 KiB in all.
    pub why: Vec<String>,
    /// What a person can do next; empty where nothing is known.
    pub remedy: String,
}

impl Failure {
    /// A failure without evidence or remedy beyond its sentence.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), why: Vec::new(), remedy: String::new() }
    }

    /// Adds one line of evidence.
    #[must_use]
    pub fn because(mut self, fact: impl Into<String>) -> Self {
        self.why.push(fact.into());
        self
    }

    /// Sets what to do next.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }

    /// An error with its chain of sources, as a failure of `kind`.
    pub fn of(kind: ErrorKind, error: &dyn std::error::Error) -> Self {
        let mut failure = Self::new(kind, error.to_string());
        let mut source = error.source();
        while let Some(error) = source {
            failure.why.push(error.to_string());
            source = error.source();
        }
        failure
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        for fact in &self.why {
            write!(f, "\n  why    {fact}")?;
        }
        if !self.remedy.is_empty() {
            write!(f, "\n  remedy {}", self.remedy)?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// The error names of `org.gpuward1.Error.`: a closed set within version 1 of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[allow(missing_docs)] // each name is documented in docs/dbus-api.md
pub enum ErrorKind {
    NotAuthorized,
    InvalidSpec,
    UnknownOption,
    NoSuchDevice,
    NoSuchTenant,
    NoSuchMachine,
    NameTaken,
    Held,
    GroupShared,
    NotViable,
    AlreadyClaimed,
    QuotaExceeded,
    LevelRefused,
    NoFit,
    Conflict,
    Stuck,
    Quarantined,
    PreflightFailed,
    HypervisorFailed,
    Busy,
    TooMany,
    NotSupported,
    HostNotReady,
    DeadlineExceeded,
    Canceled,
    Internal,
}

impl ErrorKind {
    /// Whether the request was refused before anything was touched, rather than tried and failed.
    pub fn is_refusal(self) -> bool {
        match self {
            Self::Stuck | Self::HypervisorFailed | Self::DeadlineExceeded | Self::Canceled | Self::Internal => false,
            Self::NotAuthorized
            | Self::InvalidSpec
            | Self::UnknownOption
            | Self::NoSuchDevice
            | Self::NoSuchTenant
            | Self::NoSuchMachine
            | Self::NameTaken
            | Self::Held
            | Self::GroupShared
            | Self::NotViable
            | Self::AlreadyClaimed
            | Self::QuotaExceeded
            | Self::LevelRefused
            | Self::NoFit
            | Self::Conflict
            | Self::Quarantined
            | Self::PreflightFailed
            | Self::Busy
            | Self::TooMany
            | Self::NotSupported
            | Self::HostNotReady => true,
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
