//! RAM, and whether it may be locked.

use super::{Finding, Severity, Subject, size};

/// What libvirt lets a guest with devices lock beyond its RAM (`qemuDomainGetMemLockLimitBytes`): regions of devices, page tables.
const BEYOND_RAM: u64 = 1 << 30;

pub(super) fn judge(subject: Subject<'_>) -> Vec<Finding> {
    let locked = || subject.is_pinned().then(|| locked_memory(subject)).flatten();
    [free_memory(subject), hugepages(subject), locked()].into_iter().flatten().collect()
}

/// P14: a guest with devices has all its RAM pinned when it starts; more than there is takes the host down.
fn free_memory(subject: Subject<'_>) -> Option<Finding> {
    const CODE: &str = "free-memory";
    let wanted = subject.spec.memory;
    let Some(available) = subject.facts.available else {
        return Some(Finding::unknown(CODE, "how much memory is free is not known", "/proc/meminfo has no MemAvailable"));
    };
    let finding = |severity, message| {
        let finding = Finding::new(CODE, severity, message).because(format!("/proc/meminfo: MemAvailable is {}", size(available)));
        Some(finding.remedy("stop other machines, or give it less memory"))
    };
    if wanted > available && subject.is_pinned() {
        return finding(Severity::Error, format!("its {} of memory are pinned when it starts, and the host has less", size(wanted)));
    }
    if wanted > available {
        return finding(Severity::Warning, format!("the host has less than its {} of memory", size(wanted)));
    }
    let is_tight = wanted.saturating_add(BEYOND_RAM) > available;
    if is_tight { finding(Severity::Warning, format!("with its {} of memory hardly any is left", size(wanted))) } else { None }
}

// What is reserved as hugepages is nobody else's.
fn hugepages(subject: Subject<'_>) -> Option<Finding> {
    let pools = subject.facts.nodes.iter().flat_map(|node| node.hugepages.iter().map(move |pool| (node.id, *pool)));
    let lines: Vec<_> = pools.map(|(node, (each, free))| format!("node {node} has {free} free hugepages of {}", size(each))).collect();
    if lines.is_empty() {
        return None;
    }
    let finding = Finding::new("hugepages", Severity::Info, "memory is reserved as hugepages, of which the machine uses none");
    Some(lines.into_iter().fold(finding, Finding::because).remedy("reserve fewer (vm.nr_hugepages) where its memory falls short"))
}

/// P82.
fn locked_memory(subject: Subject<'_>) -> Option<Finding> {
    const CODE: &str = "locked-memory";
    let Some((daemon, limit, may_raise)) = &subject.facts.readings.libvirt_daemon else {
        let message = "how much memory libvirt's daemon may lock is not known";
        return Some(Finding::unknown(CODE, message, "no libvirtd or virtqemud of root's in /proc: it starts when it is first called"));
    };
    let limit = limit.filter(|_| !may_raise)?;
    let needed = subject.spec.memory.saturating_add(BEYOND_RAM);
    if limit >= needed {
        return None;
    }
    let message = format!("it needs {} of locked memory, and {daemon} may lock {} and cannot raise that", size(needed), size(limit));
    let finding = Finding::new(CODE, Severity::Error, message);
    let evidence = format!("/proc/<pid of {daemon}>/limits: Max locked memory is {limit}; no CAP_SYS_RESOURCE in its status");
    Some(finding.because(evidence).remedy(format!("LimitMEMLOCK=infinity for {daemon}.service, then restart it: guests run on")))
}
