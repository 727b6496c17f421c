//! Resetting a function, and looking whether it came back: steps in order, each with what was seen and how long it took.
//!
//! A function that sleeps is woken before its configuration space is read. Every wait is bounded by [`Deadlines`].

use std::thread;
use std::time::{Duration, Instant};

use super::{Method, NoReset, Way, for_guests, way};
use crate::{Bar, Deadlines, Function, Host, HostError, Kind, PciAddress, StoreError, attribute};

/// One step and what came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What was done (`wake`, `method`, `reset`, `answers`, `regions`, `link`, `errors`).
    pub name: &'static str,
    /// What was seen, or why it failed.
    pub result: String,
    /// How long it took.
    pub took: Duration,
}

/// What was done to a function, and whether it is sound.
#[derive(Debug)]
pub struct Report {
    /// In order; the last one is the one that failed.
    pub steps: Vec<Step>,
    /// Whether it came back.
    pub outcome: Result<(), ResetError>,
}

/// Why a function is not clean.
#[derive(Debug, thiserror::Error)]
pub enum ResetError {
    /// There is no right way to do it.
    #[error("cannot be reset")]
    NoMethod(#[source] NoReset),
    /// It does not wake.
    #[error("does not wake: it is in {state}")]
    Asleep {
        /// `power_state`.
        state: String,
    },
    /// The kernel refused, or has not answered.
    #[error("could not be reset")]
    Store(#[source] StoreError),
    /// The kernel took the list of methods and shows another.
    #[error("reset_method was set to {wanted:?} and is {found:?}")]
    Method {
        /// What it was to be.
        wanted: String,
        /// What it is.
        found: String,
    },
    /// Its configuration space is not its own, or reads as ones.
    #[error("does not answer: configuration space begins with {found}")]
    Silent {
        /// Ids and class as read.
        found: String,
    },
    /// A region is not where the kernel put it.
    #[error("has lost region {index}: it is at {found:#x}, the kernel put it at {expected:#x}")]
    Region {
        /// 0 to 5.
        index: u8,
        /// The address in its register.
        found: u64,
        /// The address by `resource`.
        expected: u64,
    },
    /// An attribute is not there, or cannot be read.
    #[error("cannot be looked at")]
    Unreadable(#[source] HostError),
    /// It has no configuration space.
    #[error("has no configuration space to read")]
    NoConfig,
}

impl ResetError {
    /// Whether a store has not returned: its effect may still come.
    pub fn is_stuck(&self) -> bool {
        matches!(self, Self::Store(StoreError::Stuck { .. }))
    }
}

/// Resets a function by the best way there is, and looks whether it came back. Companions without a way of their own are only looked
/// at: they are reset with their GPU, or hold nothing.
///
/// The function has to be ours with all of its `bundle`: on a VFIO driver, and held by nobody. The GPU goes before its companions.
pub fn reset(host: &Host, deadlines: &Deadlines, (function, bundle): (&Function, &[PciAddress])) -> Report {
    let mut run = Run { host, deadlines, function, steps: Vec::new() };
    let outcome = run.reset(bundle);
    Report { steps: run.steps, outcome }
}

/// Looks whether a function is sound, as after a reset. One that VFIO has is woken for it.
pub fn check(host: &Host, deadlines: &Deadlines, function: &Function) -> Report {
    let mut run = Run { host, deadlines, function, steps: Vec::new() };
    let outcome = run.check(&[]);
    Report { steps: run.steps, outcome }
}

/// Whether a function is sound as it is: looked at once, nothing stored and nobody woken.
///
/// # Errors
/// What is wrong with it.
pub fn look(host: &Host, deadlines: &Deadlines, function: &Function) -> Result<(), ResetError> {
    answers(host, function)?;
    Run { host, deadlines, function, steps: Vec::new() }.regions(&[]).map(drop)
}

/// Whether a function's configuration space is its own. One that has fallen off the bus reads as ones (P32); the ids of a virtual
/// function do so always (PCIe 9.3.4.1), its class not.
///
/// # Errors
/// What is there instead.
fn answers(host: &Host, function: &Function) -> Result<(), ResetError> {
    let config = host.read_bytes(attribute(function.address, "config"), 12).map_err(ResetError::Unreadable)?;
    let Some([v0, v1, d0, d1, _, _, _, _, _, c0, c1, c2]) = config.as_deref() else { return Err(ResetError::NoConfig) };
    let ids = (u16::from_le_bytes([*v0, *v1]), u16::from_le_bytes([*d0, *d1]));
    let class = u32::from_le_bytes([*c0, *c1, *c2, 0]);
    let ids_agree = ids == (function.ids.vendor, function.ids.device) || function.physical_function.is_some();
    if ids_agree && class == function.class {
        return Ok(());
    }
    Err(ResetError::Silent { found: format!("{:04x}{:04x}, class {class:06x}", ids.1, ids.0) })
}

struct Run<'a> {
    host: &'a Host,
    deadlines: &'a Deadlines,
    function: &'a Function,
    steps: Vec<Step>,
}

impl Run<'_> {
    fn step<T>(&mut self, name: &'static str, work: impl FnOnce(&Self) -> Result<(T, String), ResetError>) -> Result<T, ResetError> {
        let begun = Instant::now();
        let done = work(self);
        let result = match &done {
            Ok((_, seen)) => seen.clone(),
            Err(error) => said(error),
        };
        self.steps.push(Step { name, result, took: begun.elapsed() });
        done.map(|(value, _)| value)
    }

    fn reset(&mut self, bundle: &[PciAddress]) -> Result<(), ResetError> {
        let way = match way(self.function, bundle) {
            // A companion has its GPU's bus reset with it, or holds nothing.
            Ok(Way::Bus { .. }) if self.function.kind == Kind::Companion => return self.check_only("with its GPU, or not at all".into()),
            Ok(way) => way,
            Err(none) if self.function.kind == Kind::Companion => return self.check_only(format!("not by itself: {none}")),
            Err(none) => return self.step("method", |_| Err(ResetError::NoMethod(none))),
        };
        self.step("wake", Self::wake)?;
        let before = self.step("before", |run| Ok((run.registers()?, run.condition())))?;
        self.step("method", |run| run.allow(&way))?;
        self.step("reset", |run| run.store_reset(&way))?;
        self.check(&before)
    }

    fn check_only(&mut self, told: String) -> Result<(), ResetError> {
        self.step("reset", |_| Ok(((), told)))?;
        self.check(&[])
    }

    fn store_reset(&self, way: &Way) -> Result<((), String), ResetError> {
        match way {
            Way::Own(methods) => {
                self.store("reset", "1")?;
                Ok(((), methods.first().map(Method::to_string).unwrap_or_default()))
            }
            Way::Bus { bridge } => {
                self.store_at(*bridge, "reset_subordinate", "1")?;
                Ok(((), way.to_string()))
            }
        }
    }

    fn check(&mut self, before: &[(u8, u64)]) -> Result<(), ResetError> {
        if self.function.is_on_vfio() {
            self.step("wake", Self::wake)?;
        }
        let until = Instant::now() + self.deadlines.settle;
        self.step("answers", |run| run.until(until, || answers(run.host, run.function).map(|()| ((), "as itself".into()))))?;
        self.step("regions", |run| run.until(until, || run.regions(before)))?;
        self.step("after", |run| Ok(((), run.condition())))
    }

    fn read(&self, name: &str) -> Result<Option<String>, ResetError> {
        self.host.read(attribute(self.function.address, name)).map_err(ResetError::Unreadable)
    }

    fn store(&self, name: &str, value: &str) -> Result<(), ResetError> {
        self.store_at(self.function.address, name, value)
    }

    fn store_at(&self, function: PciAddress, name: &str, value: &str) -> Result<(), ResetError> {
        let attribute = attribute(function, name);
        self.host.store(&attribute, value, Instant::now() + self.deadlines.of(&attribute)).map_err(ResetError::Store)
    }

    /// Tries until it succeeds or the time has come.
    fn until<T>(&self, until: Instant, work: impl Fn() -> Result<T, ResetError>) -> Result<T, ResetError> {
        loop {
            match work() {
                Err(_) if Instant::now() < until => thread::sleep(Duration::from_millis(5)),
                done => return done,
            }
        }
    }

    // `on` wakes it and forbids it to sleep (`pm_runtime_forbid`); reading a sleeping one's configuration space would show ones.
    fn wake(&self) -> Result<((), String), ResetError> {
        if self.read("power/control")?.is_some_and(|control| control != "on") {
            self.store("power/control", "on")?;
        }
        self.until(Instant::now() + self.deadlines.wake, || match self.read("power_state")? {
            Some(state) if state != "D0" && state != "unknown" => Err(ResetError::Asleep { state }),
            Some(state) => Ok(((), state)),
            None => Ok(((), "not told".into())),
        })
    }

    // The kernel takes the next method where one does not apply: what must not be used has to be off the list.
    fn allow(&self, way: &Way) -> Result<((), String), ResetError> {
        if let Some(wanted) = for_guests(self.function) {
            self.store("reset_method", if wanted.is_empty() { "\n" } else { &wanted })?;
            let found = self.read("reset_method")?.unwrap_or_default();
            if found != wanted {
                return Err(ResetError::Method { wanted, found });
            }
        }
        Ok(((), way.to_string()))
    }

    fn registers(&self) -> Result<Vec<(u8, u64)>, ResetError> {
        let config = self.host.read_bytes(attribute(self.function.address, "config"), 64).map_err(ResetError::Unreadable)?;
        let config = config.ok_or(ResetError::NoConfig)?;
        Ok(self.function.bars.iter().filter_map(|bar| Some((bar.index, register(&config, bar)?))).collect())
    }

    // A virtual function has no registers for its regions: they lie in the capability of its physical one. Where a host bridge shifts
    // addresses, registers never were what `resource` says: then they have to be what they were before.
    fn regions(&self, before: &[(u8, u64)]) -> Result<((), String), ResetError> {
        if self.function.physical_function.is_some() {
            return Ok(((), "of its physical function".into()));
        }
        let now = self.registers()?;
        for bar in self.function.bars.iter().filter(|bar| bar.base != 0) {
            let of = |registers: &[(u8, u64)]| registers.iter().find(|(index, _)| *index == bar.index).map(|(_, base)| *base);
            let Some(found) = of(&now) else { continue };
            if found != bar.base && (found == 0 || of(before) != Some(found)) {
                return Err(ResetError::Region { index: bar.index, found, expected: bar.base });
            }
        }
        Ok(((), format!("{} in place", now.len())))
    }

    // For a person: neither decides. A link may train slower for a while, and errors are counted during a reset.
    fn condition(&self) -> String {
        let text = |name: &str| self.read(name).ok().flatten();
        let link = text("current_link_speed").zip(text("current_link_width")).map(|(speed, width)| format!("link {speed} x{width}"));
        let count = |name: &str| {
            let total = text(&format!("aer_dev_{name}"))?
                .lines()
                .find_map(|line| line.strip_prefix("TOTAL_ERR_")?.split_once(' ')?.1.parse::<u64>().ok())?;
            Some(format!("{total} {name} errors"))
        };
        let errors = ["correctable", "nonfatal", "fatal"].into_iter().filter_map(count);
        link.into_iter().chain(errors).collect::<Vec<_>>().join(", ")
    }
}

/// The address in the register of a region, flags masked; `None` for the expansion ROM, which the kernel need not place.
fn register(config: &[u8], bar: &Bar) -> Option<u64> {
    let at = 0x10 + 4 * usize::from(bar.index);
    let word = |at: usize| Some(u64::from(u32::from_le_bytes(config.get(at..at + 4)?.try_into().ok()?)));
    let low = (bar.index < 6).then(|| word(at))?? & if bar.memory { !0xf } else { !0x3 };
    if bar.wide { Some(low | word(at + 4)? << 32) } else { Some(low) }
}

fn said(error: &ResetError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_a_region_is_read_without_its_flags() {
        let mut config = vec![0; 64];
        config[0x10..0x14].copy_from_slice(&0xe000_0001_u32.to_le_bytes());
        config[0x18..0x1c].copy_from_slice(&0x0000_000c_u32.to_le_bytes());
        config[0x1c..0x20].copy_from_slice(&0x0000_0398_u32.to_le_bytes());
        let bar = |index, memory, wide| Bar { index, base: 0, size: 0, memory, wide, prefetchable: false };
        assert_eq!(register(&config, &bar(0, false, false)), Some(0xe000_0000));
        assert_eq!(register(&config, &bar(2, true, true)), Some(0x398_0000_0000));
        assert_eq!(register(&config, &bar(6, true, false)), None);
        assert_eq!(register(&[0; 16], &bar(0, true, false)), None, "a short space has no registers");
    }
}
