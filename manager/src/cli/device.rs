//! A device as the command shows it, whether the service told of it or a captured tree was read. `docs/cli.md` gives its JSON.

mod told;

use std::borrow::Borrow;
use std::fmt::Display;

use serde::Serialize;
use vfio::{AcsCapability, Function, Inventory, Kind, PciAddress, PortAcs, Sriov, VgpuInterface};

use super::holders::{ByDevice, Holder};
use super::output::size;

/// A device. `None` and empty: not known, or not there.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Device {
    pub address: String,
    pub identity: String,
    pub vendor: String,
    pub model: String,
    /// `gpu`, `virtual-function`, `switch`, `companion`.
    pub class: String,
    pub numa_node: Option<i64>,
    pub driver: Option<String>,
    pub driver_override: Option<String>,
    pub group: Option<u64>,
    pub viable: Option<bool>,
    pub why_not_viable: Option<String>,
    pub group_members: Vec<String>,
    /// What ports above the group lack, so that the kernel cannot divide it.
    pub acs: Vec<String>,
    pub bundle: Vec<String>,
    #[serde(rename = "use")]
    pub use_: Option<String>,
    pub state: Option<String>,
    pub reason: Option<String>,
    pub held_by: Option<String>,
    pub reset_methods: Vec<String>,
    /// The reset between two guests.
    pub cleaned_by: Option<String>,
    /// Why there is none.
    pub not_cleaned: Option<String>,
    pub bars: Vec<Bar>,
    pub vfio_node: Option<String>,
    pub vfio_driver: Option<String>,
    pub power_state: Option<String>,
    pub link: Option<String>,
    pub virtual_functions: Option<VirtualFunctions>,
    pub physical_function: Option<String>,
    pub vgpu: Option<&'static str>,
    pub boot_display: Option<bool>,
    pub unreadable: Vec<String>,
    /// Who has it open; `None` where nobody looked.
    pub holders: Option<Vec<Holder>>,
}

/// A region of a device.
#[derive(Debug, Serialize)]
pub(super) struct Bar {
    pub index: u64,
    pub size: u64,
}

/// How many virtual functions a device has, and may have.
#[derive(Debug, Serialize)]
pub(super) struct VirtualFunctions {
    pub enabled: u64,
    pub total: u64,
}

impl Device {
    /// A function of an inventory. Whose it is only a service can say, so a function on a VFIO driver has no state.
    pub(super) fn observed(inventory: &Inventory, function: &Function) -> Self {
        let text = |value: &Option<String>| value.clone();
        let not_viable = function.group.and_then(|group| inventory.not_viable(group));
        let members = function.group.and_then(|group| inventory.groups.get(&group));
        let way = inventory.reset_way(function);
        Self {
            address: function.address.to_string(),
            identity: function.identity.to_string(),
            vendor: function.vendor_name.clone().unwrap_or_default(),
            model: function.model_name.clone().unwrap_or_else(|| function.ids.to_string()),
            class: class_of(function.kind).into(),
            numa_node: function.numa_node.map(i64::from),
            driver: text(&function.driver),
            driver_override: text(&function.driver_override),
            group: function.group.map(|group| group.0.into()),
            viable: function.group.map(|_| not_viable.is_none()),
            why_not_viable: not_viable.map(|why| why.to_string()),
            group_members: members.map(|group| group.members.iter().map(|member| member.address.to_string()).collect()).unwrap_or_default(),
            acs: members.map(|group| group.acs.iter().map(lack).collect()).unwrap_or_default(),
            bundle: inventory.bundle(function.address).map(|bundle| addresses(&bundle.devices)).unwrap_or_default(),
            state: (!function.is_on_vfio()).then(|| "host".into()),
            reset_methods: function.reset_methods.clone(),
            cleaned_by: way.as_ref().ok().map(ToString::to_string),
            not_cleaned: way.err().map(|none| none.to_string()),
            bars: function.bars.iter().map(|bar| Bar { index: bar.index.into(), size: bar.size }).collect(),
            vfio_node: function.vfio_group_node().filter(|_| function.is_on_vfio()).map(|node| format!("/{node}")),
            vfio_driver: Some(function.vfio_driver.clone()),
            power_state: text(&function.power.state),
            link: function.link.as_ref().map(|link| format!("{} x{}, most {} x{}", link.speed, link.width, link.max_speed, link.max_width)),
            virtual_functions: function.sriov.as_ref().map(virtual_functions),
            physical_function: function.physical_function.map(|address| address.to_string()),
            vgpu: function.vgpu.map(|interface| match interface {
                VgpuInterface::Mdev => "mdev",
                VgpuInterface::VendorVfio => "vendor-vfio",
            }),
            boot_display: Some(function.boot_vga),
            unreadable: function.unreadable.clone(),
            ..Self::default()
        }
    }

    /// Vendor and model as people call them: `NVIDIA H100 SXM5 80GB`. A virtual function is often called as its physical one.
    pub(super) fn name(&self) -> String {
        let model = bracketed(&self.model).unwrap_or(&self.model);
        let nameless_function = self.class == class_of(Kind::VirtualFunction) && !model.contains("Virtual Function");
        let name = format!("{} {model}{}", short_vendor(&self.vendor), if nameless_function { " VF" } else { "" });
        name.trim().to_owned()
    }

    /// Who has it: a tenant's machine, else why it is where it is, else its driver; and the processes that have it open. A free
    /// one is nobody's, whatever its driver.
    pub(super) fn holder(&self) -> String {
        let driver = if self.state.as_deref() == Some("free") { &None } else { &self.driver };
        let holder = [&self.held_by, &self.reason, driver].into_iter().flatten().find(|text| !text.is_empty());
        let holder = holder.map(String::as_str).unwrap_or_default();
        let processes: Vec<_> = self.holders.iter().flatten().filter(|holder| holder.is_known()).map(Holder::name).collect();
        if processes.is_empty() { holder.into() } else { format!("{holder} ({})", processes.join(", ")).trim_start().to_owned() }
    }

    /// Takes its own of the holders that were found.
    pub(super) fn take_holders(&mut self, found: &ByDevice) {
        let own = self.address.parse().ok().and_then(|address: PciAddress| found.get(&address));
        self.holders = Some(own.cloned().unwrap_or_default());
    }

    /// Its regions, for a person.
    pub(super) fn regions(&self) -> String {
        let regions = self.bars.iter().map(|bar| format!("{}: {}", bar.index, size(bar.size)));
        regions.collect::<Vec<_>>().join(", ")
    }
}

fn class_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Gpu => "gpu",
        Kind::VirtualFunction => "virtual-function",
        Kind::Switch => "switch",
        Kind::Companion => "companion",
        Kind::Bridge => "bridge",
        Kind::PhysicalFunction => "physical-function",
        Kind::Other => "other",
    }
}

fn lack(port: &PortAcs) -> String {
    let capability = match port.capability {
        AcsCapability::Present => "present",
        AcsCapability::Absent => "absent",
        AcsCapability::Unreadable => "unreadable",
    };
    lack_of(&port.port, capability, &port.missing)
}

/// A port and what it lacks of access control services; `capability` as on the bus.
fn lack_of(port: &impl Display, capability: &str, missing: &[impl Borrow<str>]) -> String {
    match capability {
        "absent" => format!("{port} has no access control services"),
        "unreadable" => format!("{port} may lack access control services: only root can read its configuration space"),
        _ => format!("{port} lacks {}", missing.join(" and ")),
    }
}

fn addresses(devices: &[PciAddress]) -> Vec<String> {
    devices.iter().map(ToString::to_string).collect()
}

fn virtual_functions(sriov: &Sriov) -> VirtualFunctions {
    VirtualFunctions { enabled: sriov.enabled.into(), total: sriov.total.into() }
}

// pci-ids: "GH100 [H100 SXM5 80GB]", "Advanced Micro Devices, Inc. [AMD/ATI]".
fn bracketed(name: &str) -> Option<&str> {
    let (_, rest) = name.split_once('[')?;
    Some(rest.split_once(']')?.0).filter(|inside| !inside.is_empty())
}

fn short_vendor(name: &str) -> &str {
    let name = bracketed(name).unwrap_or(name);
    name.split(['/', ' ', ',']).next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_called_what_people_call_it() {
        let cases = [
            ("NVIDIA Corporation", "GH100 [H100 SXM5 80GB]", "NVIDIA H100 SXM5 80GB"),
            ("Advanced Micro Devices, Inc. [AMD/ATI]", "Aqua Vanjaram [Instinct MI300X]", "AMD Instinct MI300X"),
            ("Intel Corporation", "82576 Virtual Function", "Intel 82576 Virtual Function"),
            ("", "10de:ffff", "10de:ffff"),
            ("", "", ""),
        ];
        for (vendor, model, name) in cases {
            let device = Device { vendor: vendor.into(), model: model.into(), ..Device::default() };
            assert_eq!(device.name(), name);
        }
    }
}
