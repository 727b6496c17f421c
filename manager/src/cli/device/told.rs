//! A device out of the properties of the service's objects.

use crate::cli::names::{device_of_path, machine_name, number_of_path, subject_of_path};
use crate::client::{Objects, Record};

use super::{Bar, Device, VirtualFunctions, lack_of};

impl Device {
    /// Every device that the service tells of, by address.
    pub(in crate::cli) fn told(objects: &Objects) -> Vec<Self> {
        let paths = objects.iter().filter(|(_, interfaces)| interfaces.contains_key("Device"));
        let mut devices: Vec<_> = paths.filter_map(|(path, _)| Self::told_at(objects, path)).collect();
        devices.sort_by(|one, other| one.address.cmp(&other.address));
        devices
    }

    /// Takes what the service has no properties for.
    pub(in crate::cli) fn take_facts(&mut self, facts: &Record) {
        let number = |key| facts.number(key).unwrap_or_default();
        self.power_state = some(facts, "power-state");
        self.link = some(facts, "link-max-speed").map(|most| {
            let (now, width, most_width) = (facts.text("link-speed"), number("link-width"), number("link-max-width"));
            format!("{now} x{width}, most {most} x{most_width}")
        });
        self.cleaned_by = some(facts, "cleaned-by");
        self.not_cleaned = some(facts, "not-cleaned");
        self.boot_display = Some(facts.flag("boot-vga"));
        self.unreadable = facts.texts("unreadable");
    }

    /// The device at `path`.
    pub(in crate::cli) fn told_at(objects: &Objects, path: &str) -> Option<Self> {
        let interfaces = objects.get(path)?;
        let device = interfaces.get("Device")?;
        let group_path = device.text("IommuGroup");
        let group = objects.get(group_path).and_then(|group| group.get("IommuGroup"));
        let node = device.number("NumaNode").and_then(|node| i64::try_from(node).ok());
        Some(Self {
            address: device.text("Address").into(),
            identity: device.text("Identity").into(),
            vendor: device.text("Vendor").into(),
            model: device.text("Model").into(),
            class: device.text("Class").into(),
            numa_node: node.filter(|node| *node >= 0),
            driver: some(device, "Driver"),
            driver_override: some(device, "DriverOverride"),
            group: number_of_path(group_path),
            viable: group.map(|group| group.flag("Viable")),
            why_not_viable: group.and_then(|group| some(group, "WhyNot")),
            group_members: group.map(members).unwrap_or_default(),
            acs: group.map(|group| group.records("Acs").iter().map(lack).collect()).unwrap_or_default(),
            bundle: devices(device, "Bundle"),
            use_: some(device, "Use"),
            state: some(device, "State"),
            reason: some(device, "Reason"),
            held_by: holder(objects, device.text("Claim")),
            reset_methods: device.texts("ResetMethods"),
            bars: device.records("Bars").iter().filter_map(bar).collect(),
            vfio_node: some(device, "VfioNode"),
            vfio_driver: some(device, "VfioDriver"),
            virtual_functions: interfaces.get("Sriov").and_then(virtual_functions),
            physical_function: interfaces.get("VirtualFunction").map(|function| subject_of_path(function.text("PhysicalFunction"))),
            ..Self::default()
        })
    }
}

fn some(record: &Record, key: &str) -> Option<String> {
    Some(record.text(key).to_owned()).filter(|text| !text.is_empty())
}

fn devices(record: &Record, key: &str) -> Vec<String> {
    record.texts(key).into_iter().map(|path| device_of_path(&path).map_or(path, |address| address.to_string())).collect()
}

fn members(group: &Record) -> Vec<String> {
    let others = group.records("Others");
    let mut members = devices(group, "Members");
    members.extend(others.iter().map(|other| other.text("address").to_owned()));
    members.sort();
    members
}

fn lack(port: &Record) -> String {
    lack_of(&subject_of_path(port.text("port")), port.text("capability"), &port.texts("missing"))
}

fn bar(record: &Record) -> Option<Bar> {
    let number = |key| record.number(key).and_then(|number| u64::try_from(number).ok());
    Some(Bar { index: number("index")?, size: number("size")? })
}

fn virtual_functions(sriov: &Record) -> Option<VirtualFunctions> {
    let number = |key| sriov.number(key).and_then(|number| u64::try_from(number).ok());
    Some(VirtualFunctions { enabled: number("Count")?, total: number("MaxCount")? })
}

// `acme/train-1`, or the claim where it is for no machine.
fn holder(objects: &Objects, path: &str) -> Option<String> {
    let claim = objects.get(path)?.get("Claim")?;
    let machine = objects.get(claim.text("Machine")).and_then(|interfaces| interfaces.get("Machine"));
    Some(machine.map_or_else(|| subject_of_path(path), |machine| machine_name(objects, machine)))
}
