//! Whoever claims, releases, moves, holds, unplugs and dies in whatever order: a device has one owner, libvirt's hook knows which, what
//! somebody holds is not touched, and what is not ours never is.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::wildcard_enum_match_arm)]

use std::collections::{BTreeMap, BTreeSet};

use manager::failure::ErrorKind;
use manager::id::{ClaimId, TenantId};
use manager::ledger::{Standing, store};
use manager::request::Request;
use manager::spec::{ClaimSpec, Node};
use manager::view::{ClaimState, ClaimView, DeviceState, JobState, View};
use proptest::prelude::*;
use tests::engine::{Daemon, Managed, assign, release};
use tests::simhost::{Death, Errno};
use uuid::Uuid;
use vfio::{Binding, Change, Deadlines, PciAddress};

const CONFIG: &str =
    "[[devices]]\nmatch = { address = '0000:9d:00.0' }\nuse = 'on-demand'\n[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'\n";
/// Two of the pool and one on demand.
const GPUS: [&str; 3] = ["0000:1b:00.0", "0000:43:00.0", "0000:9d:00.0"];
/// Somebody else bound it to vfio-pci before gpuward came.
const FOREIGN: &str = "0000:df:00.0";
const DOMAIN: &str = "6b2f5c1e-2f6a-4d55-9f0e-5c7f3f3f0001";

#[derive(Clone, Copy, Debug)]
enum Luck {
    Good,
    Fails(usize),
    Dies(usize, bool),
}

#[derive(Clone, Copy, Debug)]
enum Deed {
    Assign(usize, Luck),
    Release(usize, Luck),
    Claim {
        gpu: usize,
        with_client: bool,
        luck: Luck,
    },
    End {
        gpu: usize,
        late: bool,
        luck: Luck,
    },
    ClientLeaves,
    Hold(usize),
    LetGo(usize),
    /// Somebody gives it back to its own driver behind our back.
    Moves(usize),
    Unplug(usize),
    Clear(usize),
    Restart,
}

fn luck() -> impl Strategy<Value = Luck> {
    prop_oneof![
        4 => Just(Luck::Good),
        1 => (1..8usize).prop_map(Luck::Fails),
        1 => (1..8usize, any::<bool>()).prop_map(|(nth, after)| Luck::Dies(nth, after)),
    ]
}

fn deeds() -> impl Strategy<Value = Vec<Deed>> {
    let gpu = || 0..GPUS.len();
    let deed = prop_oneof![
        4 => (gpu(), luck()).prop_map(|(gpu, luck)| Deed::Assign(gpu, luck)),
        2 => (gpu(), luck()).prop_map(|(gpu, luck)| Deed::Release(gpu, luck)),
        8 => (gpu(), any::<bool>(), luck()).prop_map(|(gpu, with_client, luck)| Deed::Claim { gpu, with_client, luck }),
        5 => (gpu(), prop::bool::weighted(0.2), luck()).prop_map(|(gpu, late, luck)| Deed::End { gpu, late, luck }),
        1 => Just(Deed::ClientLeaves),
        2 => gpu().prop_map(Deed::Hold),
        2 => gpu().prop_map(Deed::LetGo),
        1 => gpu().prop_map(Deed::Moves),
        1 => gpu().prop_map(Deed::Unplug),
        2 => gpu().prop_map(Deed::Clear),
        2 => Just(Deed::Restart),
    ];
    prop::collection::vec(deed, 1..16)
}

fn at(gpu: usize) -> PciAddress {
    GPUS[gpu].parse().unwrap()
}

struct Play {
    managed: Managed,
    daemon: Daemon,
    held: BTreeSet<usize>,
    moved: BTreeSet<usize>,
    unplugged: BTreeSet<usize>,
    epochs: Vec<u64>,
    /// The client has left, and the daemon that was told so still runs.
    left: bool,
}

impl Play {
    fn start() -> Self {
        let managed = Managed::new("dgx-h100", CONFIG).unwrap();
        let bind = Change::Binding { device: FOREIGN.parse().unwrap(), from: Binding::default(), to: Binding::overridden("vfio-pci") };
        bind.make(&managed.sim.host(), &Deadlines::default()).unwrap();
        let daemon = managed.start().unwrap();
        daemon.ready();
        let nobody = BTreeSet::new;
        Self { managed, daemon, held: nobody(), moved: nobody(), unplugged: nobody(), epochs: Vec::new(), left: false }
    }

    fn restart(mut self) -> Self {
        self.daemon.stop();
        self.managed = self.managed.restart();
        self.daemon = self.managed.start().unwrap();
        self.daemon.ready();
        self.left = false;
        self
    }

    fn claim_on(&self, gpu: usize) -> Option<(ClaimId, u64)> {
        let view = self.daemon.view();
        view.claims.iter().find(|(_, claim)| claim.devices.contains(&at(gpu))).map(|(id, claim)| (*id, claim.epoch))
    }

    fn act(mut self, deed: Deed) -> Self {
        self.managed.sim.kernel.calm();
        match deed {
            Deed::Assign(gpu, luck) => self = self.ask(Request::Apply { goals: vec![assign(at(gpu))], plan_digest: None }, luck),
            Deed::Release(gpu, luck) => self = self.ask(Request::Apply { goals: vec![release(at(gpu))], plan_digest: None }, luck),
            Deed::Claim { gpu, with_client, luck } => self = self.ask(claim(gpu, with_client), luck),
            Deed::End { gpu, late, luck } => {
                if let Some((claim, epoch)) = self.claim_on(gpu) {
                    self = if late { self.late(claim, epoch) } else { self.ask(Request::ReleaseClaim { claim, epoch }, luck) };
                }
            }
            Deed::ClientLeaves => {
                self.daemon.engine().client_left("client".into());
                self.left = true;
            }
            Deed::Hold(gpu) => self.hold(gpu),
            Deed::LetGo(gpu) if self.held.remove(&gpu) => self.managed.sim.end_process(pid(gpu)).unwrap(),
            Deed::Moves(gpu) if !self.held.contains(&gpu) && !self.unplugged.contains(&gpu) => self.give_back_behind_our_back(gpu),
            Deed::Unplug(gpu) if self.held.is_empty() && self.unplugged.is_empty() => {
                self.managed.sim.unplug(GPUS[gpu]).unwrap();
                self.unplugged.insert(gpu);
                self = self.ask(Request::Rescan, Luck::Good);
            }
            Deed::Clear(gpu) => self = self.ask(Request::ClearQuarantine(at(gpu)), Luck::Good),
            Deed::Restart => self = self.restart(),
            Deed::LetGo(_) | Deed::Moves(_) | Deed::Unplug(_) => {}
        }
        self.settle();
        self
    }

    fn ask(mut self, request: Request, luck: Luck) -> Self {
        let kernel = &self.managed.sim.kernel;
        match luck {
            Luck::Good => {}
            Luck::Fails(nth) => kernel.fail_at(nth, Errno::IO),
            Luck::Dies(nth, after) => kernel.die_at(nth, if after { Death::After } else { Death::Before }),
        }
        // A refusal is an answer too.
        let ended = self.daemon.submit(request).map(|job| self.daemon.finish(job));
        let made = ended.as_ref().map(|job| job.claims.clone()).unwrap_or_default();
        self.epochs.extend(made.iter().filter_map(|id| Some(self.daemon.view().claims.get(id)?.epoch)));
        if matches!(luck, Luck::Dies(..)) {
            self.untouched();
            self = self.restart();
        }
        self
    }

    fn late(self, claim: ClaimId, epoch: u64) -> Self {
        let older = self.epochs.iter().copied().find(|older| *older != epoch).unwrap_or(epoch + 1);
        let refused = self.daemon.submit(Request::ReleaseClaim { claim, epoch: older }).unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Conflict, "P41: {refused}");
        assert!(self.managed.sim.kernel.stored().is_empty());
        self
    }

    fn hold(&mut self, gpu: usize) {
        let node = self
            .daemon
            .view()
            .inventory
            .devices
            .get(&at(gpu))
            .filter(|function| function.is_on_vfio())
            .and_then(|gpu| gpu.vfio_group_node());
        if let Some(node) = node.filter(|_| !self.held.contains(&gpu)) {
            self.managed.sim.hold(pid(gpu), "qemu", &format!("/{node}")).unwrap();
            self.held.insert(gpu);
        }
    }

    fn give_back_behind_our_back(&mut self, gpu: usize) {
        let host = self.managed.sim.host();
        let own = Binding { driver: Some("nvidia".into()), driver_override: None };
        if Binding::read(&host, at(gpu)).unwrap() != Some(own.clone()) {
            Change::Binding { device: at(gpu), from: Binding::default(), to: own }.make(&host, &Deadlines::default()).unwrap();
            self.moved.insert(gpu);
            self.managed.sim.kernel.calm();
            let look = self.daemon.submit(Request::Rescan).unwrap();
            self.daemon.finish(look);
        }
    }

    /// Waits for what goes on by itself: a claim that ends, and that nobody is in the way of, ends.
    fn settle(&self) {
        let held: BTreeSet<_> = self.held.iter().map(|gpu| at(*gpu)).collect();
        self.daemon.until(|view: &View| {
            let is_due = |claim: &ClaimView| self.left && !claim.client.is_empty() && claim.state != ClaimState::Pending;
            let is_held = |claim: &ClaimView| claim.devices.iter().any(|device| held.contains(device));
            let ends = |claim: &ClaimView| (claim.state == ClaimState::Releasing || is_due(claim)) && !is_held(claim);
            let looks = |claim: &ClaimView| is_due(claim) && claim.state == ClaimState::Active;
            view.jobs.values().all(|job| job.state.is_over()) && !view.claims.values().any(|claim| ends(claim) || looks(claim))
        });
    }

    /// Nothing was stored into what somebody holds, nor into what is not ours.
    fn untouched(&self) {
        let untouchable: Vec<_> = self.held.iter().map(|gpu| GPUS[*gpu]).chain([FOREIGN]).collect();
        for (path, value) in self.managed.sim.kernel.stored() {
            let touched = untouchable.iter().find(|device| path.to_string_lossy().contains(**device) || value == **device);
            assert_eq!(touched, None, "{} was stored into {}", value, path.display());
        }
    }

    fn check(&self) {
        self.untouched();
        let (view, ledger) = (self.daemon.view(), self.managed.ledger().unwrap());
        let owned = store::load_owners(&self.managed.files().join("run")).unwrap().unwrap_or_default();
        let claimed: Vec<_> = ledger.claims.values().flat_map(|claim| claim.devices.clone()).collect();
        assert_eq!(claimed.len(), claimed.iter().collect::<BTreeSet<_>>().len(), "a device has one owner: {:?}", ledger.claims);
        assert!(ledger.claims.keys().eq(view.claims.keys()), "the view tells what is recorded");
        assert_eq!(view.devices[&FOREIGN.parse().unwrap()].state, DeviceState::Host);
        for gpu in 0..GPUS.len() {
            self.check_gpu(gpu, &view, &owned);
        }
    }

    fn check_gpu(&self, gpu: usize, view: &View, owned: &BTreeMap<PciAddress, Uuid>) {
        let device = at(gpu);
        let Some(shown) = view.devices.get(&device) else {
            assert!(self.unplugged.contains(&gpu) && self.claim_on(gpu).is_none(), "only what left and is nobody's is forgotten");
            return;
        };
        let owner = owned.get(&device).copied();
        let bound = Binding::read(&self.managed.sim.host(), device).unwrap();
        let on_vfio = bound == Some(Binding::overridden("vfio-pci"));
        let has_claim = shown.claim.is_some();
        match shown.state {
            DeviceState::Host => assert_eq!((owner, has_claim, on_vfio), (None, false, false), "{device}"),
            DeviceState::Free => assert_eq!((owner, has_claim, on_vfio), (Some(Uuid::nil()), false, true), "{device}"),
            DeviceState::Claimed => assert_eq!((owner, has_claim, on_vfio), (Some(DOMAIN.parse().unwrap()), true, true), "{device}"),
            DeviceState::Releasing => assert!(owner == Some(Uuid::nil()) && self.held.contains(&gpu), "{device}: {}", shown.reason),
            DeviceState::Quarantined => assert!(has_claim || owner == Some(Uuid::nil()), "{device}: {}", shown.reason),
            DeviceState::Drifted => assert!(self.moved.contains(&gpu), "{device}: {}", shown.reason),
            DeviceState::Gone => assert!(self.unplugged.contains(&gpu), "{device}"),
            state => panic!("{device} is {state:?}: {}", shown.reason),
        }
    }
}

fn pid(gpu: usize) -> u32 {
    4711 + u32::try_from(gpu).unwrap()
}

fn claim(gpu: usize, with_client: bool) -> Request {
    let release = if with_client { "client-gone" } else { "manual" };
    let text = format!("domain-uuid = '{DOMAIN}'\nrelease = '{release}'\ndevices = [{{ kind = 'gpu', identity = '{}' }}]", GPUS[gpu]);
    Request::Claim { tenant: TenantId::BUILT_IN, spec: ClaimSpec::parse(Node::from_toml(&text).unwrap()).unwrap(), client: "client".into() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn p41_p75_a_device_has_one_owner_whatever_happens(deeds in deeds()) {
        let mut play = Play::start();
        for deed in deeds {
            play = play.act(deed);
            play.check();
        }
        let live = play.daemon.view().jobs.values().filter(|job| job.state == JobState::Running).count();
        assert_eq!(live, 0);
        assert!(play.managed.ledger().unwrap().claims.values().all(|claim| claim.standing != Standing::Pending || !claim.devices.is_empty()));
        play.daemon.stop();
    }
}
