//! Lays the tree of a described host: `sys`, `proc`, `dev` and `lib/modules` as they are when it has booted.

use std::collections::BTreeSet;
use std::io;

use vfio::PciAddress;

use super::description::{BadDescription, BarSpec, Description, Model, Placed, SriovModel};
use super::function::{Laid, lay_function};
use super::tree::{PRIVATE, Tree};
use super::{drivers, effects, machine};

/// Why a host could not be laid.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The description is wrong.
    #[error("the host's description cannot be used")]
    Description(#[from] BadDescription),
    /// The file system refused.
    #[error("the host's tree cannot be laid")]
    Tree(#[from] io::Error),
}

/// Lays `description` below the root of `tree`.
///
/// # Errors
/// A description that contradicts itself, or the file system's failure.
pub fn lay(tree: &Tree, description: &Description) -> Result<(), BuildError> {
    machine::lay(tree, description)?;
    drivers::lay(tree, description.model.values().filter_map(|model| model.driver.as_deref()))?;
    let mut builder = Builder::new(tree, description);
    for placed in &description.function {
        builder.place(placed)?;
    }
    tree.write("proc/iomem", builder.iomem.join("\n") + "\n")?;
    for process in &description.process {
        machine::lay_process(tree, process)?;
    }
    Ok(())
}

struct Builder<'a> {
    tree: &'a Tree,
    description: &'a Description,
    groups: BTreeSet<u32>,
    space: AddressSpace,
    iomem: Vec<String>,
}

impl<'a> Builder<'a> {
    fn new(tree: &'a Tree, description: &'a Description) -> Self {
        let groups = description.function.iter().filter_map(|placed| placed.group).collect();
        Self { tree, description, groups, space: AddressSpace::default(), iomem: Vec::new() }
    }

    fn place(&mut self, placed: &Placed) -> Result<(), BuildError> {
        let model = self.description.model_of(&placed.model)?;
        let address = placed.address()?;
        let dir = format!("sys/devices/{}", placed.path);
        self.lay(&dir, address, placed, model)?;
        let group = self.description.iommu.then(|| placed.group.unwrap_or_else(|| self.next_group()));
        effects::appear(self.tree, &dir, group)?;
        let driver = placed.driver.as_deref().or(model.driver.as_deref()).unwrap_or_default();
        if !driver.is_empty() {
            effects::attach(self.tree, &dir, driver)?;
        }
        match &model.sriov {
            Some(sriov) => self.lay_virtual(address, placed, sriov),
            None => Ok(()),
        }
    }

    /// Lays every virtual function that can be, out of sight, and lets those appear that are enabled.
    fn lay_virtual(&mut self, physical: PciAddress, placed: &Placed, sriov: &SriovModel) -> Result<(), BuildError> {
        let model = self.description.model_of(&sriov.model)?;
        let dir = format!("sys/devices/{}", placed.path);
        for number in 0..sriov.total {
            let own = virtual_address(physical, sriov, number)?;
            let placed = Placed { numa: placed.numa, ..Placed::new(own.to_string(), &sriov.model) };
            self.lay(&effects::hidden(&dir, number, own), own, &placed, model)?;
        }
        for number in 0..placed.vfs {
            let group = self.description.iommu.then(|| self.next_group());
            let own = effects::appear_virtual(self.tree, &dir, number, group)?;
            if let Some(driver) = &model.driver {
                effects::attach(self.tree, &own, driver)?;
            }
        }
        Ok(())
    }

    fn lay(&mut self, dir: &str, address: PciAddress, placed: &Placed, model: &Model) -> Result<(), BuildError> {
        let bases: Vec<_> = model.bars.iter().map(|bar| (bar.index, self.space.place(bar))).collect();
        let is_virtual = dir.starts_with(PRIVATE);
        if !is_virtual {
            self.note_regions(address, placed, model, &bases);
        }
        let virtual_id = match &model.sriov {
            Some(sriov) => self.description.model_of(&sriov.model)?.id.1,
            None => 0,
        };
        let laid = Laid { dir: dir.into(), address, is_virtual, virtual_id };
        Ok(lay_function(self.tree, &laid, placed, model, &bases)?)
    }

    fn next_group(&mut self) -> u32 {
        let free = (0..).find(|number| !self.groups.contains(number)).unwrap_or_default();
        self.groups.insert(free);
        free
    }

    fn note_regions(&mut self, address: PciAddress, placed: &Placed, model: &Model, bases: &[(u8, u64)]) {
        for (bar, (_, base)) in model.bars.iter().zip(bases).filter(|(bar, _)| bar.memory) {
            self.iomem.push(format!("{base:08x}-{:08x} : {address}", base + bar.size - 1));
            if let Some(owner) = placed.claimed.get(&bar.index.to_string()) {
                let framebuffer = bar.size.min(8 << 20);
                self.iomem.push(format!("  {base:08x}-{:08x} : {owner}", base + framebuffer - 1));
            }
        }
    }
}

fn virtual_address(physical: PciAddress, sriov: &SriovModel, number: u16) -> Result<PciAddress, BadDescription> {
    let own = u16::from_be_bytes([physical.bus(), physical.device() << 3 | physical.function()]);
    let [bus, devfn] = (own + sriov.offset + sriov.stride * number).to_be_bytes();
    PciAddress::new(physical.domain(), bus, devfn >> 3, devfn & 7)
        .ok_or_else(|| BadDescription(format!("{physical} has no room for virtual function {number}")))
}

/// Hands out addresses, each region aligned to its size.
struct AddressSpace {
    ports: u64,
    low: u64,
    high: u64,
}

impl Default for AddressSpace {
    fn default() -> Self {
        Self { ports: 0x3000, low: 0x8000_0000, high: 0x200_0000_0000 }
    }
}

impl AddressSpace {
    fn place(&mut self, bar: &BarSpec) -> u64 {
        let next = match (bar.memory, bar.wide) {
            (false, _) => &mut self.ports,
            (true, false) => &mut self.low,
            (true, true) => &mut self.high,
        };
        let base = next.next_multiple_of(bar.size);
        *next = base + bar.size;
        base
    }
}
