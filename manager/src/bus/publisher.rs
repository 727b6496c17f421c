//! What the engine publishes, on the bus: objects and properties first, what happened then, jobs that ended last.
//!
//! An object's properties are read again where something it shows has changed, and only those that differ are sent, all of an
//! interface in one message.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::{oneshot, watch};
use vfio::{GroupId, PciAddress};
use zbus::object_server::{Interface, SignalEmitter};
use zbus::{Connection, OwnedVariant, fdo};

use super::claim::Claim;
use super::device::{Device, Sriov, VirtualFunction, traits};
use super::dict::Dict;
use super::group::IommuGroup;
use super::guard::{Guarded, Owned};
use super::job::{self, Job};
use super::machine::Machine;
use super::manager::Manager;
use super::paths::{self, ENTRY, Path};
use super::service::Service;
use super::tenant::Tenant;
use crate::view::{Event, EventKind, Update, View};

type Properties = HashMap<String, OwnedVariant>;

/// Publishes what the engine hands out.
pub(super) struct Publisher {
    pub(super) connection: Connection,
    pub(super) service: Arc<Service>,
    pub(super) board: watch::Sender<Arc<View>>,
    sent: BTreeMap<(String, &'static str), Properties>,
}

impl Publisher {
    pub(super) fn new(connection: Connection, service: Arc<Service>, board: watch::Sender<Arc<View>>) -> Self {
        Self { connection, service, board, sent: BTreeMap::new() }
    }

    /// Publishes update after update until the engine ends. Those `waiting` are answered when what was handed out before them is on
    /// the bus.
    pub(super) async fn run(mut self, mut updates: UnboundedReceiver<Update>, mut waiting: UnboundedReceiver<oneshot::Sender<()>>) {
        loop {
            // Updates first: what a caller waits for is among them.
            tokio::select! {
                biased;
                update = updates.recv() => match update {
                    Some(update) => self.publish_or_log(update).await,
                    None => return,
                },
                Some(caller) = waiting.recv() => caller.send(()).unwrap_or_default(),
            }
        }
    }

    async fn publish_or_log(&mut self, update: Update) {
        if let Err(error) = self.publish(update).await {
            tracing::error!(%error, "cannot publish on the bus");
        }
    }

    pub(super) async fn publish(&mut self, update: Update) -> zbus::Result<()> {
        let before = self.board.send_replace(update.view.clone());
        let now = &update.view;
        self.manager(&before, now).await?;
        // What others refer to comes before them and leaves after them: a property never names an object that is not there.
        self.groups(&before, now).await?;
        self.tenants(&before, now).await?;
        self.claims(&before, now).await?;
        self.machines(&before, now).await?;
        self.devices(&before, now).await?;
        self.claims_released(&before, now).await?;
        self.tenants_removed(&before, now).await?;
        self.jobs(&before, now).await?;
        let emitter = SignalEmitter::new(&self.connection, ENTRY)?;
        for event in &update.events {
            send_event(&emitter, event).await?;
        }
        for id in &update.ended {
            self.job_removed(&emitter, now, *id).await?;
        }
        Ok(())
    }

    async fn manager(&mut self, before: &View, now: &View) -> zbus::Result<()> {
        let known = self.sent.contains_key(&(ENTRY.to_owned(), Manager::NAME));
        if before.host_state != now.host_state || !known {
            self.changed::<Manager>(&zbus::ObjectPath::from_static_str_unchecked(ENTRY)).await?;
        }
        Ok(())
    }

    async fn devices(&mut self, before: &View, now: &View) -> zbus::Result<()> {
        for address in before.devices.keys().filter(|address| !now.devices.contains_key(address)) {
            self.device_left(before, *address).await?;
        }
        for (address, device) in &now.devices {
            let path = paths::device(*address);
            let shape = traits(now, *address);
            match before.devices.get(address) {
                Some(old) if traits(before, *address) == shape => {
                    if old.generation != device.generation {
                        self.changed::<Device>(&path).await?;
                        self.changed::<Sriov>(&path).await?;
                        self.changed::<VirtualFunction>(&path).await?;
                    }
                    continue;
                }
                Some(_) => self.device_left(before, *address).await?,
                None => {}
            }
            let object = || Device { service: self.service.clone(), address: *address };
            let (own, sriov, function) = (object(), Sriov(object()), VirtualFunction(object()));
            self.add(&path, own).await?;
            if shape.0 {
                self.add(&path, sriov).await?;
            }
            if shape.1 {
                self.add(&path, function).await?;
            }
        }
        Ok(())
    }

    async fn device_left(&mut self, before: &View, address: PciAddress) -> zbus::Result<()> {
        let path = paths::device(address);
        let (sriov, function) = traits(before, address);
        if sriov {
            self.remove::<Sriov>(&path).await?;
        }
        if function {
            self.remove::<VirtualFunction>(&path).await?;
        }
        self.remove::<Device>(&path).await
    }

    async fn groups(&mut self, before: &View, now: &View) -> zbus::Result<()> {
        if Arc::ptr_eq(&before.inventory, &now.inventory) {
            return Ok(());
        }
        for id in before.inventory.groups.keys().filter(|id| !now.inventory.groups.contains_key(id)) {
            self.remove::<IommuGroup>(&paths::group(*id)).await?;
        }
        let look = |view: &View, id: GroupId| (view.inventory.groups.get(&id).cloned(), view.inventory.not_viable(id));
        for id in now.inventory.groups.keys() {
            let path = paths::group(*id);
            if !before.inventory.groups.contains_key(id) {
                self.add(&path, IommuGroup { service: self.service.clone(), id: *id }).await?;
            } else if look(before, *id) != look(now, *id) {
                self.changed::<IommuGroup>(&path).await?;
            }
        }
        Ok(())
    }

    async fn claims_released(&mut self, before: &View, now: &View) -> zbus::Result<()> {
        for id in before.claims.keys().filter(|id| !now.claims.contains_key(id)) {
            self.remove::<Claim>(&paths::claim(*id)).await?;
        }
        Ok(())
    }

    async fn claims(&mut self, before: &View, now: &View) -> zbus::Result<()> {
        for (id, claim) in &now.claims {
            let path = paths::claim(*id);
            match before.claims.get(id) {
                None => self.add(&path, Claim { service: self.service.clone(), id: *id }).await?,
                Some(old) if old != claim => self.changed::<Claim>(&path).await?,
                Some(_) => {}
            }
        }
        Ok(())
    }

    async fn tenants(&mut self, before: &View, now: &View) -> zbus::Result<()> {
        for (id, tenant) in &now.tenants {
            let path = paths::tenant(*id);
            match before.tenants.get(id) {
                None => self.add(&path, Tenant { service: self.service.clone(), id: *id }).await?,
                Some(old) if old != tenant => self.changed::<Tenant>(&path).await?,
                Some(_) => {}
            }
        }
        Ok(())
    }

    async fn tenants_removed(&mut self, before: &View, now: &View) -> zbus::Result<()> {
        for id in before.tenants.keys().filter(|id| !now.tenants.contains_key(id)) {
            self.remove::<Tenant>(&paths::tenant(*id)).await?;
        }
        Ok(())
    }

    async fn machines(&mut self, before: &View, now: &View) -> zbus::Result<()> {
        for id in before.machines.keys().filter(|id| !now.machines.contains_key(id)) {
            self.remove::<Machine>(&paths::machine(*id)).await?;
        }
        for (id, machine) in &now.machines {
            let path = paths::machine(*id);
            match before.machines.get(id) {
                None => self.add(&path, Machine { service: self.service.clone(), id: *id }).await?,
                Some(old) if old != machine => self.changed::<Machine>(&path).await?,
                Some(_) => {}
            }
        }
        Ok(())
    }

    async fn jobs(&mut self, before: &View, now: &View) -> zbus::Result<()> {
        for id in before.jobs.keys().filter(|id| !now.jobs.contains_key(id)) {
            self.remove::<Job>(&paths::job(*id)).await?;
        }
        for (id, job) in &now.jobs {
            let path = paths::job(*id);
            match before.jobs.get(id) {
                None => {
                    self.add(&path, Job { service: self.service.clone(), id: *id }).await?;
                    let mut details = Dict::new();
                    details.put("kind", job.kind).put("objects", job::objects(job)).put("request-id", job.request_id.clone());
                    let emitter = SignalEmitter::new(&self.connection, ENTRY)?;
                    Manager::job_new(&emitter, id.0, path, details.into_map()).await?;
                }
                Some(old) if old != job => self.changed::<Job>(&path).await?,
                Some(_) => {}
            }
        }
        Ok(())
    }

    async fn job_removed(&self, emitter: &SignalEmitter<'_>, now: &View, id: crate::id::JobId) -> zbus::Result<()> {
        let Some(ended) = now.jobs.get(&id) else { return Ok(()) };
        let mut details = Dict::new();
        details.put("objects", job::objects(ended)).put("request-id", ended.request_id.clone()).put("generation", now.generation);
        if let Some(failure) = &ended.error {
            details.put_failure(failure);
        }
        Manager::job_removed(emitter, id.0, paths::job(id), job::word(ended.state), details.into_map()).await
    }

    async fn add<I: Published>(&mut self, path: &Path, object: I) -> zbus::Result<()> {
        self.connection.object_server().at(path, Guarded::new(object, self.service.clone())).await?;
        let properties = self.read::<I>(path).await?;
        self.sent.insert((path.to_string(), I::NAME), properties);
        Ok(())
    }

    async fn remove<I: Published>(&mut self, path: &Path) -> zbus::Result<()> {
        self.sent.remove(&(path.to_string(), I::NAME));
        self.connection.object_server().remove::<Guarded<I>, _>(path).await.map(|_| ())
    }

    async fn read<I: Published>(&self, path: &Path) -> zbus::Result<Properties> {
        let server = self.connection.object_server();
        let object = server.interface::<_, Guarded<I>>(path).await?;
        let emitter = object.signal_emitter().clone();
        Ok(object.get().await.get_all(server, &self.connection, None, &emitter).await?)
    }

    /// Sends those properties of `path` that differ from what was sent last. An interface that the object has not is left alone.
    async fn changed<I: Published>(&mut self, path: &Path) -> zbus::Result<()> {
        let key = (path.to_string(), I::NAME);
        if !self.sent.contains_key(&key) && I::NAME != Manager::NAME {
            return Ok(());
        }
        let now = self.read::<I>(path).await?;
        let before = self.sent.entry(key).or_default();
        let differs = |(name, value): &(&String, &OwnedVariant)| before.get(*name) != Some(*value) && !I::SILENT.contains(&name.as_str());
        let changed: HashMap<&str, zbus::Variant<'_>> = now
            .iter()
            .filter(differs)
            .map(|(name, value)| Ok((name.as_str(), value.try_clone()?.into())))
            .collect::<zbus::wire::Result<_>>()?;
        if !changed.is_empty() {
            let emitter = SignalEmitter::new(&self.connection, path)?;
            fdo::Properties::properties_changed(&emitter, I::name(), changed, (&[]).into()).await?;
        }
        *before = now;
        Ok(())
    }
}

/// An interface that is published.
trait Published: Interface + Owned {
    const NAME: &'static str;
    /// Properties whose change is not announced.
    const SILENT: &'static [&'static str] = &[];
}

impl Published for Manager {
    const NAME: &'static str = "Manager";
    const SILENT: &'static [&'static str] = &["Generation"];
}

impl Published for Device {
    const NAME: &'static str = "Device";
}

impl Published for Sriov {
    const NAME: &'static str = "Sriov";
}

impl Published for VirtualFunction {
    const NAME: &'static str = "VirtualFunction";
}

impl Published for IommuGroup {
    const NAME: &'static str = "IommuGroup";
}

impl Published for Claim {
    const NAME: &'static str = "Claim";
}

impl Published for Tenant {
    const NAME: &'static str = "Tenant";
}

impl Published for Machine {
    const NAME: &'static str = "Machine";
}

impl Published for Job {
    const NAME: &'static str = "Job";
}

async fn send_event(emitter: &SignalEmitter<'_>, event: &Event) -> zbus::Result<()> {
    let mut details = Dict::new();
    for (key, value) in &event.detail {
        details.put(key, value.clone());
    }
    Manager::event(emitter, event.seq, word(event.kind), paths::subject(event.subject), details.into_map()).await
}

fn word(kind: EventKind) -> &'static str {
    match kind {
        EventKind::ClaimMade => "claim-made",
        EventKind::ClaimReleased => "claim-released",
        EventKind::Sanitised => "sanitised",
        EventKind::Quarantined => "quarantined",
        EventKind::Drifted => "drifted",
        EventKind::Stuck => "stuck",
        EventKind::DeviceGone => "device-gone",
        EventKind::MachineStarted => "machine-started",
        EventKind::MachineStopped => "machine-stopped",
    }
}
