//! Volumes that a machine names, and what backs them: all of it has to lie in its tenant's pools.
//!
//! A volume's header names what backs it, and whoever could once write the volume wrote the header: a guest makes an image of its raw disk
//! that is backed by a file of the host, and its owner starts it again as qcow2. So what backs a volume is looked up, judged, and
//! then given to libvirt as the whole chain: neither it nor QEMU reads the header for it any more.

use crate::failure::{ErrorKind, Failure};
use crate::libvirt::{Chain, Libvirt, LibvirtError, Volume};
use crate::spec::{Disk, DiskFormat, DiskSource, MachineSpec, TenantSpec};

/// What backs a disk, nearest first; `None` where libvirt finds that out by itself, of paths that an administrator named.
pub type BackedBy = Option<Vec<Link>>;

/// A volume that backs a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Where it is, by libvirt's word.
    pub path: String,
    /// A block device rather than a file.
    pub block: bool,
    /// How its bytes are laid out.
    pub format: DiskFormat,
}

/// What backs each disk of a machine of `tenant`.
///
/// # Errors
/// `PreflightFailed` where a volume is not there, or is or is backed by what the tenant may not have; or libvirt cannot be asked.
pub fn backing(libvirt: &Libvirt, spec: &MachineSpec, tenant: &TenantSpec) -> Result<Vec<BackedBy>, Failure> {
    backing_by(&|pool, volume| libvirt.chain(pool, volume), spec, tenant)
}

type Ask<'a> = dyn Fn(&str, &str) -> Result<Chain, LibvirtError> + 'a;

fn backing_by(ask: &Ask<'_>, spec: &MachineSpec, tenant: &TenantSpec) -> Result<Vec<BackedBy>, Failure> {
    let disks = spec.disks.iter().enumerate();
    disks.map(|(index, disk)| backed_by(ask, disk, tenant).map_err(|problem| problem.of(index, disk))).collect()
}

/// Why a disk cannot be.
enum Problem {
    Failed(Box<Failure>),
    Refused(String, &'static str),
}

impl Problem {
    fn of(self, index: usize, disk: &Disk) -> Failure {
        let name = match &disk.source {
            DiskSource::Volume { pool, volume } => format!("{pool}/{volume}"),
            DiskSource::Path(path) => path.clone(),
        };
        match self {
            Self::Failed(failure) => *failure,
            Self::Refused(why, remedy) => {
                Failure::new(ErrorKind::PreflightFailed, format!("disk[{index}].volume {name} {why}")).remedy(remedy)
            }
        }
    }
}

fn backed_by(ask: &Ask<'_>, disk: &Disk, tenant: &TenantSpec) -> Result<BackedBy, Problem> {
    let DiskSource::Volume { pool, volume } = &disk.source else { return Ok(None) };
    let refused = |why: &str, remedy| Err(Problem::Refused(why.into(), remedy));
    let chain = match ask(pool, volume).map_err(|error| Problem::Failed(Box::new(error.into())))? {
        Chain::Absent => {
            return refused("is not there", "make it, or refresh its pool (`virsh pool-refresh`) where it was made without libvirt");
        }
        Chain::Whole(chain) => Some(chain),
        Chain::Stray => None,
    };
    // QEMU reads no header of a raw disk.
    if disk.format == DiskFormat::Raw {
        return Ok(Some(Vec::new()));
    }
    // One answer for all that is not the tenant's: a header must not find out what others have.
    let Some([first, rest @ ..]) = chain.as_deref() else { return refused(FOREIGN, FLATTEN) };
    if rest.iter().any(|volume| !tenant.pools.has(&volume.pool)) {
        return refused(FOREIGN, FLATTEN);
    }
    if format_of(&first.format) != Some(DiskFormat::Qcow2) {
        let why = format!("is to be read as qcow2, and libvirt says it is {:?}", first.format);
        return Err(Problem::Refused(why, "say `format = \"raw\"`, or refresh its pool (`virsh pool-refresh`)"));
    }
    links(first, rest).map(Some)
}

const FOREIGN: &str = "is backed by what is not in a pool of the tenant's";
const FLATTEN: &str =
    "put what backs it into one of the tenant's pools and refresh that, or make the volume whole (`qemu-img rebase -b ''`)";

fn format_of(word: &str) -> Option<DiskFormat> {
    match word {
        "raw" => Some(DiskFormat::Raw),
        "qcow2" => Some(DiskFormat::Qcow2),
        _ => None,
    }
}

// Each as the volume before it says it is read; what is read as raw has no header.
fn links(first: &Volume, rest: &[Volume]) -> Result<Vec<Link>, Problem> {
    let said = [first].into_iter().chain(rest).filter_map(|volume| volume.backing.as_ref());
    let link = |(volume, said): (&Volume, &crate::libvirt::Backing)| {
        let format = format_of(&said.format).filter(|_| volume.kind == "file" || volume.kind == "block");
        let format = format.ok_or_else(|| {
            let why = format!("is backed by a {} of format {:?}", volume.kind, said.format);
            Problem::Refused(why, "only files and block devices of format raw or qcow2 can back a volume")
        })?;
        Ok(Link { path: volume.path.clone(), block: volume.kind == "block", format })
    };
    let mut links: Vec<_> = rest.iter().zip(said).map(link).collect::<Result<_, _>>()?;
    if let Some(raw) = links.iter().position(|link| link.format == DiskFormat::Raw) {
        links.truncate(raw + 1);
    }
    Ok(links)
}

#[cfg(test)]
mod tests;
