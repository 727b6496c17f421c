//! The 4 KiB of PCI configuration space, with a mask of the bits a host may write.
//!
//! Every value is one that a real H100 SXM5 shows or one that its capability must have to be usable; QEMU takes the
//! BARs and the list of capabilities from here when it realizes the device.

/// Bytes of configuration space of a PCI Express function.
pub const SIZE: usize = 4096;

const VENDOR_NVIDIA: u16 = 0x10de;
const DEVICE_H100_SXM5: u16 = 0x2330;
const SUBSYSTEM_H100_SXM5: u16 = 0x16c1;
const CLASS_3D_CONTROLLER_REV_A1: u32 = 0x0302_00a1;

const POWER: usize = 0x60;
const EXPRESS: usize = 0x78;
const MSIX: usize = 0xc8;
const AER: usize = 0x420;
const SERIAL: usize = 0xb80;
/// Bit 7 of this byte starts a function level reset.
const DEVICE_CONTROL_HIGH: usize = EXPRESS + 9;

/// A 64-bit prefetchable memory BAR.
#[derive(Clone, Copy)]
pub struct Bar {
    /// 0, 2 or 4.
    pub number: usize,
    /// Bytes, a power of two.
    pub size: u64,
}

/// What a write asked for beside the bits it stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Nothing.
    None,
    /// A function level reset.
    FunctionLevelReset,
}

/// Configuration space and its write mask.
pub struct ConfigSpace {
    bytes: Box<[u8; SIZE]>,
    writable: Box<[u8; SIZE]>,
}

impl ConfigSpace {
    /// That of an H100 with these BARs and this serial number.
    pub fn new(bars: &[Bar], serial: u64) -> Self {
        let mut space = ConfigSpace { bytes: Box::new([0; SIZE]), writable: Box::new([0; SIZE]) };
        space.header(bars);
        space.power_management();
        space.express();
        space.msix();
        space.extended(serial);
        space
    }

    /// Bytes from `offset` on; beyond the end they are 0.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        for (index, byte) in out.iter_mut().enumerate() {
            *byte = self.bytes.get(offset + index).copied().unwrap_or(0);
        }
    }

    /// Stores the writable bits of `data`.
    pub fn write(&mut self, offset: usize, data: &[u8]) -> Effect {
        let mut effect = Effect::None;
        for (at, value) in (offset..SIZE).zip(data) {
            if at == DEVICE_CONTROL_HIGH && value & 0x80 != 0 {
                effect = Effect::FunctionLevelReset;
            }
            self.bytes[at] = self.bytes[at] & !self.writable[at] | value & self.writable[at];
        }
        effect
    }

    fn header(&mut self, bars: &[Bar]) {
        self.put16(0x00, VENDOR_NVIDIA);
        self.put16(0x02, DEVICE_H100_SXM5);
        self.allow16(0x04, 0x0547);
        self.put16(0x06, 0x0010); // has capabilities
        self.put32(0x08, CLASS_3D_CONTROLLER_REV_A1);
        for bar in bars {
            let register = 0x10 + 4 * bar.number;
            let mask = !(bar.size - 1);
            self.put32(register, 0xc);
            self.allow32(register, mask as u32 & !0xf);
            self.allow32(register + 4, (mask >> 32) as u32);
        }
        self.put16(0x2c, VENDOR_NVIDIA);
        self.put16(0x2e, SUBSYSTEM_H100_SXM5);
        self.bytes[0x34] = POWER as u8;
        self.writable[0x3c] = 0xff;
        self.bytes[0x3d] = 1; // INTA
    }

    fn power_management(&mut self) {
        self.put16(POWER, 0x0001 | (EXPRESS as u16) << 8);
        self.put16(POWER + 2, 0x0003);
        self.put16(POWER + 4, 0x0008); // no soft reset
        self.allow16(POWER + 4, 0x0103);
    }

    /// An endpoint of version 2 with function level reset, at 32 GT/s x16.
    fn express(&mut self) {
        self.put16(EXPRESS, 0x0010 | (MSIX as u16) << 8);
        self.put16(EXPRESS + 2, 0x0002);
        self.put32(EXPRESS + 0x04, 0x1000_8021);
        self.put16(EXPRESS + 0x08, 0x2810);
        self.allow16(EXPRESS + 0x08, 0x7fff); // "initiate FLR" always reads 0
        self.put32(EXPRESS + 0x0c, 0x0000_0505 | 0x10 << 4);
        self.allow16(EXPRESS + 0x10, 0x01ff);
        self.put16(EXPRESS + 0x12, 0x1105);
        self.put32(EXPRESS + 0x24, 0x0001_0010);
        self.allow16(EXPRESS + 0x28, 0x04ff);
        self.put32(EXPRESS + 0x2c, 0x0000_003e);
        self.put16(EXPRESS + 0x30, 0x0005);
    }

    /// Nine vectors in BAR 4: in BAR 0, which traps, they would break its mapping into thousands of pages.
    fn msix(&mut self) {
        self.put16(MSIX, 0x0011);
        self.put16(MSIX + 2, 8);
        self.allow16(MSIX + 2, 0xc000);
        self.put32(MSIX + 4, 0x00b9_0004);
        self.put32(MSIX + 8, 0x00ba_0004);
    }

    fn extended(&mut self, serial: u64) {
        self.extended_header(0x100, 0x0002, 1, AER); // virtual channel: an empty 0x100 would end the list
        self.put32(0x114, 0x8000_00ff);
        self.extended_header(AER, 0x0001, 2, SERIAL);
        self.put32(AER + 0x0c, 0x0046_2030);
        self.allow32(AER + 0x08, 0x07ff_f030);
        self.allow32(AER + 0x0c, 0x07ff_f030);
        self.put32(AER + 0x14, 0x2000);
        self.allow32(AER + 0x14, 0x0000_f1c1);
        self.extended_header(SERIAL, 0x0003, 1, 0);
        self.put32(SERIAL + 4, serial as u32);
        self.put32(SERIAL + 8, (serial >> 32) as u32);
        // Linux reads this bit of every NVIDIA display function: set, there is no audio function to switch on.
        self.put32(0x488, 1 << 25);
    }

    fn extended_header(&mut self, at: usize, id: u32, version: u32, next: usize) {
        self.put32(at, id | version << 16 | (next as u32) << 20);
    }

    fn put16(&mut self, at: usize, value: u16) {
        self.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn put32(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn allow16(&mut self, at: usize, mask: u16) {
        self.writable[at..at + 2].copy_from_slice(&mask.to_le_bytes());
    }

    fn allow32(&mut self, at: usize, mask: u32) {
        self.writable[at..at + 4].copy_from_slice(&mask.to_le_bytes());
    }
}
