//! What a domain of ours carries, so that it is recognised: which machine it is, and with which claims of which epochs.

use std::collections::BTreeMap;

use xml_templates::{BadText, Claim, NAMESPACE, Text};

use crate::id::{ClaimId, MachineId, TenantId};

/// Our metadata in a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// Which machine it is.
    pub machine: MachineId,
    /// Whose.
    pub tenant: TenantId,
    /// Its claims with their epochs.
    pub claims: BTreeMap<ClaimId, u64>,
    /// The caller's name for the request that started it; empty where none was given.
    pub request: String,
}

impl Metadata {
    /// Reads it from a domain's XML; `None` where there is none of ours.
    pub fn read(xml: &str) -> Option<Self> {
        let document = roxmltree::Document::parse(xml).ok()?;
        let ours = |name: &'static str| move |node: &roxmltree::Node<'_, '_>| node.has_tag_name((NAMESPACE, name));
        let machine = document.descendants().find(ours("machine"))?;
        let claims = machine.descendants().filter(ours("claim")).map(|claim| {
            let id = claim.attribute("id")?.parse().ok()?;
            Some((id, claim.attribute("epoch")?.parse().ok()?))
        });
        Some(Self {
            machine: machine.attribute("uuid")?.parse().ok()?,
            tenant: machine.attribute("tenant")?.parse().ok()?,
            claims: claims.collect::<Option<_>>()?,
            request: machine.attribute("request-id").unwrap_or_default().to_owned(),
        })
    }

    /// As the domain's template takes it.
    pub(super) fn to_domain(&self) -> Result<xml_templates::Metadata, BadText> {
        let claims = self.claims.iter().map(|(id, epoch)| Ok(Claim { id: Text::new(id.to_string())?, epoch: *epoch }));
        Ok(xml_templates::Metadata {
            tenant: Text::new(self.tenant.to_string())?,
            request_id: Text::new(&*self.request)?,
            claims: claims.collect::<Result<_, _>>()?,
        })
    }
}
