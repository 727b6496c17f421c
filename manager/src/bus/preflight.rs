//! `Manager.Preflight`: what it is asked and what it answers.

use super::dict::{Dict, Received, node_of, shortened};
use super::manager::Answer;
use crate::failure::{ErrorKind, Failure};
use crate::preflight::Finding;
use crate::spec::{MachineSpec, Node};

/// What is to be looked at, of a tenant whose caller has been authorised.
pub(super) enum Wanted {
    /// The tenant's machine of this name.
    Machine(String),
    /// One that could be made.
    Spec(Box<MachineSpec>),
}

impl Wanted {
    /// Reads `machine` (s) or `spec` (a{sv}).
    pub(super) fn parse(request: &Received) -> Result<Self, Failure> {
        let known = ["machine", "spec", "tenant"];
        if let Some(key) = request.keys().filter(|key| !known.contains(&key.as_str())).min() {
            let shown = shortened(key);
            return Err(Failure::new(ErrorKind::UnknownOption, format!("there is no option {shown:?} here")));
        }
        let read = |key: &str| request.get(key).map(|value| node_of(value, key)).transpose();
        if !matches!(read("tenant")?, None | Some(Node::Text(_))) {
            return Err(invalid("option \"tenant\" is not a string (s)"));
        }
        match (read("machine")?, read("spec")?) {
            (Some(Node::Text(name)), None) => Ok(Self::Machine(name)),
            (None, Some(spec @ Node::Table(_))) => Ok(Self::Spec(Box::new(MachineSpec::parse(spec)?))),
            (None, None) | (Some(_), Some(_)) => Err(invalid("a pre-flight takes either machine or spec")),
            (Some(_), None) => Err(invalid("option \"machine\" is not a string (s)")),
            (None, Some(_)) => Err(invalid("option \"spec\" is not a specification (a{sv})")),
        }
    }
}

fn invalid(message: &str) -> Failure {
    Failure::new(ErrorKind::InvalidSpec, message)
}

/// A finding on its way out.
pub(super) fn finding(finding: &Finding) -> Answer {
    let mut dict = Dict::new();
    dict.put("code", finding.code).put("severity", finding.severity.word()).put("subject", finding.subject.clone());
    dict.put("message", finding.message.clone()).put("evidence", finding.evidence.clone()).put("remedy", finding.remedy.clone());
    dict.into_map()
}
