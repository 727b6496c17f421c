//! Configuration space, as the kernel shows it in `config`: 4,096 bytes of a PCIe function.
//!
//! Layouts are those of PCI Express Base 6.0, chapter 7, with the names of `include/uapi/linux/pci_regs.h`.

use super::description::{Model, Placed, Port, SriovModel};

const PM: usize = 0x40;
const EXPRESS: usize = 0x60;
const FIRST_EXTENDED: usize = 0x100;

/// What a function's configuration space is made from.
pub struct Source<'a> {
    /// Its model.
    pub model: &'a Model,
    /// Its place.
    pub placed: &'a Placed,
    /// It is a virtual function: its ids read all ones.
    pub is_virtual: bool,
    /// Device id of its virtual functions.
    pub virtual_id: u16,
    /// Base addresses by region.
    pub bases: &'a [(u8, u64)],
}

/// The bytes of `config`.
pub fn config_space(source: &Source) -> Vec<u8> {
    let mut space = vec![0; 4096];
    header(&mut space, source);
    capabilities(&mut space, source.model);
    extended(&mut space, source);
    space
}

fn put16(space: &mut [u8], at: usize, value: u16) {
    space[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

fn put32(space: &mut [u8], at: usize, value: u32) {
    space[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn header(space: &mut [u8], source: &Source) {
    let model = source.model;
    // A virtual function's own ids read ffff (SR-IOV 1.1, 3.4.1.1); the kernel takes them from the physical function.
    let ids = if source.is_virtual { (0xffff, 0xffff) } else { (model.id.0, model.id.1) };
    put16(space, 0x00, ids.0);
    put16(space, 0x02, ids.1);
    put16(space, 0x04, 0x0006); // memory space, bus master
    put16(space, 0x06, 0x0010); // capabilities list
    let class = u32::from_str_radix(&model.class, 16).unwrap_or_default();
    put32(space, 0x08, class << 8 | u32::from(model.revision));
    space[0x0e] = u8::from(model.port.is_some());
    space[0x34] = PM as u8;
    if model.port.is_some() {
        return;
    }
    for bar in &model.bars {
        let base = source.bases.iter().find(|(index, _)| *index == bar.index).map_or(0, |(_, base)| *base);
        let at = if bar.index == 6 { 0x30 } else { 0x10 + 4 * usize::from(bar.index) };
        let flags = u32::from(!bar.memory) | u32::from(bar.wide) << 2 | u32::from(bar.prefetchable) << 3;
        put32(space, at, base as u32 | flags);
        if bar.wide {
            put32(space, at + 4, (base >> 32) as u32);
        }
    }
    put16(space, 0x2c, model.subsystem.0);
    put16(space, 0x2e, model.subsystem.1);
}

fn capabilities(space: &mut [u8], model: &Model) {
    space[PM] = 0x01; // power management
    space[PM + 1] = EXPRESS as u8;
    put16(space, PM + 2, 0x0003);
    space[EXPRESS] = 0x10; // PCI Express
    let kind = match model.port {
        None => 0x0,
        Some(Port::Root) => 0x4,
        Some(Port::Upstream) => 0x5,
        Some(Port::Downstream) => 0x6,
    };
    put16(space, EXPRESS + 2, 0x0002 | kind << 4);
    let flr = u32::from(model.reset.split(' ').any(|method| method == "flr"));
    put32(space, EXPRESS + 4, flr << 28); // device capabilities: function level reset
}

fn extended(space: &mut [u8], source: &Source) {
    let mut list: Vec<(u16, Vec<u8>)> = Vec::new();
    if let Some(serial) = source.placed.serial {
        list.push((0x0003, serial.to_le_bytes().to_vec()));
    }
    if let Some(acs) = &source.model.acs {
        let bits = acs_bits(acs);
        list.push((0x000d, [0x7f_u16.to_le_bytes(), bits.to_le_bytes()].concat()));
    }
    if let Some(sriov) = &source.model.sriov {
        list.push((0x0010, sriov_capability(sriov, source.placed.vfs, source.virtual_id)));
    }
    let mut at = FIRST_EXTENDED;
    let last = list.len().saturating_sub(1);
    for (index, (id, body)) in list.iter().enumerate() {
        let next = if index == last { 0 } else { (at + 4 + body.len()).next_multiple_of(16) };
        put32(space, at, u32::from(*id) | 1 << 16 | (next as u32) << 20);
        space[at + 4..at + 4 + body.len()].copy_from_slice(body);
        at = next;
    }
}

/// Bits of the ACS control register (`PCI_ACS_*`).
fn acs_bits(words: &str) -> u16 {
    let names = ["SV", "TB", "RR", "CR", "UF", "EC", "DT"];
    words.split_whitespace().filter_map(|word| names.iter().position(|name| *name == word)).map(|bit| 1 << bit).sum()
}

fn sriov_capability(sriov: &SriovModel, enabled: u16, device: u16) -> Vec<u8> {
    let mut body = vec![0; 0x3c];
    put16(&mut body, 0x04, if enabled > 0 { 0x0009 } else { 0 }); // control: VF enable and memory space
    put16(&mut body, 0x08, sriov.total); // initial
    put16(&mut body, 0x0a, sriov.total);
    put16(&mut body, 0x0c, enabled);
    put16(&mut body, 0x10, sriov.offset);
    put16(&mut body, 0x12, sriov.stride);
    put16(&mut body, 0x16, device);
    body
}
