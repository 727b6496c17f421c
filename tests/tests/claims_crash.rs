//! Every store of a claim of a bundle on demand, and of its release, fails once, and the daemon dies before and after each: the
//! bundle is the host's, the claim's, or in quarantine with the reason; never between, and never two owners'.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::wildcard_enum_match_arm, clippy::print_stdout)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use manager::request::Request;
use manager::spec::{ClaimSpec, Node};
use manager::view::{DeviceState, JobState, JobView, View};
use tests::engine::{Daemon, Managed, release};
use tests::simhost::{Death, Errno};
use vfio::PciAddress;

const ON_DEMAND: &str = "[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'on-demand'\n";

/// What the kernel answers where a driver is not there or in the way, or the hardware is; `crash.rs` has more of the same stores.
const ERRNOS: [Errno; 3] = [Errno::NODEV, Errno::BUSY, Errno::IO];

struct Case {
    managed: Managed,
    device: PciAddress,
    on_host: BTreeMap<PathBuf, String>,
    /// Of a claim, and of its release.
    stores: [usize; 2],
}

fn start(managed: &Managed) -> Daemon {
    let daemon = managed.start().unwrap();
    daemon.ready();
    daemon
}

impl Case {
    fn new(host: &str, device: &str) -> Self {
        let managed = Managed::new(host, ON_DEMAND).unwrap();
        let device = device.parse().unwrap();
        let daemon = start(&managed);
        for function in &daemon.view().devices[&device].bundle {
            managed.sim.set(format!("sys/bus/pci/devices/{function}/power/control"), "auto").unwrap();
        }
        let mut case = Self { on_host: managed.sim.snapshot(), managed, device, stores: [0; 2] };
        for index in [0, 1] {
            case.managed.sim.kernel.calm();
            let job = case.ask(&daemon, index);
            assert_eq!(job.state, JobState::Done, "{:?}", job.error);
            case.stores[index] = case.managed.sim.kernel.stored().len();
        }
        case.is_as_before(&daemon, "a claim and its release leave the host as before");
        daemon.stop();
        case
    }

    /// Claims the device (0), or releases its claim (1).
    fn ask(&self, daemon: &Daemon, index: usize) -> JobView {
        let text =
            format!("domain-uuid = '6b2f5c1e-2f6a-4d55-9f0e-5c7f3f3f0001'\ndevices = [{{ kind = 'gpu', identity = '{}' }}]", self.device);
        let request = match index {
            0 => Request::Claim {
                tenant: manager::id::TenantId::BUILT_IN,
                spec: ClaimSpec::parse(Node::from_toml(&text).unwrap()).unwrap(),
                client: String::new(),
            },
            _ => {
                let view = daemon.view();
                let (claim, record) = view.claims.iter().next().unwrap();
                Request::ReleaseClaim { claim: *claim, epoch: record.epoch }
            }
        };
        daemon.finish(daemon.submit(request).unwrap())
    }

    /// Has the device where the request with this index begins.
    fn prepare(&self, daemon: &Daemon, index: usize) {
        self.managed.sim.kernel.calm();
        if index == 1 {
            assert_eq!(self.ask(daemon, 0).state, JobState::Done);
        }
        self.managed.sim.kernel.calm();
    }

    fn is_as_before(&self, daemon: &Daemon, what: &str) {
        let view = daemon.view();
        assert_eq!(view.devices[&self.device].state, DeviceState::Host, "{what}: {}", view.devices[&self.device].reason);
        assert!(self.managed.sim.snapshot() == self.on_host, "{what}: the host differs");
        let ledger = self.managed.ledger().unwrap();
        assert!(ledger.devices.is_empty() && ledger.claims.is_empty() && ledger.quarantines.is_empty(), "{what}: {ledger:?}");
    }

    /// A person clears what is in quarantine and releases what is in the pool.
    fn bring_back(&self, daemon: &Daemon) {
        self.managed.sim.kernel.calm();
        if daemon.view().devices[&self.device].state == DeviceState::Quarantined {
            let clear = daemon.finish(daemon.submit(Request::ClearQuarantine(self.device)).unwrap());
            assert_eq!(clear.state, JobState::Done, "{:?}", clear.error);
        }
        if daemon.view().devices[&self.device].state == DeviceState::Free {
            assert_eq!(daemon.apply(&[release(self.device)]).unwrap().state, JobState::Done);
        }
        self.is_as_before(daemon, "brought back for the next try");
    }

    fn every_store_fails(&self, index: usize, what: &str) {
        let daemon = start(&self.managed);
        let mut ends = BTreeMap::new();
        for nth in 1..=self.stores[index] {
            for errno in ERRNOS {
                self.prepare(&daemon, index);
                self.managed.sim.kernel.fail_at(nth, errno);
                let job = self.ask(&daemon, index);
                let try_ = format!("{what}: store {nth} answers {errno:?}");
                self.managed.sim.kernel.calm();
                let state = daemon.view().devices[&self.device].state;
                *ends.entry(format!("{state:?}")).or_insert(0) += 1;
                match (index, job.state, state) {
                    (0, JobState::Done, DeviceState::Claimed) => assert_eq!(self.ask(&daemon, 1).state, JobState::Done),
                    (0, JobState::Failed, DeviceState::Host) => self.is_as_before(&daemon, &try_),
                    (1, JobState::Done, DeviceState::Host | DeviceState::Free | DeviceState::Quarantined) => {
                        assert!(daemon.view().claims.is_empty(), "{try_}");
                    }
                    other => panic!("{try_}: {other:?}, {:?}", job.error),
                }
                self.bring_back(&daemon);
            }
        }
        println!("{what}: {} stores, each failed with {} errnos: {ends:?}", self.stores[index], ERRNOS.len());
        daemon.stop();
    }

    fn dies_at_every_store(mut self, index: usize, what: &str) -> Self {
        let mut recoveries = 0;
        for nth in 1..=self.stores[index] {
            for death in [Death::Before, Death::After] {
                let daemon = start(&self.managed);
                self.prepare(&daemon, index);
                self.managed.sim.kernel.die_at(nth, death);
                assert_eq!(self.ask(&daemon, index).state, JobState::RollbackFailed, "it died");
                daemon.stop();
                self.managed = self.managed.restart();
                let daemon = start(&self.managed);
                daemon.until(|view: &View| view.claims.is_empty() && view.jobs.values().all(|job| job.state.is_over()));
                self.is_as_before(&daemon, &format!("{what}: died {death:?} store {nth}"));
                daemon.stop();
                recoveries += 1;
            }
        }
        println!("{what}: {} stores, died before and after each: {recoveries} recoveries, all as before", self.stores[index]);
        self
    }
}

fn all(host: &str, device: &str) {
    let mut case = Case::new(host, device);
    for (index, word) in ["claim", "release of a claim"].into_iter().enumerate() {
        let what = format!("{host} {device} {word}");
        case.every_store_fails(index, &what);
        case = case.dies_at_every_store(index, &what);
    }
}

#[test]
fn p6_p68_a_claimed_gpu_of_the_dgx_is_never_between() {
    all("dgx-h100", "0000:1b:00.0");
}

#[test]
fn p6_p68_a_claimed_card_with_companions_is_never_between() {
    all("workstation", "0000:02:00.0");
}
