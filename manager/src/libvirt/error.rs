//! How calls to libvirt fail.

use std::io;
use std::time::Duration;

use virt::error::{Error, ErrorNumber};

use crate::failure::{ErrorKind, Failure};

/// Why a call to libvirt has no result.
#[derive(Debug, thiserror::Error)]
pub enum LibvirtError {
    /// There is no connection.
    #[error("libvirt at {uri} cannot be reached")]
    NotConnected {
        /// Where it was looked for.
        uri: String,
        /// What the last attempt said.
        reason: String,
    },
    /// libvirt answered with an error.
    #[error("libvirt refused to {call}")]
    Refused {
        /// What was asked.
        call: &'static str,
        /// Its answer.
        #[source]
        source: Error,
    },
    /// libvirt did not answer in time; what was asked may still happen.
    #[error("libvirt has not answered {call} for {} s", within.as_secs())]
    NoAnswer {
        /// What was asked.
        call: &'static str,
        /// How long it had.
        within: Duration,
    },
    /// No thread for the call.
    #[error("cannot start a thread to {call}")]
    NoThread {
        /// What was to be asked.
        call: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The call ended without an answer.
    #[error("the thread of {call} panicked")]
    Panicked {
        /// What was asked.
        call: &'static str,
    },
}

impl LibvirtError {
    /// Whether libvirt says that it knows no such domain.
    pub fn is_no_domain(&self) -> bool {
        match self {
            Self::Refused { source, .. } => is_no_domain(source),
            Self::NotConnected { .. } | Self::NoAnswer { .. } | Self::NoThread { .. } | Self::Panicked { .. } => false,
        }
    }

    /// Whether libvirt answered at all: if not, nothing is known of what was asked about.
    pub fn is_answer(&self) -> bool {
        match self {
            Self::Refused { .. } => true,
            Self::NotConnected { .. } | Self::NoAnswer { .. } | Self::NoThread { .. } | Self::Panicked { .. } => false,
        }
    }
}

/// Whether `error` says that libvirt knows no such domain.
pub(super) fn is_no_domain(error: &Error) -> bool {
    error.code() == ErrorNumber::NoDomain.into()
}

impl From<LibvirtError> for Failure {
    fn from(error: LibvirtError) -> Self {
        let text = error.to_string();
        match error {
            LibvirtError::NotConnected { reason, .. } => Self::new(ErrorKind::HypervisorFailed, text)
                .because(reason)
                .remedy("start it (`systemctl start libvirtd.socket`, or `virtqemud.socket` where libvirt is split) and ask again"),
            LibvirtError::Refused { source, .. } => Self::new(ErrorKind::HypervisorFailed, text).because(source.message()),
            LibvirtError::NoAnswer { .. } => Self::new(ErrorKind::DeadlineExceeded, text).remedy(
                "what was asked may still happen; look at `journalctl -u libvirtd` (or virtqemud), and restart it if it hangs: guests run on",
            ),
            LibvirtError::NoThread { source, .. } => Self::new(ErrorKind::Internal, text).because(source.to_string()),
            LibvirtError::Panicked { .. } => Self::new(ErrorKind::Internal, text),
        }
    }
}
