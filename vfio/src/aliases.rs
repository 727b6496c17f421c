//! Which VFIO driver fits a function best, by `modules.alias`.
//!
//! Variant drivers are listed as `alias vfio_pci:v…`; of those that match, the one with the fewest wildcards wins, else
//! `vfio-pci` (kernel commit cc6711b0, "vfio/pci: Override-only ids").

use crate::{Host, HostError};

/// The lines `alias vfio_pci:<pattern> <module>` of the running kernel's `modules.alias`.
#[derive(Debug, Default)]
pub(crate) struct VfioAliases(Vec<(String, String)>);

impl VfioAliases {
    pub(crate) fn read(host: &Host) -> Result<Self, HostError> {
        let Some(release) = host.read("proc/sys/kernel/osrelease")?.filter(|release| !release.contains('/')) else {
            return Ok(Self::default());
        };
        let text = host.read(format!("lib/modules/{release}/modules.alias"))?;
        Ok(Self::parse(text.as_deref().unwrap_or_default()))
    }

    fn parse(text: &str) -> Self {
        let alias = |line: &str| {
            let mut words = line.strip_prefix("alias vfio_pci:")?.split_whitespace();
            let (pattern, module) = (words.next()?, words.next()?);
            // The name becomes part of a path.
            (!module.contains('/')).then(|| (pattern.to_owned(), module.to_owned()))
        };
        Self(text.lines().filter_map(alias).collect())
    }

    /// The module for a function with this `modalias` (`pci:v000010DEd00002330sv…`).
    pub(crate) fn module(&self, modalias: &str) -> Option<&str> {
        let wanted = modalias.strip_prefix("pci:")?;
        let wildcards = |pattern: &str| pattern.bytes().filter(|byte| *byte == b'*').count();
        let fitting = self.0.iter().filter(|(pattern, _)| matches(pattern, wanted));
        fitting.min_by_key(|(pattern, _)| wildcards(pattern)).map(|(_, module)| module.as_str())
    }
}

/// The directory name of `module`'s driver: modules have underscores where drivers may have dashes.
pub(crate) fn driver_of(host: &Host, module: &str) -> String {
    let candidates = [module.to_owned(), module.replace('_', "-")];
    let present = candidates.iter().find(|name| host.exists(format!("sys/bus/pci/drivers/{name}")));
    present.unwrap_or(&candidates[0]).clone()
}

// Shell matching with `*` alone: the other wildcards do not occur in PCI aliases.
fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
    let mut parts = parts.peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALIASES: &str = "alias pci:v000010DEd*sv*sd*bc03sc02i* nvidia\n\
        alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci\n\
        alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci\n\
        alias vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_vfio_pci\n";

    #[test]
    fn the_match_with_the_fewest_wildcards_wins() {
        let aliases = VfioAliases::parse(ALIASES);
        let module = |modalias| aliases.module(modalias);
        assert_eq!(module("pci:v000010DEd00002342sv000010DEsd000016EBbc03sc02i00"), Some("nvgrace_gpu_vfio_pci"));
        assert_eq!(module("pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00"), Some("vfio_pci"));
        assert_eq!(module("garbage"), None);
    }

    #[test]
    fn a_module_whose_name_is_a_path_is_none() {
        assert_eq!(VfioAliases::parse("alias vfio_pci:v* ../../../etc/passwd\n").module("pci:v1"), None);
    }

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, text, fits) in [
            ("a*c", "abc", true),
            ("a*c", "ab", false),
            ("*", "", true),
            ("abc", "abc", true),
            ("abc", "abcd", false),
            ("a*b*c", "aXbYc", true),
            ("a*aa", "aa", false),
        ] {
            assert_eq!(matches(pattern, text), fits, "{pattern} {text}");
        }
    }
}
