//! The attributes of one function, read by name; what could not be read is kept with its reason.

use std::fs;

use crate::config_space::ConfigSpace;
use crate::observe::DEVICES;
use crate::{Bar, Host, HostError, PciAddress, Power};

pub(crate) struct Attributes<'a> {
    host: &'a Host,
    dir: String,
    problems: Vec<String>,
}

/// Whole configuration space of a PCIe function.
const CONFIG_SPACE: u64 = 4096;

impl<'a> Attributes<'a> {
    pub(crate) fn new(host: &'a Host, address: PciAddress) -> Self {
        Self { host, dir: format!("{DEVICES}/{address}"), problems: Vec::new() }
    }

    fn file(&self, name: &str) -> String {
        format!("{}/{name}", self.dir)
    }

    fn noted<T>(&mut self, name: &str, read: Result<Option<T>, HostError>) -> Option<T> {
        read.unwrap_or_else(|error| {
            self.problems.push(format!("{name}: {}", error.kind()));
            None
        })
    }

    pub(crate) fn text(&mut self, name: &str) -> Option<String> {
        let read = self.host.read(self.file(name));
        self.noted(name, read)
    }

    /// An attribute that is read under the device's lock, and whether that lock was not to be had.
    pub(crate) fn locked(&mut self, name: &str) -> (Option<String>, bool) {
        let read = self.host.read_locked(self.file(name));
        let locked = read.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
        (self.noted(name, read), locked)
    }

    fn number<T>(&mut self, name: &str, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        let text = self.text(name)?;
        let number = parse(text.trim());
        if number.is_none() {
            self.problems.push(format!("{name}: {:?} is no number", text.chars().take(32).collect::<String>()));
        }
        number
    }

    /// `0x10de`.
    pub(crate) fn hex(&mut self, name: &str) -> Option<u64> {
        self.number(name, |text| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok())
    }

    /// A 16-bit id, 0 where it cannot be read.
    pub(crate) fn id(&mut self, name: &str) -> u16 {
        self.hex(name).and_then(|value| u16::try_from(value).ok()).unwrap_or_default()
    }

    pub(crate) fn decimal(&mut self, name: &str) -> Option<i64> {
        self.number(name, |text| text.parse().ok())
    }

    pub(crate) fn words(&mut self, name: &str) -> Vec<String> {
        self.text(name).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
    }

    pub(crate) fn link(&mut self, name: &str) -> Option<String> {
        let read = self.host.link_name(self.file(name));
        self.noted(name, read)
    }

    pub(crate) fn exists(&self, name: &str) -> bool {
        self.host.exists(self.file(name))
    }

    /// The first entry of the directory `name`, as `name/entry`.
    pub(crate) fn entry_of(&mut self, name: &str) -> Option<String> {
        let read = self.host.entries(self.file(name));
        let entries = self.noted(name, read)?;
        entries.first().map(|entry| format!("{name}/{entry}"))
    }

    /// Where the link in `sys/bus/pci/devices` points; empty where a captured tree has a directory instead.
    pub(crate) fn path(&self) -> String {
        fs::read_link(self.host.path(&self.dir)).map(|path| path.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Configuration space, unless reading it would wake a function that has no power.
    pub(crate) fn config(&mut self, power: &Power) -> Option<ConfigSpace> {
        if power.state.as_deref() == Some("D3cold") {
            self.problems.push("config: the function is in D3cold".to_owned());
            return None;
        }
        let read = self.host.read_bytes(self.file("config"), CONFIG_SPACE);
        self.noted("config", read).map(ConfigSpace::new)
    }

    /// BARs 0 to 5 and the expansion ROM, of `resource` (three 64-bit numbers a line: start, end, flags).
    pub(crate) fn bars(&mut self) -> Vec<Bar> {
        let text = self.text("resource").unwrap_or_default();
        text.lines().take(7).zip(0..).filter_map(|(line, index)| bar(line, index)).collect()
    }

    pub(crate) fn into_problems(self) -> Vec<String> {
        self.problems
    }
}

// Flags: include/linux/ioport.h.
const IORESOURCE_IO: u64 = 0x100;
const IORESOURCE_MEM: u64 = 0x200;
const IORESOURCE_PREFETCH: u64 = 0x2000;
const IORESOURCE_MEM_64: u64 = 0x0010_0000;

fn bar(line: &str, index: u8) -> Option<Bar> {
    let mut numbers = line.split_whitespace().map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
    let (base, end, flags) = (numbers.next()??, numbers.next()??, numbers.next()??);
    let memory = flags & IORESOURCE_MEM != 0;
    if flags & (IORESOURCE_IO | IORESOURCE_MEM) == 0 || end < base {
        return None;
    }
    let size = (end - base).checked_add(1)?;
    Some(Bar { index, base, size, memory, wide: flags & IORESOURCE_MEM_64 != 0, prefetchable: flags & IORESOURCE_PREFETCH != 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_64_bit_prefetchable_bar_is_read() {
        let line = "0x0000039800000000 0x0000039fffffffff 0x000000000014220c";
        let expected = Bar { index: 2, base: 0x398_0000_0000, size: 32 << 30, memory: true, wide: true, prefetchable: true };
        assert_eq!(bar(line, 2), Some(expected));
    }

    #[test]
    fn an_empty_or_garbled_line_is_no_bar() {
        for line in [
            "0x0000000000000000 0x0000000000000000 0x0000000000000000",
            "",
            "0x1",
            "a b c",
            "0x2 0x1 0x200",
            "0x0 0xffffffffffffffff 0x200",
        ] {
            assert_eq!(bar(line, 0), None, "{line}");
        }
    }
}
