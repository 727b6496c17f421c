//! One H100: configuration space, three BARs, registers, and what a reset clears.
//!
//! BAR 0 holds registers, and each access is a message; BARs 2 and 4 are memory that QEMU maps.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::config_space::{self, Bar, ConfigSpace, Effect};

/// The region number of configuration space in VFIO.
pub const CONFIG_REGION: u32 = 7;

const REGISTERS: Bar = Bar { number: 0, size: 16 << 20 };
/// 80 GiB on the real card; the emulated machine has no room for it.
const FRAME_BUFFER: Bar = Bar { number: 2, size: 256 << 20 };
const MESSAGES: Bar = Bar { number: 4, size: 32 << 20 };

/// PMC_BOOT_0: Hopper, revision a1.
const BOOT_0: (u32, u32) = (0x0, 0x1800_00a1);
/// The firmware's boot status, 0xff: complete.
const BOOT_STATUS: (u32, u32) = (0x2_00bc, 0xff);
/// Memory clear: finished.
const MEMORY_CLEAR: (u32, u32) = (0x10_0b20, 1);
const READ_ONLY: [(u32, u32); 3] = [BOOT_0, BOOT_STATUS, MEMORY_CLEAR];
/// Scratch that only a bus reset clears.
const STICKY_SCRATCH: u32 = 0x9_1288;

/// What kind of reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reset {
    /// Of this function.
    FunctionLevel,
    /// Of the bus or the machine.
    Bus,
}

/// The device behind one socket.
pub struct H100 {
    name: String,
    config: ConfigSpace,
    memory: BTreeMap<u32, File>,
    registers: BTreeMap<u32, u32>,
}

impl H100 {
    /// The `index`-th card.
    pub fn new(name: &str, index: u8) -> io::Result<Self> {
        let serial = 0x4800_0000_0000_0000 | u64::from(index);
        let mut memory = BTreeMap::new();
        for bar in [FRAME_BUFFER, MESSAGES] {
            let file = memfd_create(name, MemfdFlags::CLOEXEC)?;
            ftruncate(&file, bar.size)?;
            memory.insert(bar.number as u32, File::from(file));
        }
        Ok(H100 {
            name: name.to_owned(),
            config: ConfigSpace::new(&[REGISTERS, FRAME_BUFFER, MESSAGES], serial),
            memory,
            registers: BTreeMap::new(),
        })
    }

    /// The size of a region in bytes (0: no such region), and the memory behind it where it can be mapped.
    pub fn region(&self, region: u32) -> (u64, Option<BorrowedFd<'_>>) {
        let memory = self.memory.get(&region).map(File::as_fd);
        if region == CONFIG_REGION {
            return (config_space::SIZE as u64, None);
        }
        let bar = [REGISTERS, FRAME_BUFFER, MESSAGES].into_iter().find(|bar| bar.number as u32 == region);
        (bar.map_or(0, |bar| bar.size), memory)
    }

    /// Reads within a region, whose bounds the caller has checked.
    pub fn read(&self, region: u32, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if let Some(memory) = self.memory.get(&region) {
            return memory.read_exact_at(out, offset);
        }
        if region == CONFIG_REGION {
            self.config.read(offset as usize, out);
            return Ok(());
        }
        for (index, byte) in out.iter_mut().enumerate() {
            let at = offset as u32 + index as u32;
            *byte = self.register(at & !3).to_le_bytes()[(at & 3) as usize];
        }
        Ok(())
    }

    /// Writes within a region, whose bounds the caller has checked.
    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        if let Some(memory) = self.memory.get(&region) {
            return memory.write_all_at(data, offset);
        }
        if region == CONFIG_REGION {
            if self.config.write(offset as usize, data) == Effect::FunctionLevelReset {
                self.reset(Reset::FunctionLevel);
            }
            return Ok(());
        }
        let read_only = |at| READ_ONLY.iter().any(|(register, _)| *register == at);
        if let (Ok(value), true) = (data.try_into(), offset.is_multiple_of(4)) {
            let at = offset as u32;
            if !read_only(at) {
                self.registers.insert(at, u32::from_le_bytes(value));
            }
        }
        Ok(())
    }

    /// Clears what this kind of reset clears.
    pub fn reset(&mut self, kind: Reset) {
        eprintln!("{}: {kind:?} reset", self.name);
        self.registers.retain(|register, _| kind == Reset::FunctionLevel && *register == STICKY_SCRATCH);
    }

    fn register(&self, at: u32) -> u32 {
        let fixed = READ_ONLY.iter().find(|(register, _)| *register == at);
        fixed.map_or_else(|| self.registers.get(&at).copied().unwrap_or(0), |(_, value)| *value)
    }
}
