//! From text to [`Config`]: pure.

use std::path::Path;

use vfio::{Kind, PciAddress};

use super::keys::{Keys, Source};
use super::{Config, Fault, Match, Rule, Use, slot_path};

/// Adds what `text` says to `config`; gives everything that is wrong with it.
pub(super) fn merge(config: &mut Config, file: &Path, text: &str) -> Vec<Fault> {
    let source = Source::new(file, text);
    if let Some(keys) = source.keys() {
        top_level(config, keys);
    }
    source.into_faults()
}

fn top_level(config: &mut Config, mut keys: Keys<'_>) {
    match keys.count("format").map(|at| at.value) {
        Some(1) => {}
        Some(_) => keys.fault("has a format that this version does not know; it knows format = 1"),
        None => keys.fault("is to say format = 1"),
    }
    if let Some(mut libvirt) = keys.table("libvirt") {
        if let Some(uri) = libvirt.string("uri") {
            config.libvirt.uri = uri.value;
        }
        libvirt.finish();
    }
    for device in keys.tables("devices") {
        config.devices.extend(rule(device));
    }
    if let Some(mut limits) = keys.table("limits") {
        if let Some(count) = limits.count("parallel-bundles") {
            config.limits.parallel_bundles = count.value;
        }
        if let Some(count) = limits.count("jobs-kept") {
            config.limits.jobs_kept = count.value;
        }
        limits.finish();
    }
    if let Some(mut policy) = keys.table("policy") {
        if let Some(units) = policy.strings("pause-units") {
            config.policy.pause_units = units;
        }
        if let Some(flag) = policy.flag("remove-rescan") {
            config.policy.remove_rescan = flag.value;
        }
        policy.finish();
    }
    keys.finish();
}

fn rule(mut keys: Keys<'_>) -> Option<Rule> {
    let matches = keys.table("match").map(matches);
    let word = keys.string("use");
    let to = keys.string("to").map(|at| at.value);
    if matches.is_none() {
        keys.fault("is to have a match");
    }
    let use_ = match (word.as_ref().map(|at| at.value.as_str()), to) {
        (Some("observe"), None) => Some(Use::Observe),
        (Some("pool"), None) => Some(Use::Pool),
        (Some("on-demand"), None) => Some(Use::OnDemand),
        (Some("lend"), Some(to)) => Some(Use::Lend { to }),
        (Some("lend"), None) => fault(&keys, "lends to nobody; say to = \"nova\""),
        (Some("observe" | "pool" | "on-demand"), Some(_)) => fault(&keys, "says to, which only goes with use = \"lend\""),
        (Some(_) | None, _) => fault(&keys, "is to have use = \"observe\", \"pool\", \"on-demand\" or \"lend\""),
    };
    keys.finish();
    Some(Rule { matches: matches?, use_: use_? })
}

fn fault<T>(keys: &Keys<'_>, message: &str) -> Option<T> {
    keys.fault(message);
    None
}

fn matches(mut keys: Keys<'_>) -> Match {
    let id = "four hexadecimal digits";
    let found = Match {
        vendor: keys.parsed("vendor", id, hex16),
        device: keys.parsed("device", id, hex16),
        subsystem: keys.parsed("subsystem", "vendor:device in hexadecimal digits", |text| {
            let (vendor, device) = text.split_once(':')?;
            Some((hex16(vendor)?, hex16(device)?))
        }),
        class: keys.parsed("class", "two, four or six hexadecimal digits", |text| {
            let is_class = matches!(text.len(), 2 | 4 | 6) && is_hex(text);
            is_class.then(|| text.to_ascii_lowercase())
        }),
        kind: keys.parsed("kind", "gpu, virtual-function, switch or companion", kind),
        slot: keys.parsed("slot", "a slot path such as pci0000:40/01.0", |text| {
            (text.starts_with("pci") && !text.ends_with('/')).then(|| slot_path(text))
        }),
        serial: keys.parsed("serial", "up to sixteen hexadecimal digits", |text| {
            let digits = text.replace('-', "");
            is_hex(&digits).then(|| u64::from_str_radix(&digits, 16).ok())?
        }),
        address: keys.parsed("address", "an address such as 0000:41:00.0", |text| text.parse::<PciAddress>().ok()),
    };
    if found == Match::default() {
        keys.fault("matches nothing in particular; a rule for every device is not meant");
    }
    keys.finish();
    found
}

fn kind(word: &str) -> Option<Kind> {
    match word {
        "gpu" => Some(Kind::Gpu),
        "virtual-function" | "vf" => Some(Kind::VirtualFunction),
        "switch" => Some(Kind::Switch),
        "companion" => Some(Kind::Companion),
        _ => None,
    }
}

fn hex16(text: &str) -> Option<u16> {
    (text.len() == 4 && is_hex(text)).then(|| u16::from_str_radix(text, 16).ok())?
}

// `from_str_radix` takes a leading sign, an id has none.
fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
