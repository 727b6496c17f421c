//! Whatever is asked in whatever order, failing and dying where it likes: a device has one owner, the ledger agrees with the host
//! or a quarantine says why not, and planning twice gives an empty plan.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::wildcard_enum_match_arm)]

use std::collections::BTreeMap;

use manager::ledger::Standing;
use manager::request::{Goal, Request};
use manager::view::{DeviceState, JobState};
use proptest::prelude::*;
use tests::engine::{Daemon, Managed, assign, release};
use tests::simhost::{Death, Errno, Left};
use vfio::{Binding, PciAddress};

const POOL: &str = "[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'\n[policy]\nremove-rescan = true\n";
const GPUS: [&str; 3] = ["0000:1b:00.0", "0000:43:00.0", "0000:9d:00.0"];

#[derive(Clone, Copy, Debug)]
enum Luck {
    Good,
    Fails(usize),
    FailsOn(usize),
    Dies(usize, bool),
}

#[derive(Clone, Copy, Debug)]
enum Deed {
    Apply {
        takes: bool,
        gpus: u8,
        luck: Luck,
    },
    Restart,
    ClearAll,
    /// A device of the pool is reset, or one in quarantine found again; it may not answer after a reset.
    Clean {
        gpu: usize,
        silent: bool,
        luck: Luck,
    },
}

fn luck() -> impl Strategy<Value = Luck> {
    prop_oneof![
        3 => Just(Luck::Good),
        2 => (1..12usize).prop_map(Luck::Fails),
        1 => (1..12usize).prop_map(Luck::FailsOn),
        2 => (1..12usize, any::<bool>()).prop_map(|(nth, after)| Luck::Dies(nth, after)),
    ]
}

fn deeds() -> impl Strategy<Value = Vec<Deed>> {
    let apply = (any::<bool>(), 1..8u8, luck()).prop_map(|(takes, gpus, luck)| Deed::Apply { takes, gpus, luck });
    let clean = (0..3usize, any::<bool>(), luck()).prop_map(|(gpu, silent, luck)| Deed::Clean { gpu, silent, luck });
    prop::collection::vec(prop_oneof![8 => apply, 3 => clean, 1 => Just(Deed::Restart), 1 => Just(Deed::ClearAll)], 1..14)
}

fn devices(gpus: u8) -> Vec<PciAddress> {
    let chosen = GPUS.iter().enumerate().filter(|(index, _)| gpus & (1 << index) != 0);
    chosen.map(|(_, address)| address.parse().unwrap()).collect()
}

/// Binding, `power/control` and `d3cold_allowed`.
type Had = (Binding, Option<String>, Option<String>);

fn has(managed: &Managed, device: PciAddress) -> Option<Had> {
    let host = managed.sim.host();
    let read = |name| host.read(vfio::attribute(device, name)).unwrap();
    Some((Binding::read(&host, device).unwrap()?, read("power/control"), read("d3cold_allowed")))
}

fn answers(managed: &Managed, device: PciAddress) -> bool {
    let config = managed.sim.host().read_bytes(vfio::attribute(device, "config"), 2).unwrap();
    config == Some(vec![0xde, 0x10])
}

struct Play {
    managed: Managed,
    daemon: Daemon,
    originals: BTreeMap<PciAddress, Had>,
}

impl Play {
    fn start() -> Self {
        let managed = Managed::new("dgx-h100", POOL).unwrap();
        managed.sim.set(vfio::attribute(devices(1)[0], "power/control"), "auto").unwrap();
        let originals = devices(7).into_iter().map(|device| (device, has(&managed, device).unwrap())).collect();
        let daemon = managed.start().unwrap();
        daemon.ready();
        Self { managed, daemon, originals }
    }

    fn restart(self) -> Self {
        self.daemon.stop();
        let managed = self.managed.restart();
        let daemon = managed.start().unwrap();
        daemon.ready();
        Self { managed, daemon, originals: self.originals }
    }

    fn act(mut self, deed: Deed) -> Self {
        match deed {
            Deed::Restart => self = self.restart(),
            Deed::ClearAll => self.clear_all(),
            Deed::Clean { gpu, silent, luck } => self = self.clean((gpu, silent), luck),
            Deed::Apply { takes, gpus, luck } => {
                let goal: fn(PciAddress) -> Goal = if takes { assign } else { release };
                let goals: Vec<_> = devices(gpus).into_iter().map(goal).collect();
                self.try_luck(luck);
                let job = self.daemon.apply(&goals);
                let died = matches!(luck, Luck::Dies(..)) && job.is_ok_and(|job| job.state == JobState::RollbackFailed);
                if died {
                    self = self.restart();
                }
                self.managed.sim.kernel.calm();
            }
        }
        self
    }

    fn clean(self, (gpu, silent): (usize, bool), luck: Luck) -> Self {
        let device = GPUS[gpu].parse().unwrap();
        self.managed.sim.after_reset(GPUS[gpu], if silent { Left::Silent } else { Left::Whole }).unwrap();
        self.try_luck(luck);
        let submitted = self.daemon.submit(Request::Reset(device)).or_else(|_| self.daemon.submit(Request::Recover(device)));
        let ended = submitted.map(|job| self.daemon.finish(job).state);
        let died = matches!(luck, Luck::Dies(..)) && ended == Ok(JobState::RollbackFailed);
        self.managed.sim.kernel.calm();
        self.managed.sim.after_reset(GPUS[gpu], Left::Whole).unwrap();
        if died { self.restart() } else { self }
    }

    fn try_luck(&self, luck: Luck) {
        let kernel = &self.managed.sim.kernel;
        kernel.calm();
        match luck {
            Luck::Good => {}
            Luck::Fails(nth) => kernel.fail_at(nth, Errno::IO),
            Luck::FailsOn(nth) => kernel.fail_from(nth, Errno::IO),
            Luck::Dies(nth, after) => kernel.die_at(nth, if after { Death::After } else { Death::Before }),
        }
    }

    // What was half done is for the person who clears: here they give the device back.
    fn clear_all(&self) {
        for device in devices(7) {
            if let Ok(job) = self.daemon.submit(Request::ClearQuarantine(device)) {
                // One that does not answer stays; one that has left is forgotten, until the bus is looked at again.
                self.daemon.finish(job);
                if self.daemon.view().devices.get(&device).is_some_and(|device| device.state != DeviceState::Quarantined) {
                    assert_eq!(self.daemon.apply(&[release(device)]).unwrap().state, JobState::Done);
                }
            }
        }
    }

    fn check(&self) {
        let view = self.daemon.view();
        let ledger = self.managed.ledger().unwrap();
        for device in devices(7) {
            // Taken off the bus, and not found again yet.
            let Some(now) = has(&self.managed, device) else {
                let state = view.devices.get(&device).map(|device| device.state);
                assert!(matches!(state, None | Some(DeviceState::Quarantined)), "{device} is {state:?}");
                continue;
            };
            let record = ledger.devices.get(&device);
            let state = view.devices[&device].state;
            match state {
                DeviceState::Free => {
                    assert!(answers(&self.managed, device), "{device} is free and does not answer");
                    assert_eq!(now, (Binding::overridden("vfio-pci"), Some("on".into()), Some("0".into())));
                    assert_eq!(record.unwrap().standing, Standing::Active);
                    assert_eq!(record.unwrap().original.binding, self.originals[&device].0, "what it had before is never forgotten");
                }
                DeviceState::Host => {
                    assert_eq!(now, self.originals[&device]);
                    assert_eq!(record, None);
                }
                DeviceState::Quarantined => assert!(ledger.quarantines.contains_key(&device)),
                other => panic!("{device} is {other:?}"),
            }
            if matches!(state, DeviceState::Free | DeviceState::Host) {
                let again = if state == DeviceState::Free { assign(device) } else { release(device) };
                assert_eq!(self.daemon.plan(&[again]).unwrap().steps, [], "a second plan is empty");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ledger_and_host_agree_whatever_happens(deeds in deeds()) {
        let mut play = Play::start();
        for deed in deeds {
            play = play.act(deed);
            play.check();
        }
        play.daemon.stop();
    }
}
