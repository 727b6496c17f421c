//! Why a goal is not planned: a closed set, each with its evidence and what a person can do.

use vfio::{AcsCapability, GroupId, Hold, Holder, Identity, Member, PciAddress, PortAcs};

use crate::config::Use;
use crate::failure::{ErrorKind, Failure};
use crate::id::{ClaimId, JobId, MachineId};

/// Why a goal is not planned.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are the evidence that the text shows
pub enum Refusal {
    /// No such device.
    UnknownDevice { device: PciAddress },
    /// Both assigned and released in one request.
    BothWays { device: PciAddress },
    /// The configuration does not allow it.
    NotAllowed { device: PciAddress, use_: Use },
    /// It was taken for another manager, and the configuration does not say so any more.
    WasLent { device: PciAddress },
    /// The kernel runs without an IOMMU.
    IommuOff { device: PciAddress },
    /// VFIO is set to do without one.
    UnsafeNoIommu { device: PciAddress },
    /// It is in no IOMMU group.
    NoGroup { device: PciAddress },
    /// The firmware does DMA behind the kernel's back.
    ReservedRegion { device: PciAddress, group: GroupId },
    /// Something that is no device of ours shares its group.
    Foreign { device: PciAddress, group: GroupId, other: Member, acs: Vec<PortAcs>, better: Vec<PciAddress> },
    /// The host shows its console on it.
    Display { device: PciAddress, boot_vga: bool, claimants: Vec<String> },
    /// It is no GPU, and only makes virtual functions.
    NeverMoves { device: PciAddress },
    /// It has no virtual functions to make.
    NoVirtualFunctions { device: PciAddress },
    /// It cannot have so many.
    TooManyFunctions { device: PciAddress, count: u16, total: u16 },
    /// No driver of the host has it, which would make them.
    NoHostDriver { device: PciAddress, driver: Option<String> },
    /// NVIDIA's tool makes them, and is not there.
    NoVendorTool { device: PciAddress },
    /// NVIDIA's tool makes all or none.
    AllOrNone { device: PciAddress, count: u16, total: u16 },
    /// A driver has one of its virtual functions, which is not gpuward's.
    FunctionInUse { device: PciAddress, function: PciAddress, driver: String },
    /// One of its virtual functions is in the pool.
    FunctionInPool { device: PciAddress, function: PciAddress },
    /// Its virtual functions live.
    LiveFunctions { device: PciAddress, count: u16, functions: Vec<PciAddress> },
    /// It is a virtual function whose vendor's driver is its VFIO driver.
    VendorVfio { device: PciAddress, driver: Option<String> },
    /// Its VFIO driver is not there.
    NoDriver { device: PciAddress, driver: String },
    /// Another device sits where one of the ledger's was.
    AnotherDevice { device: PciAddress, was: Identity, is: Identity },
    /// Processes hold it.
    Held { device: PciAddress, holders: Vec<Holder>, pausable: Vec<String> },
    /// It is claimed.
    Claimed { device: PciAddress, claim: ClaimId, machine: Option<MachineId> },
    /// A domain that is not ours uses it.
    UsedByDomain { device: PciAddress, domain: String },
    /// It did not come back clean.
    Quarantined { device: PciAddress, reason: String },
    /// A driver has its lock, and does not give it up.
    Locked { device: PciAddress, driver: Option<String> },
    /// Another job has it.
    Busy { device: PciAddress, job: JobId, kind: &'static str },
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::UnknownDevice { device } => Self::new(ErrorKind::NoSuchDevice, format!("there is no device {device}"))
                .because("a device is a GPU, a companion in its slot, a virtual function or an NVSwitch")
                .remedy("`gpuward list` shows the devices"),
            Refusal::BothWays { device } => {
                Self::new(ErrorKind::Conflict, format!("{device} is to be assigned and released at once")).remedy("ask for one of the two")
            }
            Refusal::NotAllowed { device, use_ } => not_allowed(device, &use_),
            Refusal::WasLent { device } => {
                Self::new(ErrorKind::Conflict, format!("{device} was taken for another manager, who may have used it"))
                    .because("gpuward.toml does not say use = \"lend\" any more")
                    .remedy(format!("release it to the host first: gpuward release {device}"))
            }
            Refusal::IommuOff { device } => {
                Self::new(ErrorKind::NotViable, format!("{device} cannot be isolated: the kernel runs without an IOMMU"))
                    .because("/sys/kernel/iommu_groups is empty")
                    .remedy("switch on VT-d or AMD-Vi in the firmware, and intel_iommu=on on the kernel's command line for Intel")
            }
            Refusal::UnsafeNoIommu { device } => {
                Self::new(ErrorKind::NotViable, format!("{device} would not be isolated: VFIO runs in its unsafe no-IOMMU mode"))
                    .because("/sys/module/vfio/parameters/enable_unsafe_noiommu_mode is Y")
                    .remedy("load vfio without enable_unsafe_noiommu_mode")
            }
            Refusal::NoGroup { device } => Self::new(ErrorKind::NotViable, format!("{device} is in no IOMMU group"))
                .because(format!("/sys/bus/pci/devices/{device}/iommu_group is missing: no IOMMU covers it"))
                .remedy("move the card to a slot that the IOMMU covers"),
            Refusal::ReservedRegion { device, group } => {
                Self::new(ErrorKind::NotViable, format!("{device} cannot be handed to a guest: the firmware uses its DMA"))
                    .because(format!("/sys/kernel/iommu_groups/{group}/reserved_regions has a direct region (RMRR)"))
                    .remedy("switch off the firmware's use of the card (legacy USB, shared management), or ask its vendor")
            }
            Refusal::Foreign { device, group, other, acs, better } => foreign(device, group, &other, (&acs, &better)),
            Refusal::Display { device, boot_vga, claimants } => display(device, boot_vga, &claimants),
            Refusal::NeverMoves { device } => Self::new(ErrorKind::NotSupported, format!("{device} is no GPU and is never handed out"))
                .because("it is a physical function that can have virtual ones")
                .remedy(format!("`gpuward vfs set {device} COUNT` makes virtual functions of it, which can be assigned")),
            Refusal::NoVirtualFunctions { device } => Self::new(ErrorKind::NotSupported, format!("{device} can have no virtual functions"))
                .because(format!("/sys/bus/pci/devices/{device}/sriov_totalvfs is missing"))
                .remedy("`gpuward vfs` shows the functions that can; SR-IOV may have to be switched on in the firmware"),
            Refusal::TooManyFunctions { device, count, total } => {
                Self::new(ErrorKind::NotSupported, format!("{device} cannot have {count} virtual functions"))
                    .because(format!("sriov_totalvfs is {total}"))
                    .remedy(format!("ask for {total} or fewer"))
            }
            Refusal::NoHostDriver { device, driver } => {
                let driver = driver.unwrap_or_else(|| "no driver".into());
                Self::new(ErrorKind::NotViable, format!("{device} is bound to {driver}, which makes no virtual functions"))
                    .because("only the driver of a physical function can make them (sriov_numvfs)")
                    .remedy("bind it to its own driver first")
            }
            Refusal::NoVendorTool { device } => Self::new(
                ErrorKind::NotSupported,
                format!("virtual functions of {device} are made by NVIDIA's tool only, which is missing"),
            )
            .because("/usr/lib/nvidia/sriov-manage is not there, and the driver refuses what is stored into sriov_numvfs")
            .remedy("install NVIDIA's vGPU host driver"),
            Refusal::AllOrNone { device, count, total } => {
                Self::new(ErrorKind::NotSupported, format!("{device} cannot have {count} virtual functions"))
                    .because("NVIDIA's sriov-manage makes all or none")
                    .remedy(format!("ask for {total} or 0"))
            }
            Refusal::FunctionInUse { device, function, driver } => {
                Self::new(ErrorKind::Held, format!("{function}, a virtual function of {device}, is bound to {driver} and would vanish"))
                    .because("to change how many there are takes all of them away first, and gpuward did not bind this one")
                    .remedy(format!("take it from its driver first: {function} into /sys/bus/pci/drivers/{driver}/unbind"))
            }
            Refusal::FunctionInPool { device, function } => {
                Self::new(ErrorKind::Held, format!("{function}, a virtual function of {device}, is in the pool and would vanish"))
                    .because("to change how many there are takes all of them away first")
                    .remedy(format!("gpuward release {function}"))
            }
            Refusal::LiveFunctions { device, count, functions } => {
                let names: Vec<_> = functions.iter().map(ToString::to_string).collect();
                Self::new(ErrorKind::Held, format!("{device} has {count} virtual functions, which would vanish with its driver"))
                    .because(format!("they are {}", names.join(", ")))
                    .remedy(format!("release them, then take them away: gpuward vfs set {device} 0; 0 into its sriov_numvfs on vfio-pci"))
            }
            Refusal::VendorVfio { device, driver } => {
                let driver = driver.unwrap_or_else(|| "its vendor's driver".into());
                Self::new(ErrorKind::NotSupported, format!("{device} stays on {driver}, which is its VFIO driver"))
                    .because("its nvidia/current_vgpu_type makes a vGPU of it")
                    .remedy("create a vGPU on it instead of assigning it")
            }
            Refusal::NoDriver { device, driver } => {
                Self::new(ErrorKind::NotViable, format!("{device} needs the driver {driver}, which is not loaded"))
                    .because(format!("/sys/bus/pci/drivers/{driver} is missing"))
                    .remedy(format!("modprobe {driver}; a file in /etc/modules-load.d loads it at boot"))
            }
            Refusal::AnotherDevice { device, was, is } => {
                Self::new(ErrorKind::Conflict, format!("{device} is another device than the one that gpuward took there"))
                    .because(format!("it was {was}"))
                    .because(format!("it is {is}"))
                    .remedy(format!("put the other one back, or forget it: gpuward release {device}"))
            }
            Refusal::Held { device, holders, pausable } => held(device, &holders, &pausable),
            Refusal::Claimed { device, claim, machine } => {
                let whose = machine.map_or_else(|| format!("claim {claim}"), |machine| format!("machine {}", machine.0));
                Self::new(ErrorKind::AlreadyClaimed, format!("{device} belongs to {whose}"))
                    .because(format!("claim {claim}"))
                    .remedy("stop what uses it first")
            }
            Refusal::UsedByDomain { device, domain } => {
                Self::new(ErrorKind::Held, format!("{device} belongs to the libvirt domain {domain}, which is not gpuward's"))
                    .because(format!("the definition of {domain} names it"))
                    .remedy(format!("stop {domain}, or take the device out of its definition"))
            }
            Refusal::Quarantined { device, reason } => Self::new(ErrorKind::Quarantined, format!("{device} is in quarantine"))
                .because(reason)
                .remedy("look at it, and clear the quarantine when it is sound"),
            Refusal::Locked { device, driver } => {
                let driver = driver.unwrap_or_else(|| "a driver".into());
                Self::new(ErrorKind::Busy, format!("{device} does not answer: {driver} has had its lock for longer than a moment"))
                    .because(format!("reading /sys/bus/pci/devices/{device}/driver_override waits for the lock"))
                    .remedy("a driver binds or leaves; ask again, and look into the kernel's log where that does not end")
            }
            Refusal::Busy { device, job, kind } => Self::new(ErrorKind::Busy, format!("{device} is busy: job {job} ({kind}) is not over"))
                .remedy(format!("wait for job {job}, or cancel it")),
        }
    }
}

fn not_allowed(device: PciAddress, use_: &Use) -> Failure {
    let allow = format!("give it use = \"pool\" or \"on-demand\" in gpuward.toml: match = {{ address = \"{device}\" }}");
    match use_ {
        Use::Lend { to } => Failure::new(ErrorKind::NotSupported, format!("{device} is lent to {to}"))
            .because("gpuward.toml says use = \"lend\": it is bound and watched for its owner, never placed, claimed or reset")
            .remedy(format!("ask {to} for it, or change its use in gpuward.toml")),
        Use::Observe | Use::Pool | Use::OnDemand => Failure::new(ErrorKind::NotSupported, format!("{device} may only be observed"))
            .because(format!("its use by gpuward.toml is {}, the default", use_.word()))
            .remedy(allow),
    }
}

fn foreign(device: PciAddress, group: GroupId, other: &Member, (acs, better): (&[PortAcs], &[PciAddress])) -> Failure {
    let driver = other.driver.as_deref().unwrap_or("none");
    let what = format!("{} ({}, driver {driver})", other.address, other.description);
    let message = format!("{device} shares IOMMU group {group} with {what}, which is not part of its bundle");
    let mut failure = Failure::new(ErrorKind::GroupShared, message);
    for port in acs {
        failure = failure.because(format!("{} (PCIe port) {}, so the kernel cannot separate the two", port.port, lack(port)));
    }
    let ports: Vec<_> = better.iter().take(4).map(ToString::to_string).collect();
    match ports.as_slice() {
        [] => failure.remedy(format!("move {} to another slot; no port of this host has ACS", other.address)),
        [port] => failure.remedy(format!("move {} to another slot, or use a port with ACS ({port} has it)", other.address)),
        ports => failure.remedy(format!("move {} to another slot, or use a port with ACS ({} have it)", other.address, ports.join(", "))),
    }
}

fn lack(port: &PortAcs) -> String {
    match port.capability {
        AcsCapability::Present => format!("lacks ACS {}", port.missing.join(" and ")),
        AcsCapability::Absent => "has no ACS".into(),
        AcsCapability::Unreadable => "may have no ACS (its configuration space needs CAP_SYS_ADMIN)".into(),
    }
}

fn display(device: PciAddress, boot_vga: bool, claimants: &[String]) -> Failure {
    let mut failure = Failure::new(ErrorKind::Held, format!("{device} shows the host's console"));
    if boot_vga {
        failure = failure.because("the firmware booted on it (boot_vga is 1)");
    }
    if !claimants.is_empty() {
        failure = failure.because(format!("{} draws into its memory (/proc/iomem)", claimants.join(", ")));
    }
    failure.remedy("give the host another console, or ask with force: it then has none")
}

// Advisory: a driver can be busy although nobody is seen to hold it (P2).
fn held(device: PciAddress, holders: &[Holder], pausable: &[String]) -> Failure {
    let name = |holder: &Holder| format!("{}[{}]", holder.command, holder.pid);
    let mut names: Vec<_> = holders.iter().map(name).collect();
    names.dedup();
    let mut failure = Failure::new(ErrorKind::Held, format!("{device} is held by {}", names.join(", ")));
    for holder in holders {
        let how = match holder.how {
            Hold::Open => "has open",
            Hold::Mapped => "has mapped",
        };
        let unit = holder.unit.as_ref().map(|unit| format!(", unit {unit}")).unwrap_or_default();
        let pause = match &holder.unit {
            Some(unit) if pausable.contains(unit) => " (policy.pause-units lets it be paused)",
            Some(_) | None => "",
        };
        failure = failure.because(format!("{} {how} /{}{unit}{pause}", name(holder), holder.node));
    }
    let mut units: Vec<_> = holders.iter().filter_map(|holder| holder.unit.clone()).collect();
    units.dedup();
    match units.as_slice() {
        [] => failure.remedy("end these processes; gpuward kills nobody's"),
        units => failure.remedy(format!("systemctl stop {}", units.join(" "))),
    }
}
