//! Whether processors, memory and devices are near each other.

use std::collections::BTreeSet;

use vfio::Function;

use super::{Facts, Finding, NumaNode, Severity, Subject, size};

/// P89. Nothing here keeps a machine from starting.
pub(super) fn judge(subject: Subject<'_>) -> Vec<Finding> {
    let Subject { spec, devices, facts, .. } = subject;
    if devices.is_empty() || facts.nodes.len() == 1 {
        return Vec::new();
    }
    if facts.nodes.is_empty() {
        return vec![Finding::unknown("numa-node", "the host's NUMA nodes are not known", "/sys/devices/system/node has none")];
    }
    let near: BTreeSet<u32> = devices.iter().filter_map(|function| function.numa_node).collect();
    let mut findings: Vec<_> = devices.iter().filter(|function| function.numa_node.is_none()).map(no_node).collect();
    if near.len() > 1 {
        findings.push(apart(devices));
    }
    let nodes: Vec<&NumaNode> = facts.nodes.iter().filter(|node| near.contains(&node.id)).collect();
    if !nodes.is_empty() {
        findings.extend([processors(&nodes, spec.vcpus), memory(&nodes, spec.memory), Some(not_kept(facts, &near))].into_iter().flatten());
    }
    findings
}

fn no_node(function: &Function) -> Finding {
    let evidence = format!("/sys/bus/pci/devices/{}/numa_node: -1", function.address);
    Finding { subject: function.address.to_string(), ..Finding::unknown("numa-node", "the firmware names no NUMA node for it", evidence) }
}

fn apart(devices: &[Function]) -> Finding {
    let finding =
        Finding::new("numa-devices", Severity::Warning, "its devices are on different NUMA nodes: one of them is always far away");
    let line = |function: &Function| Some(format!("{} is on node {}", function.address, function.numa_node?));
    let finding = devices.iter().filter_map(line).fold(finding, Finding::because);
    finding.remedy("wish for devices of one node (same-numa = true, which is the default)")
}

fn processors(nodes: &[&NumaNode], wanted: u32) -> Option<Finding> {
    const CODE: &str = "numa-processors";
    let cpus: u32 = nodes.iter().map(|node| node.cpus).fold(0, u32::saturating_add);
    let evidence = nodes.iter().map(|node| format!("node {} has {} processors", node.id, node.cpus));
    let finding = match cpus {
        // GB200: the GPU's memory is a node of its own.
        0 => Finding::new(CODE, Severity::Info, "the node of its devices has no processors: all are equally far"),
        cpus if wanted > cpus => {
            let message = format!("it has {wanted} virtual CPUs, more than the node of its devices has processors");
            Finding::new(CODE, Severity::Warning, message).remedy("give it fewer, or devices of several nodes")
        }
        _ => return None,
    };
    Some(evidence.fold(finding, Finding::because))
}

fn memory(nodes: &[&NumaNode], wanted: u64) -> Option<Finding> {
    const CODE: &str = "numa-memory";
    let Some(free) = nodes.iter().map(|node| node.free).sum::<Option<u64>>() else {
        let why = "/sys/devices/system/node/node*/meminfo cannot be read";
        return Some(Finding::unknown(CODE, "how much memory is free on the node of its devices is not known", why));
    };
    if wanted <= free {
        return None;
    }
    let message = format!("its {} of memory do not fit on the node of its devices: some will be far away", size(wanted));
    let line = |node: &&NumaNode| Some(format!("node {} has {} free", node.id, size(node.free?)));
    let finding = nodes.iter().filter_map(line).fold(Finding::new(CODE, Severity::Warning, message), Finding::because);
    Some(finding.remedy("stop other machines, or give it less memory"))
}

fn not_kept(facts: &Facts, near: &BTreeSet<u32>) -> Finding {
    let message = "its processors and memory are not kept on the node of its devices: the kernel places them";
    let near: Vec<_> = near.iter().map(u32::to_string).collect();
    Finding::new("numa-placement", Severity::Info, message).because(format!(
        "the host has {} NUMA nodes; its devices are on {}",
        facts.nodes.len(),
        near.join(" and ")
    ))
}
