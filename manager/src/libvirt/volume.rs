//! Volumes of storage pools, and what backs them.

use std::time::Duration;

use roxmltree::{Document, Node};
use virt::connect::Connect;
use virt::error::{Error, ErrorNumber};
use virt::storage_vol::StorageVol;

use super::facts::child;
use super::{Libvirt, LibvirtError};

/// A look may wait for a pool that is being refreshed.
const LOOK: Duration = Duration::from_secs(30);
/// Longer chains are nobody's on purpose; libvirt's own limit is 200.
const LONGEST: usize = 32;

/// A volume as libvirt knows it since its pool was last refreshed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its pool.
    pub pool: String,
    /// Its name in the pool.
    pub name: String,
    /// Where it is on the host.
    pub path: String,
    /// What it is: `file`, `block`, `network`, … (`<volume type=…>`).
    pub kind: String,
    /// How its bytes are laid out: `raw`, `qcow2`, … (`<format type=…>`); empty where libvirt does not say.
    pub format: String,
    /// What its own header says it is backed by.
    pub backing: Option<Backing>,
}

/// What a volume's header says of what backs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// A path of the host, or an address of something else.
    pub path: String,
    /// How the bytes there are laid out, or what libvirt found there where the header does not say.
    pub format: String,
}

/// A volume with what backs it, in turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chain {
    /// libvirt has no such volume, or no such pool.
    Absent,
    /// It ends with one that nothing backs. The volume itself is the first.
    Whole(Vec<Volume>),
    /// It leads to a path that is no volume of any pool, or goes on for ever.
    Stray,
}

impl Libvirt {
    /// The volume `name` of `pool` with what backs it. No path of a caller's is looked at: each is what libvirt read out of a volume.
    ///
    /// # Errors
    /// As every call; a volume that is not there is no error.
    pub fn chain(&self, pool: &str, name: &str) -> Result<Chain, LibvirtError> {
        let (pool, name) = (pool.to_owned(), name.to_owned());
        self.call("look at a volume", LOOK, move |connect| {
            let first = connect.lookup_storage_pool_by_name(&pool).and_then(|pool| pool.lookup_storage_vol_by_name(&name));
            match first {
                Err(error) if is_absent(&error) => Ok(Chain::Absent),
                first => follow(connect, first?),
            }
        })
    }
}

fn follow(connect: &Connect, first: StorageVol) -> Result<Chain, Error> {
    let mut chain = Vec::new();
    let mut next = first;
    while chain.len() < LONGEST {
        let Some(volume) = describe(&next)? else { return Ok(Chain::Stray) };
        let backing = volume.backing.clone();
        chain.push(volume);
        let Some(Backing { path, .. }) = backing else { return Ok(Chain::Whole(chain)) };
        // A path that libvirt will not even look up is no volume's either.
        let Ok(found) = connect.lookup_storage_vol_by_path(&path) else { return Ok(Chain::Stray) };
        next = found;
    }
    Ok(Chain::Stray)
}

fn describe(volume: &StorageVol) -> Result<Option<Volume>, Error> {
    let (pool, name) = (volume.lookup_storage_pool()?.name()?, volume.name()?);
    Ok(read(&volume.xml_desc(0)?, pool, name, volume.path()?))
}

fn read(xml: &str, pool: String, name: String, path: String) -> Option<Volume> {
    let document = Document::parse(xml).ok()?;
    let root = document.root_element();
    let format = |of: Option<Node<'_, '_>>| {
        let format = of.and_then(|node| child(node, "format")).and_then(|format| format.attribute("type"));
        format.unwrap_or_default().to_owned()
    };
    let backing = child(root, "backingStore").map(|backing| {
        let path = child(backing, "path").and_then(|path| path.text());
        Backing { path: path.unwrap_or_default().to_owned(), format: format(Some(backing)) }
    });
    let kind = root.attribute("type").unwrap_or_default().to_owned();
    Some(Volume { pool, name, path, kind, format: format(child(root, "target")), backing })
}

fn is_absent(error: &Error) -> bool {
    [ErrorNumber::NoStoragePool, ErrorNumber::NoStorageVolume].into_iter().any(|absent| error.code() == absent.into())
}

#[cfg(test)]
mod tests;
