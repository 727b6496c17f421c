//! Why the command ends without having done what it was told, and with which exit status.

use std::io;
use std::iter;
use std::process::ExitCode;

use serde::Serialize;

use super::output::{Output, safe};
use crate::client::CallError;
use crate::failure::{ErrorKind, Failure};

const FAILED: u8 = 1;
const WRONG: u8 = 2;
const REFUSED: u8 = 3;
const NOT_AUTHORISED: u8 = 4;
const ABSENT: u8 = 5;

/// Why the command ends early.
#[derive(Debug)]
pub(super) enum Stop {
    /// The service, or a captured tree, answered with a failure.
    Failed(Box<Failure>),
    /// The service could not be asked.
    Call(CallError),
    /// What was typed, or a file that was named, cannot be used.
    Wrong(String),
    /// Something on this machine failed.
    Local(String),
    /// What was asked for has been said, and it is bad.
    Said,
    /// The refusals have been said.
    Refused,
    /// The reader of standard output has gone, or it cannot be written.
    Output(io::Error),
}

impl From<CallError> for Stop {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Answered(failure) => Self::Failed(failure),
            CallError::Absent(_) | CallError::NoObject(_) | CallError::Broken(_) => Self::Call(error),
        }
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// A failure as `--json` prints it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    error: Detail,
    exit_status: u8,
}

/// A failure, of the service or of this command.
#[derive(Debug, Serialize)]
struct Detail {
    /// `None` where the service did not answer.
    kind: Option<ErrorKind>,
    message: String,
    why: Vec<String>,
    remedy: String,
}

impl Stop {
    /// The same, or `failure` where the service says that there is no such object.
    pub(super) fn of_missing_object(self, failure: impl FnOnce() -> Failure) -> Self {
        if matches!(self, Self::Call(CallError::NoObject(_))) { Self::Failed(Box::new(failure())) } else { self }
    }

    /// Says why on standard error (with `--json` also on standard output) and gives the exit status.
    pub(super) fn report(self, output: &mut Output) -> ExitCode {
        let report = match self {
            Self::Said => return FAILED.into(),
            Self::Refused => return REFUSED.into(),
            // A reader that has seen enough (`| head`) is no failure.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => return ExitCode::SUCCESS,
            Self::Output(error) => Report::local(FAILED, format!("cannot write to standard output: {error}")),
            Self::Local(message) => Report::local(FAILED, message),
            Self::Wrong(message) => Report::local(WRONG, message),
            Self::Failed(failure) => Report::of(*failure),
            Self::Call(error) => Report::of_call(&error),
        };
        eprintln!("{}", report.text());
        if output.is_json() && output.json(&report).is_err() {
            return FAILED.into();
        }
        report.exit_status.into()
    }
}

impl Report {
    fn local(exit_status: u8, message: String) -> Self {
        Self { error: Detail { kind: None, message, why: Vec::new(), remedy: String::new() }, exit_status }
    }

    fn of(failure: Failure) -> Self {
        let refused = if failure.kind.is_refusal() { REFUSED } else { FAILED };
        let exit_status = if failure.kind == ErrorKind::NotAuthorized { NOT_AUTHORISED } else { refused };
        let Failure { kind, message, why, remedy } = failure;
        Self { error: Detail { kind: Some(kind), message, why, remedy }, exit_status }
    }

    fn of_call(error: &CallError) -> Self {
        let why = iter::successors(std::error::Error::source(error), |error| error.source()).map(ToString::to_string).collect();
        let (exit_status, remedy) = match error {
            CallError::Absent(_) => (
                ABSENT,
                "start it (`systemctl start gpuwardd`), name its bus (--bus ADDRESS), or read a captured tree (`gpuward list --root DIR`)",
            ),
            CallError::Answered(_) | CallError::NoObject(_) | CallError::Broken(_) => (FAILED, ""),
        };
        Self { error: Detail { kind: None, message: error.to_string(), why, remedy: remedy.into() }, exit_status }
    }

    fn text(&self) -> String {
        let how = match self.exit_status {
            REFUSED => "refused",
            NOT_AUTHORISED => "not authorised",
            FAILED => "failed",
            _ => "gpuward",
        };
        let mut text = format!("{how}: {}", indented(&self.error.message));
        for fact in &self.error.why {
            text += &format!("\n  why    {}", indented(fact));
        }
        if !self.error.remedy.is_empty() {
            text += &format!("\n  remedy {}", indented(&self.error.remedy));
        }
        text
    }
}

/// Says a failure on standard error as it would end the command.
pub(super) fn explain(failure: Failure) {
    eprintln!("{}", Report::of(failure).text());
}

// A text of several lines stays one, with its lines below each other.
fn indented(text: &str) -> String {
    text.lines().map(safe).collect::<Vec<_>>().join("\n         ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_to_end_has_its_exit_status() {
        let cases = [
            (ErrorKind::NotAuthorized, NOT_AUTHORISED),
            (ErrorKind::GroupShared, REFUSED),
            (ErrorKind::InvalidSpec, REFUSED),
            (ErrorKind::HypervisorFailed, FAILED),
            (ErrorKind::Canceled, FAILED),
        ];
        for (kind, status) in cases {
            assert_eq!(Report::of(Failure::new(kind, "it")).exit_status, status, "{kind}");
        }
    }

    #[test]
    fn a_refusal_says_why_and_what_to_do() {
        let failure = Failure::new(ErrorKind::GroupShared, "0000:01:00.0 shares IOMMU group 1 with 0000:01:00.1 (NVMe)")
            .because("00:01.0 (PCIe port) lacks ACS source validation\u{1b}[0m")
            .remedy("move the NVMe drive to another slot");
        assert_eq!(
            Report::of(failure).text(),
            "refused: 0000:01:00.0 shares IOMMU group 1 with 0000:01:00.1 (NVMe)\n\
             \x20 why    00:01.0 (PCIe port) lacks ACS source validation\\u{1b}[0m\n\
             \x20 remedy move the NVMe drive to another slot"
        );
    }
}
