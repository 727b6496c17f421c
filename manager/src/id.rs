//! Identifiers of what gpuward keeps, and the last element of their object paths.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A job's number. Never reused, also over restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct JobId(pub u64);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub Uuid);

        impl $name {
            /// A new random one.
            pub fn random() -> Self {
                Self(Uuid::new_v4())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0.simple())
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, uuid::Error> {
                Ok(Self(Uuid::parse_str(text.strip_prefix($prefix).unwrap_or(text))?))
            }
        }
    };
}

uuid_id!(
    /// A claim: `c` and 32 hexadecimal digits.
    ClaimId, "c"
);
uuid_id!(
    /// A machine: `m` and 32 hexadecimal digits. Also the UUID of its libvirt domain.
    MachineId, "m"
);
uuid_id!(
    /// A tenant: `t` and 32 hexadecimal digits.
    TenantId, "t"
);

impl TenantId {
    /// The one tenant that exists until tenants can be made: everything of the host's administrator belongs to it.
    pub const BUILT_IN: Self = Self(Uuid::nil());
    /// The built-in tenant's name.
    pub const BUILT_IN_NAME: &'static str = "default";
}
