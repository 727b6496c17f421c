//! Hosts of any size, for benchmarks: GPUs with virtual functions, each in a group of its own.

use super::description::{BadDescription, Description, Placed};

/// A GPU of the generated host has this many virtual functions at most: with it and its port they fill a bus.
const FUNCTIONS_A_GPU: usize = 256;

const MODELS: &str = r#"
summary = "A generated host."
memory-gib = 4096
cpus = 256
numa-nodes = 2
function = []

[model.root-port]
id = "8086:352a"
class = "060400"
port = "root"
acs = "SV RR CR UF"
driver = "pcieport"
link = "32.0 GT/s PCIe x16"

[model.gpu]
id = "10de:26b9"
subsystem = "10de:1851"
class = "030200"
revision = 0xa1
bars = ["0 16MiB mem64", "1 64GiB mem64 pref", "3 32MiB mem64 pref"]
driver = "nvidia"
reset = "flr bus"
link = "16.0 GT/s PCIe x16"
sriov = { total = 255, offset = 1, stride = 1, model = "vf" }

[model.vf]
id = "10de:26b9"
subsystem = "10de:0000"
class = "030200"
revision = 0xa1
bars = ["0 256KiB mem64", "1 256MiB mem64 pref"]
driver = "vfio-pci"
reset = "flr"
link = "Unknown x0"
"#;

/// A host with `functions` GPUs and virtual functions, and a port for every 256.
///
/// # Errors
/// None in practice: the description is made here.
pub fn generate(functions: usize) -> Result<Description, BadDescription> {
    let mut description = Description::parse(MODELS)?;
    for gpu in 0..functions.div_ceil(FUNCTIONS_A_GPU) {
        let vfs = FUNCTIONS_A_GPU.min(functions - gpu * FUNCTIONS_A_GPU) - 1;
        let numa = (gpu % 2) as i32;
        let port = format!("pci{gpu:04x}:00/{gpu:04x}:00:01.0");
        let path = format!("{port}/{gpu:04x}:01:00.0");
        description.function.push(Placed { numa, ..Placed::new(port, "root-port") });
        description.function.push(Placed {
            numa,
            vfs: vfs as u16,
            serial: Some(0x48b0_2d00_0000 + gpu as u64),
            ..Placed::new(path, "gpu")
        });
    }
    Ok(description)
}
