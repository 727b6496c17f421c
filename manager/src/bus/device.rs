//! Devices, and what is true of some: physical and virtual functions.

use std::sync::Arc;

use vfio::{Function, Holders, Inventory, PciAddress, VgpuInterface};
use zbus::interface;
use zbus::message::Header;

use super::authority::Action;
use super::dict::{Dict, Options, Received};
use super::error::BusError;
use super::group::port;
use super::manager::Answer;
use super::paths::{self, Path};
use super::service::{Conditions, Service};
use crate::failure::{ErrorKind, Failure};
use crate::request::{Goal, Request};
use crate::view::{DeviceState, DeviceView, View};

/// `org.gpuward1.Device`
pub(super) struct Device {
    pub(super) service: Arc<Service>,
    pub(super) address: PciAddress,
}

impl Device {
    fn of_function<T: Default>(&self, fact: impl FnOnce(&Function) -> T) -> T {
        self.service.view().inventory.devices.get(&self.address).map(fact).unwrap_or_default()
    }

    fn of_view<T: Default>(&self, fact: impl FnOnce(&DeviceView) -> T) -> T {
        self.service.view().devices.get(&self.address).map(fact).unwrap_or_default()
    }
}

#[interface(name = "org.gpuward1.Device")]
impl Device {
    /// Takes the device's whole bundle from the host into the pool.
    ///
    /// Options: `force` (b: also where it is the boot display or the only console), `request-id` (s), `if-generation` (t).
    /// Refusals as of `Manager.Apply`. Polkit actions: `org.gpuward.assign`, with `force` `org.gpuward.force` too.
    #[zbus(out_args("job"))]
    async fn assign(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let address = self.address.to_string();
        let caller = self.service.check(&header, Action::Assign, &address).await?;
        let mut options = Options::new(options)?;
        let (force, conditions) = (options.flag("force")?, Conditions::take(&mut options)?);
        options.done()?;
        if force {
            self.service.check(&header, Action::Force, &address).await?;
        }
        let goals = vec![Goal::Assign { device: self.address, force }];
        self.service.submit(caller, Request::Apply { goals, plan_digest: None }, conditions).await
    }

    /// Gives the device's whole bundle from the pool back to its own drivers.
    ///
    /// Options: `request-id` (s), `if-generation` (t). Refusals as of `Manager.Apply`. Polkit action: `org.gpuward.assign`.
    #[zbus(out_args("job"))]
    async fn release(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let caller = self.service.check(&header, Action::Assign, &self.address.to_string()).await?;
        let goals = vec![Goal::Release { device: self.address }];
        self.service.submit(caller, Request::Apply { goals, plan_digest: None }, Conditions::only(options)?).await
    }

    /// Resets the device's whole bundle, which is in the pool and nobody's, and looks whether it comes back; else it is in quarantine.
    ///
    /// Options: `request-id` (s), `if-generation` (t). Refusals: NoSuchDevice, Conflict (not in the pool), AlreadyClaimed, Held,
    /// Quarantined, Stuck, Busy. Polkit action: `org.gpuward.reset`.
    #[zbus(out_args("job"))]
    async fn reset(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let caller = self.service.check(&header, Action::Reset, &self.address.to_string()).await?;
        self.service.submit(caller, Request::Reset(self.address), Conditions::only(options)?).await
    }

    /// Takes the device's bundle, which is in quarantine, off the bus, has it found again, and lets it out of quarantine where it
    /// answers. Whichever driver matches may have it then.
    ///
    /// Options: `request-id` (s), `if-generation` (t). NotSupported where `policy.remove-rescan` does not allow it or for a virtual
    /// function; further refusals as of `ClearQuarantine`. Polkit action: `org.gpuward.clear-quarantine`.
    #[zbus(out_args("job"))]
    async fn recover(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let caller = self.service.check(&header, Action::ClearQuarantine, &self.address.to_string()).await?;
        self.service.submit(caller, Request::Recover(self.address), Conditions::only(options)?).await
    }

    /// What befell the device, newest first: `time` (t, seconds since 1970), `kind` (s, a closed list in `docs/glossary.md`), `text` (s),
    /// `details` (a{sv}: `address`, `claim`, `epoch`, `job`, `step-01`, …, all s).
    ///
    /// Options: `limit` (u, 100; at most 1000) and `before` (t: only older ones). Entries of one second stay together, so there may be a
    /// few more. Polkit action: `org.gpuward.inspect`.
    #[zbus(out_args("entries"))]
    async fn get_history(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Vec<Answer>, BusError> {
        self.service.check(&header, Action::Inspect, &self.address.to_string()).await?;
        let mut options = Options::new(options)?;
        let page = super::history::page(&mut options)?;
        options.done()?;
        super::history::entries(&self.service, self.address, page).await
    }

    /// Lets the device's bundle out of quarantine where it is sound: it is reset if that can be done, and has to answer as itself with
    /// its regions in place. Else it stays, with the new reason. A person should have looked at it: `Reason` says what was wrong.
    ///
    /// Options: `request-id` (s), `if-generation` (t). Refusals: Conflict (in no quarantine), Held, Stuck (a store has not returned),
    /// Busy. Polkit action: `org.gpuward.clear-quarantine`.
    #[zbus(out_args("job"))]
    async fn clear_quarantine(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let caller = self.service.check(&header, Action::ClearQuarantine, &self.address.to_string()).await?;
        self.service.submit(caller, Request::ClearQuarantine(self.address), Conditions::only(options)?).await
    }

    /// Processes that have the device open or mapped: `pid` (u), `command` (s), `unit` (s, may be empty), `node` (s),
    /// `how` (s: `open` or `mapped`). No options. Processes that may not be looked at have `command` `?`.
    ///
    /// Polkit action: `org.gpuward.inspect`.
    #[zbus(out_args("holders"))]
    async fn list_holders(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Vec<Answer>, BusError> {
        self.service.check(&header, Action::Inspect, &self.address.to_string()).await?;
        Options::new(options)?.done()?;
        let (host, inventory, address) = (self.service.host.clone(), self.service.view().inventory.clone(), self.address);
        let look = move || Holders::of(&host, inventory.devices.get(&address));
        let holders = tokio::task::spawn_blocking(look).await.map_err(|error| Failure::of(ErrorKind::Internal, &error))?;
        Ok(holders.found.iter().map(holder).chain(holders.unreadable.iter().map(|pid| unknown(*pid))).collect())
    }

    /// Everything else that is known of it: `identity` (s), `slot` (s: the bridges above it, without bus numbers), `serial` (t), `vgpu` (s:
    /// `mdev` or `vendor-vfio`), `viable` (b), `why-not` (s), `acs` (aa{sv}, as of its group), `iommu` (b: whether the kernel isolates
    /// devices at all), `class-code` (u), `revision` (y), `kind` (s), `ids` (s), `subsystem` (s), `power-state` (s),
    /// `power-control` (s), `d3cold-allowed` (b), `link-speed` (s), `link-width` (u), `link-max-speed` (s), `link-max-width` (u), `boot-vga` (b),
    /// `bar-claimants` (as), `cleaned-by` (s: the reset between two guests), or `not-cleaned` (s: why there is none), `unreadable` (as: `field: reason`). A key is left out where the fact is not known. No options.
    ///
    /// Polkit action: `org.gpuward.inspect`.
    #[zbus(out_args("facts"))]
    async fn describe(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Answer, BusError> {
        self.service.check(&header, Action::Inspect, &self.address.to_string()).await?;
        Options::new(options)?.done()?;
        let view = self.service.view();
        let function = view.inventory.devices.get(&self.address);
        Ok(function.map(|function| facts(function, &view.inventory)).unwrap_or_default())
    }

    /// The `<hostdev>` element for a libvirt domain that others define (`managed='no'`). No options.
    ///
    /// Polkit action: `org.gpuward.inspect`.
    #[zbus(name = "GetHostdevXML", out_args("xml"))]
    async fn get_hostdev_xml(&self, options: Received, #[zbus(header)] header: Header<'_>) -> Result<String, BusError> {
        self.service.check(&header, Action::Inspect, &self.address.to_string()).await?;
        Options::new(options)?.done()?;
        hostdev_xml(self.address).map_err(BusError::from)
    }

    /// PCI address.
    #[zbus(property(emits_changed_signal = "const"))]
    fn address(&self) -> String {
        self.address.to_string()
    }

    /// What it is called across reboots and renumbering: slot path, ids, serial number.
    #[zbus(property)]
    fn identity(&self) -> String {
        self.of_function(|function| function.identity.to_string())
    }

    /// Vendor's name by pci-ids; empty where it has none.
    #[zbus(property)]
    fn vendor(&self) -> String {
        self.of_function(|function| function.vendor_name.clone().unwrap_or_default())
    }

    /// Model's name by pci-ids; `vendor:device` where it has none.
    #[zbus(property)]
    fn model(&self) -> String {
        self.of_function(|function| function.model_name.clone().unwrap_or_else(|| function.ids.to_string()))
    }

    /// `gpu`, `virtual-function`, `switch` or `companion`. The set may grow.
    #[zbus(property)]
    fn class(&self) -> &'static str {
        self.of_function(|function| kind_word(function.kind))
    }

    /// Bound driver; empty without one.
    #[zbus(property)]
    fn driver(&self) -> String {
        self.of_function(|function| function.driver.clone().unwrap_or_default())
    }

    /// `driver_override`; empty where not set.
    #[zbus(property)]
    fn driver_override(&self) -> String {
        self.of_function(|function| function.driver_override.clone().unwrap_or_default())
    }

    /// The VFIO driver that fits it best.
    #[zbus(property)]
    fn vfio_driver(&self) -> String {
        self.of_function(|function| function.vfio_driver.clone())
    }

    /// Its IOMMU group; `/` without one.
    #[zbus(property)]
    fn iommu_group(&self) -> Path {
        self.of_function(|function| function.group).map_or_else(paths::none, paths::group)
    }

    /// NUMA node; -1 where the firmware names none.
    #[zbus(property)]
    fn numa_node(&self) -> i32 {
        self.of_function(|function| function.numa_node).and_then(|node| node.try_into().ok()).unwrap_or(-1)
    }

    /// The devices that move with it, itself included, in the order they bind.
    #[zbus(property)]
    fn bundle(&self) -> Vec<Path> {
        self.of_view(|device| device.bundle.iter().map(|address| paths::device(*address)).collect())
    }

    /// What the configuration allows: observe, pool, on-demand or lend.
    #[zbus(property, name = "Use")]
    fn use_(&self) -> &'static str {
        self.of_view(|device| device.use_.word())
    }

    /// Where it is in its life; the words are in `docs/glossary.md`.
    #[zbus(property)]
    fn state(&self) -> &'static str {
        let view = self.service.view();
        view.devices.get(&self.address).map_or("gone", |device| state_word(device.state))
    }

    /// Why it is in that state; empty where the state says it all.
    #[zbus(property)]
    fn reason(&self) -> String {
        self.of_view(|device| device.reason.clone())
    }

    /// The claim on it; `/` without one.
    #[zbus(property)]
    fn claim(&self) -> Path {
        self.of_view(|device| device.claim).map_or_else(paths::none, paths::claim)
    }

    /// Reset methods in the order the kernel tries them.
    #[zbus(property)]
    fn reset_methods(&self) -> Vec<String> {
        self.of_function(|function| function.reset_methods.clone())
    }

    /// Regions: `index` (u), `base` (t), `size` (t, bytes), `memory` (b), `wide` (b: 64 bits), `prefetchable` (b).
    #[zbus(property)]
    fn bars(&self) -> Vec<Answer> {
        self.of_function(|function| function.bars.iter().map(bar).collect())
    }

    /// The node that a program opens to use it (`/dev/vfio/31`); empty while it is not on a VFIO driver.
    #[zbus(property)]
    fn vfio_node(&self) -> String {
        let node = |function: &Function| Some(format!("/{}", function.vfio_group_node().filter(|_| function.is_on_vfio())?));
        self.of_function(node).unwrap_or_default()
    }

    /// The `Manager.Generation` in which it last changed.
    #[zbus(property)]
    fn generation(&self) -> u64 {
        self.of_view(|device| device.generation)
    }
}

/// `org.gpuward1.Sriov`: on physical functions that can have virtual ones.
pub(super) struct Sriov(pub(super) Device);

#[interface(name = "org.gpuward1.Sriov")]
impl Sriov {
    /// Gives the device so many virtual functions; 0 for none. Host drivers do not take them, and they are made again after a boot.
    ///
    /// From one number to another all are taken away first. NVIDIA's driver makes all or none, by its own tool.
    /// Options: `request-id` (s), `if-generation` (t). Refusals: NotSupported, NotViable, Held (one is in the pool or open),
    /// AlreadyClaimed, Quarantined, Busy, InvalidSpec. Polkit action: `org.gpuward.assign`.
    #[zbus(out_args("job"))]
    async fn set_vf_count(&self, count: u32, options: Received, #[zbus(header)] header: Header<'_>) -> Result<Path, BusError> {
        let (service, device) = (&self.0.service, self.0.address);
        let caller = service.check(&header, Action::Assign, &device.to_string()).await?;
        let goals = vec![Goal::Vfs { device, count: super::manager::count(count.into())? }];
        service.submit(caller, Request::Apply { goals, plan_digest: None }, Conditions::only(options)?).await
    }

    /// How many virtual functions there are.
    #[zbus(property)]
    fn count(&self) -> u32 {
        self.0.of_function(|function| function.sriov.as_ref().map_or(0, |sriov| sriov.enabled.into()))
    }

    /// How many there can be.
    #[zbus(property)]
    fn max_count(&self) -> u32 {
        self.0.of_function(|function| function.sriov.as_ref().map_or(0, |sriov| sriov.total.into()))
    }

    /// Whether host drivers take new ones.
    #[zbus(property)]
    fn autoprobe(&self) -> bool {
        self.0.of_function(|function| function.sriov.as_ref().is_some_and(|sriov| sriov.autoprobe))
    }

    /// The virtual functions by number.
    #[zbus(property)]
    fn functions(&self) -> Vec<Path> {
        let functions = |function: &Function| function.sriov.as_ref().map(|sriov| sriov.functions.clone());
        self.0.of_function(functions).unwrap_or_default().into_iter().map(paths::device).collect()
    }
}

/// `org.gpuward1.VirtualFunction`: on virtual functions.
pub(super) struct VirtualFunction(pub(super) Device);

#[interface(name = "org.gpuward1.VirtualFunction")]
impl VirtualFunction {
    /// The function it is a part of.
    #[zbus(property)]
    fn physical_function(&self) -> Path {
        self.0.of_function(|function| function.physical_function).map_or_else(paths::none, paths::device)
    }
}

/// The interfaces beside `Device` that are true of `device`.
pub(super) fn traits(view: &View, device: PciAddress) -> (bool, bool) {
    let function = view.inventory.devices.get(&device);
    (function.is_some_and(|function| function.sriov.is_some()), function.is_some_and(|function| function.physical_function.is_some()))
}

pub(super) fn hostdev_xml(address: PciAddress) -> Result<String, Failure> {
    let xml = xml_templates::render_hostdev(&xml_templates::Hostdev { address });
    xml.map_err(|error| Failure::of(ErrorKind::Internal, &error))
}

fn kind_word(kind: vfio::Kind) -> &'static str {
    match kind {
        vfio::Kind::Gpu => "gpu",
        vfio::Kind::VirtualFunction => "virtual-function",
        vfio::Kind::Switch => "switch",
        vfio::Kind::Companion => "companion",
        vfio::Kind::Bridge => "bridge",
        vfio::Kind::PhysicalFunction => "physical-function",
        vfio::Kind::Other => "other",
    }
}

pub(super) fn state_word(state: DeviceState) -> &'static str {
    match state {
        DeviceState::Host => "host",
        DeviceState::Assigning => "assigning",
        DeviceState::Free => "free",
        DeviceState::Claimed => "claimed",
        DeviceState::Running => "running",
        DeviceState::Sanitising => "sanitising",
        DeviceState::Releasing => "releasing",
        DeviceState::Drifted => "drifted",
        DeviceState::Lent => "lent",
        DeviceState::Quarantined => "quarantined",
        DeviceState::Stuck => "stuck",
        DeviceState::Gone => "gone",
    }
}

fn vgpu_word(interface: VgpuInterface) -> &'static str {
    match interface {
        VgpuInterface::Mdev => "mdev",
        VgpuInterface::VendorVfio => "vendor-vfio",
    }
}

fn holder(holder: &vfio::Holder) -> Answer {
    let how = match holder.how {
        vfio::Hold::Open => "open",
        vfio::Hold::Mapped => "mapped",
    };
    let mut dict = Dict::new();
    dict.put("pid", holder.pid).put("command", holder.command.clone()).put("unit", holder.unit.clone().unwrap_or_default());
    dict.put("node", format!("/{}", holder.node)).put("how", how);
    dict.into_map()
}

fn unknown(pid: u32) -> Answer {
    let mut dict = Dict::new();
    dict.put("pid", pid).put("command", "?").put("unit", "").put("node", "").put("how", "");
    dict.into_map()
}

fn bar(bar: &vfio::Bar) -> Answer {
    let mut dict = Dict::new();
    dict.put("index", u32::from(bar.index)).put("base", bar.base).put("size", bar.size);
    dict.put("memory", bar.memory).put("wide", bar.wide).put("prefetchable", bar.prefetchable);
    dict.into_map()
}

fn facts(function: &Function, inventory: &Inventory) -> Answer {
    let mut dict = Dict::new();
    dict.put("identity", function.identity.to_string()).put("slot", function.identity.slot.clone());
    if let Some(serial) = function.identity.serial {
        dict.put("serial", serial);
    }
    if let Some(interface) = function.vgpu {
        dict.put("vgpu", vgpu_word(interface));
    }
    dict.put("iommu", inventory.iommu == vfio::Iommu::On);
    if let Some(group) = function.group.and_then(|group| inventory.groups.get(&group)) {
        let why_not = inventory.not_viable(group.id).map(|why| why.to_string());
        dict.put("viable", why_not.is_none()).put("why-not", why_not.unwrap_or_default());
        dict.put("acs", group.acs.iter().map(port).collect::<Vec<_>>());
    }
    dict.put("class-code", function.class).put("revision", function.revision).put("kind", kind_word(function.kind));
    dict.put("ids", function.ids.to_string()).put("boot-vga", function.boot_vga);
    dict.put("subsystem", format!("{:04x}:{:04x}", function.ids.subsystem_vendor, function.ids.subsystem_device));
    dict.put("bar-claimants", function.bar_claimants.clone()).put("unreadable", function.unreadable.clone());
    match inventory.reset_way(function) {
        Ok(way) => dict.put("cleaned-by", way.to_string()),
        Err(none) => dict.put("not-cleaned", none.to_string()),
    };
    if let Some(state) = &function.power.state {
        dict.put("power-state", state.clone());
    }
    if let Some(control) = &function.power.control {
        dict.put("power-control", control.clone());
    }
    if let Some(allowed) = function.power.d3cold_allowed {
        dict.put("d3cold-allowed", allowed);
    }
    if let Some(link) = &function.link {
        dict.put("link-speed", link.speed.clone()).put("link-width", link.width);
        dict.put("link-max-speed", link.max_speed.clone()).put("link-max-width", link.max_width);
    }
    dict.into_map()
}
