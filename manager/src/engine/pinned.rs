//! What is kept from the host's drivers at boot: written for the next one, and looked at after this one.

use std::path::Path;
use std::time::Instant;

use vfio::{Binding, Change, Deadlines, Function, Host, Inventory, attribute};

use super::worker::Worker;
use super::{Engine, carry};
use crate::failure::{ErrorKind, Failure};
use crate::history::{self, Entry, Kind};
use crate::ledger::Ledger;
use crate::machine::held_by;
use crate::pins::{self, Pin};

impl Engine {
    /// Has what the ledger owns kept at the next boot. Without it a boot only takes longer, so nothing waits for it or fails by it.
    pub(super) fn pin(&mut self) {
        // Before recovery begins, devices of the ledger may sit elsewhere; without a configuration nobody knows what may be used.
        if self.ledger_fault.is_some() || self.config_fault.is_some() || self.recovery.is_none() {
            return;
        }
        let wanted = pins::text(&pins::of(&self.ledger, &self.config, &self.inventory));
        let state_dir = &self.options.state_dir;
        let are = self.pins.take().or_else(|| pins::load(state_dir).ok());
        if are.as_ref() != Some(&wanted)
            && let Err(error) = pins::save(state_dir, &wanted)
        {
            tracing::warn!("the next boot keeps what the last one kept: {}", Failure::of(ErrorKind::Internal, &error));
            self.pins = are;
            return;
        }
        self.pins = Some(wanted);
    }
}

/// Gives back what this boot kept although it is not ours: an initramfs has an older copy of the pins, and another card of the same model may
/// sit in the slot. Touches only what is as the script left it, and what nobody holds.
pub(super) fn give_back_strays(worker: &Worker, ledger: &Ledger) {
    let run_dir = &worker.options.run_dir;
    let noted = match pins::noted(run_dir) {
        Ok(noted) if noted.is_empty() => return,
        Ok(noted) => noted,
        Err(error) => return tracing::warn!("cannot read what this boot has kept: {error}"),
    };
    let inventory = Inventory::observe(worker.host(), 0);
    let is_stray = |function: &&Function| {
        let is_ours = ledger.record_of(function).is_some() || ledger.quarantines.contains_key(&function.address);
        !is_ours && noted.iter().any(|pin| is_as_left(function, pin))
    };
    for function in inventory.devices.values().filter(is_stray) {
        give_back(worker, function);
    }
    if let Err(error) = pins::forget_noted(run_dir) {
        tracing::warn!("cannot forget what this boot has kept: {error}");
    }
}

fn is_as_left(function: &Function, pin: &Pin) -> bool {
    let driver = Some(&pin.driver);
    pin.names(&function.identity)
        && function.driver_override.as_ref() == driver
        && (function.driver.is_none() || function.driver.as_ref() == driver)
}

fn give_back(worker: &Worker, function: &Function) {
    let (device, host) = (function.address, worker.host());
    let why = "it was kept at boot by an old copy of the pins";
    if let Some(held) = held_by(host, std::slice::from_ref(function)) {
        return tracing::warn!("{device} is left as it is: {why}, and {held}");
    }
    let free = Change::Binding { device, from: function.binding(), to: Binding::default() };
    let text = match free.make(host, worker.deadlines()).map(|()| probe(host, function, worker.deadlines())) {
        Ok(driver) => format!("given back to {}: {why}", driver.as_deref().unwrap_or("no driver")),
        Err(error) => {
            let failure = Failure::of(ErrorKind::Internal, &error);
            return tracing::error!("{device} is not the host's again, though {why}: {}", carry::one_line(&failure));
        }
    };
    tracing::warn!("{device} is {text}");
    history::append(&worker.options.state_dir, &function.identity, Entry::new(Kind::Released, text).with("address", device));
}

// Which driver is the host's the kernel knows. One that does not come is no failure: its module may not be loaded yet.
fn probe(host: &Host, function: &Function, deadlines: &Deadlines) -> Option<String> {
    let probed = host.store(Path::new("sys/bus/pci/drivers_probe"), &function.address.to_string(), Instant::now() + deadlines.bind);
    if let Err(error) = probed {
        tracing::warn!("{}: {}", function.address, Failure::of(ErrorKind::Internal, &error));
    }
    host.link_name(attribute(function.address, "driver")).ok().flatten()
}
