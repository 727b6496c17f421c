//! Who claims a function's BARs, by `/proc/iomem`.
//!
//! The file nests by indentation; a line below a function's own line is somebody who asked the kernel for that region. Without
//! CAP_SYS_ADMIN the addresses are zeros, the nesting and the names are still there (`kernel/resource.c`, `r_show`).

use std::collections::BTreeMap;

use crate::PciAddress;

/// The names below each function's own regions, sorted, without repeats.
pub(crate) fn claimants(text: &str) -> BTreeMap<PciAddress, Vec<String>> {
    let mut found: BTreeMap<PciAddress, Vec<String>> = BTreeMap::new();
    let mut owner: Option<(usize, PciAddress)> = None;
    for line in text.lines() {
        let depth = line.len() - line.trim_start_matches(' ').len();
        let Some((_, name)) = line.split_once(" : ") else { continue };
        owner = owner.filter(|(owned, _)| *owned < depth);
        if let Ok(address) = name.parse() {
            owner = Some((depth, address));
        } else if let Some((_, address)) = owner {
            found.entry(address).or_default().push(name.to_owned());
        }
    }
    for names in found.values_mut() {
        names.sort();
        names.dedup();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_below_a_function_are_its_claimants() {
        let text = "00000000-00000fff : Reserved\n\
            d0000000-e1ffffff : PCI Bus 0000:01\n  d0000000-dfffffff : 0000:01:00.0\n    d0000000-d02fffff : BOOTFB\n      d0000000-d02fffff : efifb\n\
            \u{20} e0000000-e0ffffff : 0000:01:00.0\n    e0000000-e0ffffff : nvidia\n  e1000000-e1003fff : 0000:01:00.1\n    e1000000-e1003fff : ICH HD audio\n\
            fec00000-fec003ff : IOAPIC 0\n";
        let found = claimants(text);
        assert_eq!(found[&"0000:01:00.0".parse().unwrap()], ["BOOTFB", "efifb", "nvidia"]);
        assert_eq!(found[&"0000:01:00.1".parse().unwrap()], ["ICH HD audio"]);
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn garbage_claims_nothing() {
        assert!(claimants("\u{0}\n : \n  x : y\n").is_empty());
    }
}
