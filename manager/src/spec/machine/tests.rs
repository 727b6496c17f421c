use super::*;
use crate::libvirt::DomainType;

const LEAST: &str = "format = 1\nname = \"train-1\"\nvcpus = 2\nmemory = \"1GiB\"\n";
const DISK: &str = "[[disk]]\nvolume = \"tank/train-1\"\n";

fn parse(text: &str) -> Result<MachineSpec, Failure> {
    MachineSpec::parse(Node::from_toml(text)?)
}

#[test]
fn the_least_specification_gets_the_documented_defaults() {
    let spec = parse(&format!("{LEAST}{DISK}")).unwrap();
    assert_eq!((spec.name.as_str(), spec.vcpus, spec.memory), ("train-1", 2, 1 << 30));
    assert_eq!((spec.firmware, spec.hold, spec.cpu_mode), (Firmware::Uefi, Hold::Running, CpuMode::HostPassthrough));
    assert_eq!((spec.start_deadline, spec.stop_deadline, spec.kill_after_deadline), (0, 90, true));
    assert_eq!(spec.disks[0].source, DiskSource::Volume { pool: "tank".into(), volume: "train-1".into() });
    assert_eq!((spec.disks[0].format, spec.disks[0].readonly), (DiskFormat::Raw, false));
    assert_eq!(spec.needs_administrator(), None);
}

#[test]
fn a_full_specification_is_taken_whole() {
    let spec = parse(&format!(
        "{LEAST}uuid = \"6f3f24d4-8e3c-4a54-9b1e-2f1d8c4e9a10\"\nfirmware = \"bios\"\nhold = \"defined\"\nstop-deadline = 5
        kill-after-deadline = false\nlabels = {{ job = \"4711\" }}\nat-host-boot = \"stay-off\"\nminimum-isolation = \"vf\"
        [cpu]\nmode = \"host-model\"
        {DISK}format = \"qcow2\"\nreadonly = true
        [[network]]\nnetwork = \"acme-net\"
        [[network]]\nnetwork = \"acme-net\"\nmac = \"52:54:00:AA:bb:cc\"
        [[device]]\nkind = \"gpu\"\ncount = 2\nmodel = \"10de:2330\"
        [[device]]\nkind = \"vf\"\nidentity = \"0000:41:00.4\"\nsame-numa = false\n"
    ))
    .unwrap();
    assert_eq!((spec.firmware, spec.hold, spec.cpu_mode), (Firmware::Bios, Hold::Defined, CpuMode::HostModel));
    assert_eq!(spec.labels["job"], "4711");
    assert_eq!((spec.networks[0].mac.as_deref(), spec.networks[1].mac.as_deref()), (None, Some("52:54:00:aa:bb:cc")));
    assert_eq!((spec.devices[0].count, spec.devices[0].model.unwrap().to_string().as_str()), (2, "10de:2330"));
    assert_eq!((spec.devices[1].kind, spec.devices[1].same_numa), (WishKind::Vf, false));
}

#[test]
fn what_libvirt_opens_as_root_is_the_administrators() {
    let boot = "[direct-boot]\nkernel = \"/boot/vmlinuz\"\ncmdline = \"console=ttyS0\"\n";
    for (text, key) in [
        (format!("{LEAST}{boot}"), "direct-boot"),
        (format!("{LEAST}{DISK}[[disk]]\npath = \"/srv/a.img\"\n"), "disk[1].path"),
        (format!("{LEAST}{DISK}[[network]]\nbridge = \"br0\"\n"), "network[0].bridge"),
    ] {
        assert_eq!(parse(&text).unwrap().needs_administrator().as_deref(), Some(key));
    }
}

#[test]
fn each_bad_input_is_refused_by_its_path() {
    let cases: &[(&str, &str)] = &[
        ("name = \"a\"", "format is missing"),
        ("format = 2", "format is 2; this version of gpuward reads 1"),
        ("format = 1\nuuid = \"x\"", "uuid is no UUID"),
        ("format = 1\nuuid = \"00000000-0000-0000-0000-000000000000\"", "uuid is all zeros"),
        ("format = 1", "name is missing"),
        ("format = 1\nname = 7", "name is an integer; it takes text"),
        ("format = 1\nname = \"a/b\"", "name is \"a/b\"; it takes 1 to 63"),
        ("format = 1\nname = \"<b>\"", "name is \"<b>\"; it takes 1 to 63"),
        ("format = 1\nname = \"-a\"", "name is \"-a\"; it takes 1 to 63"),
        ("format = 1\nname = \"\"", "name is \"\"; it takes 1 to 63"),
        ("format = 1\nname = \"A\"", "name is \"A\"; it takes 1 to 63"),
        ("format = 1\nname = \"a\"", "vcpus is missing"),
        ("format = 1\nname = \"a\"\nvcpus = 0", "vcpus is 0; a machine has at least 1"),
        ("format = 1\nname = \"a\"\nvcpus = -1", "vcpus is -1; it takes 0 to 4294967295"),
        ("format = 1\nname = \"a\"\nvcpus = \"2\"", "vcpus is text; it takes an integer"),
        ("format = 1\nname = \"a\"\nvcpus = 1", "memory is missing"),
        ("format = 1\nname = \"a\"\nvcpus = 1\nmemory = \"1GB\"", "memory is no size"),
        ("format = 1\nname = \"a\"\nvcpus = 1\nmemory = 1048577", "memory is 1048577 bytes; it takes whole MiB"),
        ("format = 1\nname = \"a\"\nvcpus = 1\nmemory = 0", "memory is 0"),
    ];
    for (text, message) in cases {
        let failure = parse(text).unwrap_err();
        assert_eq!(failure.kind, ErrorKind::InvalidSpec, "{text}");
        assert!(failure.message.starts_with(message), "{text}\n{failure}");
    }
}

#[test]
fn each_bad_part_is_refused_by_its_path() {
    let cases: &[(&str, ErrorKind, &str)] = &[
        ("", ErrorKind::InvalidSpec, "disk is missing"),
        ("[[device]]\nkind = \"gpu\"\n[[device]]\nkindd = \"gpu\"\nkind = \"vf\"", ErrorKind::InvalidSpec, "device[1].kindd is no key"),
        ("[[device]]\ncount = 1", ErrorKind::InvalidSpec, "device[0].kind is missing"),
        ("[[device]]\nkind = \"tpu\"", ErrorKind::InvalidSpec, "device[0].kind is \"tpu\"; it takes gpu, vf"),
        ("[[device]]\nkind = \"vgpu\"", ErrorKind::NotSupported, "device[0].kind \"vgpu\" is not supported"),
        ("[[device]]\nkind = \"gpu\"\ncount = 0", ErrorKind::InvalidSpec, "device[0].count is 0; it takes 1 to 16"),
        ("[[device]]\nkind = \"gpu\"\nmodel = \"H100\"", ErrorKind::InvalidSpec, "device[0].model takes vendor:device"),
        ("[[device]]\nkind = \"gpu\"\ncount = 2\nidentity = \"x\"", ErrorKind::InvalidSpec, "device[0].identity names one device"),
        ("[device]\nkind = \"gpu\"", ErrorKind::InvalidSpec, "device is a table; it takes an array of tables"),
        ("[[disk]]\nvolume = \"tank\"", ErrorKind::InvalidSpec, "disk[0].volume takes a storage pool"),
        ("[[disk]]\nvolume = \"tank/../b\"", ErrorKind::InvalidSpec, "disk[0].volume takes a storage pool"),
        ("[[disk]]\nvolume = \"tank/..\"", ErrorKind::InvalidSpec, "disk[0].volume takes a storage pool"),
        ("[[disk]]\npath = \"a.img\"", ErrorKind::InvalidSpec, "disk[0].path takes an absolute path"),
        ("[[disk]]\npath = \"/a\"\nvolume = \"a/b\"", ErrorKind::InvalidSpec, "disk[0].path and volume exclude each other"),
        ("[[disk]]\nvolume = \"a/b\"\nformat = \"vmdk\"", ErrorKind::InvalidSpec, "disk[0].format is \"vmdk\"; it takes raw, qcow2"),
        ("[[network]]\nmac = \"52:54:00:00:00:01\"", ErrorKind::InvalidSpec, "network[0].network is missing"),
        ("[[network]]\nnetwork = \"n\"\nmac = \"01:54:00:00:00:01\"", ErrorKind::InvalidSpec, "network[0].mac is no unicast MAC"),
        ("[[network]]\nbridge = \"a-very-long-bridge\"", ErrorKind::InvalidSpec, "network[0].bridge is no name"),
        ("[cpu]\nmode = \"qemu64\"", ErrorKind::InvalidSpec, "cpu.mode is \"qemu64\"; it takes host-passthrough, host-model"),
        ("[cpu]\npin = true", ErrorKind::NotSupported, "cpu.pin is not supported"),
        ("[cloud-init]\nuser-data = \"x\"", ErrorKind::NotSupported, "cloud-init is not supported"),
        ("[direct-boot]\ncmdline = \"quiet\"", ErrorKind::InvalidSpec, "direct-boot.kernel is missing"),
        ("[labels]\njob = 4711", ErrorKind::InvalidSpec, "labels.job is an integer; it takes text"),
        ("[[disk]]\nvolume = \"a/b\"\nreadonly = \"yes\"", ErrorKind::InvalidSpec, "disk[0].readonly is text; it takes true or false"),
    ];
    for (part, kind, message) in cases {
        let disk = if part.is_empty() || part.contains("disk]]") { "" } else { DISK };
        let failure = parse(&format!("{LEAST}{disk}{part}\n")).unwrap_err();
        assert_eq!(failure.kind, *kind, "{part}");
        assert!(failure.message.starts_with(message), "{part}\n{failure}");
    }
}

#[test]
fn an_unknown_key_is_answered_with_the_known_ones() {
    let failure = parse(&format!("{LEAST}{DISK}redonly = true\n")).unwrap_err();
    assert_eq!(failure.message, "disk[0].redonly is no key of a specification");
    assert_eq!(failure.remedy, "the keys there are volume, path, format, readonly");
}

#[test]
fn less_isolation_than_accepted_is_refused() {
    let failure = parse(&format!("{LEAST}minimum-isolation = \"whole-gpu\"\n{DISK}[[device]]\nkind = \"vf\"\n")).unwrap_err();
    assert_eq!(failure.kind, ErrorKind::LevelRefused);
}

#[test]
fn a_specification_too_large_is_refused() {
    let long = "x".repeat(LARGEST);
    assert!(parse(&format!("{LEAST}{DISK}[labels]\na = \"{long}\"\n")).unwrap_err().message.contains("more than 256 KiB"));
}

#[test]
fn more_than_the_host_has_is_refused() {
    let spec = parse(&format!("{LEAST}{DISK}")).unwrap();
    let host = HostFacts { domain_type: DomainType::Kvm, cpus: 2, memory: 1 << 30, libvirt: 12_009_000, address_bits: 46 };
    spec.check_fits(&host).unwrap();
    let failure = spec.check_fits(&HostFacts { cpus: 1, ..host }).unwrap_err();
    assert_eq!(failure.message, "vcpus is 2; the host has 1 processors");
    let failure = spec.check_fits(&HostFacts { memory: 1 << 29, ..host }).unwrap_err();
    assert_eq!(failure.message, "memory is 1024 MiB; the host has 512 MiB");
}
