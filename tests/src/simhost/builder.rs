//! Lays the tree of a described host: `sys`, `proc`, `dev` and `lib/modules` as they are when it has booted.

use std::collections::BTreeSet;
use std::io;

use vfio::PciAddress;

use super::description::{BadDescription, BarSpec, Description, Model, Placed};
use super::function::{Laid, lay_function};
use super::tree::Tree;
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
        let physical = self.lay(address, placed, model, None)?;
        let Some(sriov) = &model.sriov else { return Ok(()) };
        let virtual_model = self.description.model_of(&sriov.model)?;
        let above = placed.path.rsplit_once('/').map_or("", |(above, _)| above);
        for number in 0..placed.vfs {
            let routing_id = u16::from(address.bus()) << 8 | u16::from(address.device()) << 3 | u16::from(address.function());
            let routing_id = routing_id + sriov.offset + sriov.stride * number;
            let [bus, devfn] = routing_id.to_be_bytes();
            let own = PciAddress::new(address.domain(), bus, devfn >> 3, devfn & 7)
                .ok_or_else(|| BadDescription(format!("{address} has no room for virtual function {number}")))?;
            let placed = Placed { numa: placed.numa, ..Placed::new(format!("{above}/{own}"), &sriov.model) };
            let laid = self.lay(own, &placed, virtual_model, Some(address))?;
            self.tree.link(format!("{}/virtfn{number}", physical.dir), &laid.dir)?;
            self.tree.link(format!("{}/physfn", laid.dir), &physical.dir)?;
        }
        Ok(())
    }

    fn lay(&mut self, address: PciAddress, placed: &Placed, model: &Model, of: Option<PciAddress>) -> Result<Laid, BuildError> {
        let bases: Vec<_> = model.bars.iter().map(|bar| (bar.index, self.space.place(bar))).collect();
        self.note_regions(address, placed, model, &bases);
        let virtual_id = match &model.sriov {
            Some(sriov) => self.description.model_of(&sriov.model)?.id.1,
            None => 0,
        };
        let group = self.description.iommu.then(|| placed.group.unwrap_or_else(|| self.next_group()));
        let laid = Laid { dir: format!("sys/devices/{}", placed.path), address, group, is_virtual: of.is_some(), virtual_id };
        lay_function(self.tree, &laid, placed, model, &bases)?;
        let driver = placed.driver.as_deref().or(model.driver.as_deref()).unwrap_or_default();
        if !driver.is_empty() {
            effects::attach(self.tree, &laid.dir, driver)?;
        }
        Ok(laid)
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
