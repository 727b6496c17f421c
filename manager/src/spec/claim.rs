//! A claim's specification out of a tree of values.

use super::machine::{LARGEST, uuid_of, wishes};
use super::node::{Table, invalid};
use super::{ClaimSpec, Node};
use crate::failure::Failure;
use crate::id::TenantId;
use crate::ledger::ReleaseOn;

const RELEASE: &[(&str, ReleaseOn)] =
    &[("manual", ReleaseOn::Manual), ("domain-stopped", ReleaseOn::DomainStopped), ("client-gone", ReleaseOn::ClientGone)];

impl ClaimSpec {
    /// Takes a specification out of a tree; `Manager.Claim` gives every key.
    ///
    /// # Errors
    /// `InvalidSpec` with the full path of the first key that is wrong, missing or unknown.
    pub fn parse(node: Node) -> Result<Self, Failure> {
        if node.size() > LARGEST {
            return Err(invalid(format!("the specification has more than {} KiB", LARGEST >> 10)));
        }
        let mut table = Table::new(String::new(), node)?;
        let spec = Self {
            tenant: table.text("tenant")?.unwrap_or_else(|| TenantId::BUILT_IN_NAME.into()),
            devices: wishes(&mut table, "devices")?,
            domain: uuid_of(&mut table, "domain-uuid")?.ok_or_else(|| table.missing("domain-uuid"))?,
            release: table.word("release", RELEASE)?,
            ttl: table.number("ttl")?.unwrap_or(0),
        };
        if spec.devices.is_empty() {
            return Err(table.missing("devices"));
        }
        table.finish().map(|()| spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::ErrorKind;

    const DOMAIN: &str = "domain-uuid = '6b2f5c1e-2f6a-4d55-9f0e-5c7f3f3f0001'\n";

    fn parse(text: &str) -> Result<ClaimSpec, Failure> {
        ClaimSpec::parse(Node::from_toml(text).unwrap())
    }

    #[test]
    fn a_claim_is_manual_and_without_an_end_unless_it_says_so() {
        let spec = parse(&format!("{DOMAIN}devices = [{{ kind = 'gpu', count = 2 }}]")).unwrap();
        assert_eq!((spec.tenant.as_str(), spec.release, spec.ttl), ("default", ReleaseOn::Manual, 0));
        assert_eq!(spec.devices[0].count, 2);
        let spec = parse(&format!("{DOMAIN}devices = [{{ kind = 'vf' }}]\nrelease = 'client-gone'\nttl = 60")).unwrap();
        assert_eq!((spec.release, spec.ttl), (ReleaseOn::ClientGone, 60));
    }

    #[test]
    fn what_is_wrong_is_named_by_its_path() {
        let cases = [
            ("devices = [{ kind = 'gpu' }]".to_owned(), "domain-uuid is missing"),
            (DOMAIN.to_owned(), "devices is missing"),
            (format!("{DOMAIN}devices = [{{ kindd = 'gpu' }}]"), "devices[0].kind is missing"),
            (
                format!("{DOMAIN}devices = [{{ kind = 'gpu' }}]\nrelease = 'never'"),
                "release is \"never\"; it takes manual, domain-stopped, client-gone",
            ),
            (format!("{DOMAIN}devices = [{{ kind = 'gpu' }}]\nttl = -1"), "ttl is -1; it takes 0 to 4294967295"),
            (format!("{DOMAIN}devices = [{{ kind = 'gpu' }}]\ncolour = 'red'"), "colour is no key of a specification"),
        ];
        for (text, message) in cases {
            let failure = parse(&text).unwrap_err();
            assert_eq!((failure.kind, failure.message.as_str()), (ErrorKind::InvalidSpec, message));
        }
    }
}
