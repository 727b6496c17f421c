use super::*;

fn faults(text: &str) -> Vec<String> {
    let mut config = Config::default();
    parse::merge(&mut config, Path::new("gpuward.toml"), text).iter().map(ToString::to_string).collect()
}

fn parsed(text: &str) -> Config {
    let mut config = Config::default();
    let faults = parse::merge(&mut config, Path::new("gpuward.toml"), text);
    assert_eq!(faults, [], "{text}");
    config
}

fn h100() -> Function {
    let mut function = crate::plan::tests::function("0000:43:00.0", Kind::Gpu);
    function.identity.slot = "pci0000:40/01.0/00.0".into();
    function.identity.serial = Some(0x4d2);
    function.class = 0x030200;
    function
}

#[test]
fn the_documented_file_is_understood() {
    let config = parsed(
        r#"
format = 1
[libvirt]
uri = "qemu:///session"
[[devices]]
match = { vendor = "10de", kind = "gpu" }
use = "pool"
[[devices]]
match = { slot = "pci0000:40/0000:40:01.0" }
use = "lend"
to = "nova"
[limits]
parallel-bundles = 2
jobs-kept = 10
[policy]
pause-units = ["nvidia-persistenced.service"]
"#,
    );
    assert_eq!(config.libvirt.uri, "qemu:///session");
    assert_eq!(config.limits, Limits { parallel_bundles: 2, jobs_kept: 10 });
    assert_eq!(config.policy.pause_units, ["nvidia-persistenced.service"]);
    assert_eq!(config.use_of(&h100()), Use::Pool, "the first match wins");
}

#[test]
fn each_key_of_a_match_is_obeyed() {
    let cases = [
        ("vendor = '10de'", true),
        ("vendor = '1002'", false),
        ("device = '2330'", true),
        ("device = '2331'", false),
        ("subsystem = '10de:16c1'", true),
        ("subsystem = '10de:16c2'", false),
        ("class = '03'", true),
        ("class = '0302'", true),
        ("class = '030000'", false),
        ("kind = 'gpu'", true),
        ("kind = 'switch'", false),
        ("slot = 'pci0000:40'", true),
        ("slot = 'pci0000:40/01.0'", true),
        ("slot = 'pci0000:40/0000:40:01.0/0000:43:00.0'", true),
        ("slot = 'pci0000:40/01'", false),
        ("slot = 'pci0000:60'", false),
        ("serial = '4d2'", true),
        ("serial = '00-00-00-00-00-00-04-d2'", true),
        ("serial = '4d3'", false),
        ("address = '0000:43:00.0'", true),
        ("address = '0000:43:00.1'", false),
        ("vendor = '10de', kind = 'switch'", false),
    ];
    for (keys, fits) in cases {
        let config = parsed(&format!("format = 1\n[[devices]]\nmatch = {{ {keys} }}\nuse = 'on-demand'"));
        let wanted = if fits { Use::OnDemand } else { Use::Observe };
        assert_eq!(config.use_of(&h100()), wanted, "{keys}");
    }
}

#[test]
fn a_typo_is_named_by_its_full_path_with_file_and_line() {
    let text = "format = 1\n[[devices]]\nmatch = { vendor = \"10de\" }\nuse = \"pool\"\n[[devices]]\nmatch = { vendr = \"10de\", kind = \"gpu\" }\nuse = \"pool\"\n[limit]\n";
    assert_eq!(faults(text), ["gpuward.toml:6: devices[1].match.vendr is not known", "gpuward.toml:8: limit is not known"]);
}

#[test]
fn what_is_wrong_is_said_with_its_line() {
    let cases = [
        ("format = 2", "gpuward.toml:1: the file has a format that this version does not know; it knows format = 1"),
        ("", "gpuward.toml:1: the file is to say format = 1"),
        ("format = 1\n[libvirt]\nuri = 3", "gpuward.toml:3: libvirt.uri is to be a string"),
        ("format = 1\n[limits]\njobs-kept = 0", "gpuward.toml:3: limits.jobs-kept is to be an integer of at least 1"),
        ("format = 1\n[policy]\npause-units = 'x'", "gpuward.toml:3: policy.pause-units is to be an array of strings"),
        ("format = 1\n[[devices]]\nuse = 'pool'", "gpuward.toml:2: devices[0] is to have a match"),
        (
            "format = 1\n[[devices]]\nuse = 'pool'\nmatch = { vendor = '0x10de' }",
            "gpuward.toml:4: devices[0].match.vendor is to be four hexadecimal digits, not \"0x10de\"",
        ),
        (
            "format = 1\n[[devices]]\nuse = 'lend'\nmatch = { kind = 'gpu' }",
            "gpuward.toml:2: devices[0] lends to nobody; say to = \"nova\"",
        ),
        (
            "format = 1\n[[devices]]\nuse = 'pol'\nmatch = { kind = 'gpu' }",
            "gpuward.toml:2: devices[0] is to have use = \"observe\", \"pool\", \"on-demand\" or \"lend\"",
        ),
    ];
    for (text, fault) in cases {
        assert_eq!(faults(text).first().map(String::as_str), Some(fault), "{text:?}");
    }
    assert!(faults("format = ").first().is_some_and(|fault| fault.starts_with("gpuward.toml:1: ")));
}

#[test]
fn drop_ins_add_to_the_file_and_faults_of_all_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gpuward.toml");
    assert_eq!(Config::load(&file), Ok(Config::default()), "without a file everything is observed");

    let drop_in = folder.path().join("gpuward.toml.d");
    fs::create_dir(&drop_in).unwrap();
    fs::write(&file, "format = 1\n[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'").unwrap();
    fs::write(drop_in.join("10.toml"), "format = 1\n[limits]\nparallel-bundles = 3").unwrap();
    fs::write(drop_in.join("README"), "not TOML").unwrap();
    let config = Config::load(&file).unwrap();
    assert_eq!((config.devices.len(), config.limits.parallel_bundles), (1, 3));

    fs::write(drop_in.join("20.toml"), "format = 1\nx = 1").unwrap();
    fs::write(&file, "y = 1\nformat = 1").unwrap();
    assert_eq!(Config::load(&file).unwrap_err().len(), 2);
}

#[test]
fn a_companion_goes_with_the_gpu_of_its_slot_unless_a_rule_names_it() {
    let gpu = h100();
    let audio = crate::plan::tests::function("0000:43:00.1", Kind::Companion);
    let devices = [gpu, audio.clone()].map(|function| (function.address, function)).into();
    let inventory = Inventory { devices, ..Inventory::default() };
    let rules = "format = 1\n[[devices]]\nmatch = { kind = 'gpu' }\nuse = 'pool'\n";
    assert_eq!(parsed(rules).use_in(&inventory, &audio), Use::Pool);
    let named = format!("{rules}[[devices]]\nmatch = {{ kind = 'companion' }}\nuse = 'observe'");
    assert_eq!(parsed(&named).use_in(&inventory, &audio), Use::Observe);
}
