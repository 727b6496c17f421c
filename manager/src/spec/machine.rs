//! A machine's specification out of a tree of values.

use std::collections::BTreeMap;

use uuid::Uuid;
use vfio::Ids;

use super::node::{Table, invalid, not_supported};
use super::{CpuMode, DirectBoot, Disk, DiskFormat, DiskSource, Firmware, Hold, MachineSpec, Network, NetworkSource, Node, Wish, WishKind};
use crate::failure::{ErrorKind, Failure};
use crate::ledger::Isolation;
use crate::libvirt::HostFacts;

/// The largest specification, in bytes.
pub(super) const LARGEST: usize = 256 << 10;
const MOST_DISKS: usize = 16;
const MOST_NETWORKS: usize = 8;
const MOST_WISHES: usize = 16;
/// The most devices of one wish: what the root ports of one guest bus hold with room for the rest.
const MOST_DEVICES: u32 = 16;
const MOST_LABELS: usize = 64;
const LONGEST_LABEL: usize = 256;
const MIB: u64 = 1 << 20;

impl MachineSpec {
    /// Takes a specification out of a tree; `docs/machine-spec.md` gives every key.
    ///
    /// # Errors
    /// `InvalidSpec` with the full path of the first key that is wrong, missing or unknown; `NotSupported` for what this version
    /// cannot do yet; `LevelRefused` where a wish isolates less than `minimum-isolation`.
    pub fn parse(node: Node) -> Result<Self, Failure> {
        if node.size() > LARGEST {
            return Err(invalid(format!("the specification has more than {} KiB", LARGEST >> 10)));
        }
        let mut table = Table::new(String::new(), node)?;
        format(&mut table)?;
        let uuid = uuid(&mut table)?;
        let direct_boot = table.table("direct-boot")?.map(parse_direct_boot).transpose()?;
        let spec = Self {
            name: name(&mut table, "name")?.ok_or_else(|| table.missing("name"))?,
            uuid,
            vcpus: vcpus(&mut table)?,
            memory: memory(&mut table)?,
            firmware: table.word("firmware", FIRMWARE)?,
            hold: table.word("hold", HOLD)?,
            start_deadline: table.number("start-deadline")?.unwrap_or(0),
            stop_deadline: table.number("stop-deadline")?.unwrap_or(90),
            kill_after_deadline: table.boolean("kill-after-deadline", true)?,
            minimum_isolation: table.word("minimum-isolation", MINIMUM_ISOLATION)?,
            labels: labels(&mut table)?,
            cpu_mode: cpu_mode(&mut table)?,
            disks: disks(&mut table, direct_boot.is_some())?,
            networks: networks(&mut table)?,
            devices: wishes(&mut table, "device")?,
            direct_boot,
        };
        table
            .word("at-host-boot", &[("stay-off", Ok(())), ("start", Err(()))])?
            .map_err(|()| not_supported("at-host-boot = \"start\" is not supported by this version of gpuward"))?;
        table.not_yet("cloud-init")?;
        table.finish()?;
        spec.accepts_its_wishes()?;
        Ok(spec)
    }

    /// The first key that only the host's administrator may use: what it names is opened by libvirt as root.
    pub fn needs_administrator(&self) -> Option<String> {
        let disk = self.disks.iter().position(|disk| matches!(disk.source, DiskSource::Path(_)));
        let network = self.networks.iter().position(|network| matches!(network.source, NetworkSource::Bridge(_)));
        let direct_boot = self.direct_boot.as_ref().map(|_| "direct-boot".to_owned());
        let disk = disk.map(|index| format!("disk[{index}].path"));
        direct_boot.or(disk).or_else(|| network.map(|index| format!("network[{index}].bridge")))
    }

    /// Whether a host can run it at all.
    ///
    /// # Errors
    /// `InvalidSpec` where it wants more processors or memory than the host has.
    pub fn check_fits(&self, host: &HostFacts) -> Result<(), Failure> {
        if self.vcpus > host.cpus {
            return Err(invalid(format!("vcpus is {}; the host has {} processors", self.vcpus, host.cpus)));
        }
        if self.memory > host.memory {
            return Err(invalid(format!("memory is {} MiB; the host has {} MiB", self.memory / MIB, host.memory / MIB)));
        }
        Ok(())
    }

    fn accepts_its_wishes(&self) -> Result<(), Failure> {
        let Some(least) = self.minimum_isolation else { return Ok(()) };
        let Some(wish) = self.devices.iter().position(|wish| wish.kind.isolation() < least) else { return Ok(()) };
        let level = self.devices[wish].kind.isolation();
        let message = format!("device[{wish}] is isolated as {}, which is less than minimum-isolation, {}", level.word(), least.word());
        Err(Failure::new(ErrorKind::LevelRefused, message).remedy("wish for a whole GPU, or accept less isolation"))
    }
}

const FIRMWARE: &[(&str, Firmware)] = &[("uefi", Firmware::Uefi), ("uefi-secure", Firmware::UefiSecure), ("bios", Firmware::Bios)];
const HOLD: &[(&str, Hold)] = &[("running", Hold::Running), ("defined", Hold::Defined)];
const CPU_MODE: &[(&str, CpuMode)] = &[("host-passthrough", CpuMode::HostPassthrough), ("host-model", CpuMode::HostModel)];
const DISK_FORMAT: &[(&str, DiskFormat)] = &[("raw", DiskFormat::Raw), ("qcow2", DiskFormat::Qcow2)];
// No word: the tenant's.
const MINIMUM_ISOLATION: &[(&str, Option<Isolation>)] =
    &[("", None), ("vf", Some(Isolation::Vf)), ("whole-gpu", Some(Isolation::WholeGpu))];

pub(super) fn format(table: &mut Table) -> Result<(), Failure> {
    match table.number("format")? {
        Some(1) => Ok(()),
        Some(other) => Err(table.invalid("format", format!("is {other}; this version of gpuward reads 1"))),
        None => Err(table.missing("format")),
    }
}

pub(super) fn name(table: &mut Table, key: &'static str) -> Result<Option<String>, Failure> {
    let Some(name) = table.text(key)? else { return Ok(None) };
    let starts = name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    let plain = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    if starts && plain && name.len() <= 63 {
        return Ok(Some(name));
    }
    let shown: String = name.chars().take(64).collect();
    Err(table.invalid(key, format!("is {shown:?}; it takes 1 to 63 of a-z, 0-9 and -, not - first")))
}

fn uuid(table: &mut Table) -> Result<Uuid, Failure> {
    Ok(uuid_of(table, "uuid")?.unwrap_or_else(Uuid::new_v4))
}

pub(super) fn uuid_of(table: &mut Table, key: &'static str) -> Result<Option<Uuid>, Failure> {
    let Some(text) = table.text(key)? else { return Ok(None) };
    match Uuid::parse_str(&text) {
        Ok(uuid) if !uuid.is_nil() => Ok(Some(uuid)),
        Ok(_) => Err(table.invalid(key, "is all zeros, which names nothing")),
        Err(error) => Err(table.invalid(key, format!("is no UUID: {error}"))),
    }
}

fn vcpus(table: &mut Table) -> Result<u32, Failure> {
    match table.number("vcpus")? {
        Some(0) => Err(table.invalid("vcpus", "is 0; a machine has at least 1")),
        Some(vcpus) => Ok(vcpus),
        None => Err(table.missing("vcpus")),
    }
}

fn memory(table: &mut Table) -> Result<u64, Failure> {
    match table.size("memory")? {
        Some(0) => Err(table.invalid("memory", "is 0; a machine has at least 1 MiB")),
        Some(memory) if memory % MIB != 0 => Err(table.invalid("memory", format!("is {memory} bytes; it takes whole MiB"))),
        Some(memory) => Ok(memory),
        None => Err(table.missing("memory")),
    }
}

fn labels(table: &mut Table) -> Result<BTreeMap<String, String>, Failure> {
    let Some(labels) = table.table("labels")? else { return Ok(BTreeMap::new()) };
    let labels = labels.into_texts()?;
    if labels.len() > MOST_LABELS {
        return Err(invalid(format!("labels has {} entries, more than {MOST_LABELS}", labels.len())));
    }
    match labels.iter().find(|(key, value)| key.len().max(value.len()) > LONGEST_LABEL) {
        None => Ok(labels),
        Some((key, _)) => {
            let shown: String = key.chars().take(64).collect();
            Err(invalid(format!("labels.{shown} has more than {LONGEST_LABEL} bytes")))
        }
    }
}

fn cpu_mode(table: &mut Table) -> Result<CpuMode, Failure> {
    let Some(mut cpu) = table.table("cpu")? else { return Ok(CpuMode::HostPassthrough) };
    let mode = cpu.word("mode", CPU_MODE)?;
    cpu.not_yet("numa")?;
    cpu.not_yet("pin")?;
    cpu.not_yet("hugepages")?;
    cpu.finish()?;
    Ok(mode)
}

fn disks(table: &mut Table, boots_directly: bool) -> Result<Vec<Disk>, Failure> {
    let disks: Vec<Disk> = table.tables("disk", MOST_DISKS)?.into_iter().map(disk).collect::<Result<_, _>>()?;
    if disks.is_empty() && !boots_directly {
        return Err(table.missing("disk").remedy("the first disk is the boot disk: volume = \"pool/volume\""));
    }
    Ok(disks)
}

fn disk(mut table: Table) -> Result<Disk, Failure> {
    let source = match (table.text("volume")?, table.text("path")?) {
        (Some(volume), None) => volume_source(&table, &volume)?,
        (None, Some(path)) => DiskSource::Path(absolute(&table, "path", path)?),
        (None, None) => return Err(table.missing("volume")),
        (Some(_), Some(_)) => return Err(table.invalid("path", "and volume exclude each other")),
    };
    let disk = Disk { source, format: table.word("format", DISK_FORMAT)?, readonly: table.boolean("readonly", false)? };
    table.finish()?;
    Ok(disk)
}

fn volume_source(table: &Table, text: &str) -> Result<DiskSource, Failure> {
    match text.split_once('/') {
        Some((pool, volume)) if is_plain_name(pool) && is_plain_name(volume) => {
            Ok(DiskSource::Volume { pool: pool.into(), volume: volume.into() })
        }
        _ => Err(table.invalid("volume", "takes a storage pool and a volume in it, as pool/volume")),
    }
}

fn networks(table: &mut Table) -> Result<Vec<Network>, Failure> {
    table.tables("network", MOST_NETWORKS)?.into_iter().map(network).collect()
}

fn network(mut table: Table) -> Result<Network, Failure> {
    let source = match (table.text("network")?, table.text("bridge")?) {
        (Some(network), None) if is_plain_name(&network) => NetworkSource::Network(network),
        (Some(_), None) => return Err(table.invalid("network", "is no name of a libvirt network")),
        (None, Some(bridge)) if is_interface_name(&bridge) => NetworkSource::Bridge(bridge),
        (None, Some(_)) => return Err(table.invalid("bridge", "is no name of a network interface")),
        (None, None) => return Err(table.missing("network")),
        (Some(_), Some(_)) => return Err(table.invalid("bridge", "and network exclude each other")),
    };
    let mac = match table.text("mac")? {
        None => None,
        Some(mac) if is_unicast_mac(&mac) => Some(mac.to_ascii_lowercase()),
        Some(_) => return Err(table.invalid("mac", "is no unicast MAC address; write it as 52:54:00:12:34:56")),
    };
    table.finish()?;
    Ok(Network { source, mac })
}

pub(super) fn wishes(table: &mut Table, key: &'static str) -> Result<Vec<Wish>, Failure> {
    table.tables(key, MOST_WISHES)?.into_iter().map(wish).collect()
}

fn wish(mut table: Table) -> Result<Wish, Failure> {
    let kind = wish_kind(&mut table)?;
    let count = table.number("count")?.unwrap_or(1);
    if count == 0 || count > MOST_DEVICES {
        return Err(table.invalid("count", format!("is {count}; it takes 1 to {MOST_DEVICES}")));
    }
    let model = match table.text("model")? {
        None => None,
        Some(text) => Some(parse_model(&text).ok_or_else(|| table.invalid("model", "takes vendor:device, as 10de:2330"))?),
    };
    let identity = table.text("identity")?;
    if identity.is_some() && count != 1 {
        return Err(table.invalid("identity", format!("names one device, and count is {count}")));
    }
    let same_numa = table.boolean("same-numa", true)?;
    table.finish()?;
    Ok(Wish { kind, count, model, identity, same_numa })
}

fn wish_kind(table: &mut Table) -> Result<WishKind, Failure> {
    match table.text("kind")?.as_deref() {
        Some("gpu") => Ok(WishKind::Gpu),
        Some("vf") => Ok(WishKind::Vf),
        Some(later @ ("vgpu" | "board")) => {
            Err(not_supported(format!("{} {later:?} is not supported by this version of gpuward", table.path("kind"))))
        }
        Some(other) => Err(table.invalid("kind", format!("is {other:?}; it takes gpu, vf"))),
        None => Err(table.missing("kind")),
    }
}

fn parse_direct_boot(mut table: Table) -> Result<DirectBoot, Failure> {
    let kernel = table.text("kernel")?.ok_or_else(|| table.missing("kernel"))?;
    let kernel = absolute(&table, "kernel", kernel)?;
    let initrd = match table.text("initrd")? {
        None => String::new(),
        Some(initrd) => absolute(&table, "initrd", initrd)?,
    };
    let cmdline = table.text("cmdline")?.unwrap_or_default();
    if cmdline.chars().any(char::is_control) {
        return Err(table.invalid("cmdline", "has control characters"));
    }
    table.finish()?;
    Ok(DirectBoot { kernel, initrd, cmdline })
}

fn parse_model(text: &str) -> Option<Ids> {
    let (vendor, device) = text.split_once(':')?;
    let id = |part: &str| {
        let hex = part.len() == 4 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
        hex.then(|| u16::from_str_radix(part, 16).ok()).flatten()
    };
    Some(Ids { vendor: id(vendor)?, device: id(device)?, ..Ids::default() })
}

fn absolute(table: &Table, key: &str, path: String) -> Result<String, Failure> {
    if path.starts_with('/') && !path.chars().any(char::is_control) {
        return Ok(path);
    }
    Err(table.invalid(key, "takes an absolute path of the host"))
}

pub(super) fn is_plain_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+' | ':' | '@');
    !text.is_empty() && text.len() <= 255 && text.chars().all(plain) && text != "." && text != ".."
}

// 15 bytes: IFNAMSIZ less its NUL.
fn is_interface_name(text: &str) -> bool {
    is_plain_name(text) && text.len() <= 15
}

fn is_unicast_mac(text: &str) -> bool {
    let octets: Vec<&str> = text.split(':').collect();
    let hex = |octet: &&str| octet.len() == 2 && octet.bytes().all(|byte| byte.is_ascii_hexdigit());
    let first = octets.first().and_then(|octet| u8::from_str_radix(octet, 16).ok());
    octets.len() == 6 && octets.iter().all(hex) && first.is_some_and(|octet| octet & 1 == 0)
}

#[cfg(test)]
mod tests;
