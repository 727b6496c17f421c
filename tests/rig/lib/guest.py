"""The guest: Debian's root file system and a disk of it, its initrd, the nested guests, and a snapshot of it booted."""

import lzma
import pathlib
import shutil
import subprocess
import tempfile
import time

import cache
import machine

SUITE = "trixie"
MIRROR_SOURCES = (pathlib.Path("/etc/apt/sources.list.d"), pathlib.Path("/etc/apt/sources.list"))
DISK_SIZE = "3G"
# What the kernel needs to reach its root: the rest is loaded from there.
BOOT_MODULES = ("drivers/block/virtio_blk", "lib/crc/crc16", "fs/mbcache", "fs/jbd2/jbd2", "fs/ext4/ext4")


class Guest:
    """Paths of a guest that is ready to be restored."""

    def __init__(self, base, ready):
        self.base = base
        self.ready = ready
        self.root = base / "root"


def run(*command, **options):
    subprocess.run([str(word) for word in command], check=True, **options)


def mirror(environment):
    """A Debian mirror: `$MIRROR`, or the first one that this host's apt uses."""
    if environment.get("MIRROR"):
        return environment["MIRROR"]
    files = [p for source in MIRROR_SOURCES for p in (sorted(source.iterdir()) if source.is_dir() else [source]) if p.is_file()]
    for file in files:
        for line in file.read_text().splitlines():
            words = [w for w in line.split() if not w.startswith("[")]
            if words and words[0] in ("URIs:", "deb") and len(words) > 1 and words[1].endswith("/debian"):
                return words[1]
    raise SystemExit("no Debian mirror in this host's apt sources: set MIRROR")


def packages():
    lines = (cache.RIG / "guest/packages").read_text().splitlines()
    return " ".join(line for line in lines if not line.startswith("#")).split()


def make_base(work, url):
    """`root` and `disk.img`."""
    print(f"rig: building a Debian {SUITE} guest, about 2 minutes once", flush=True)
    run(
        "mmdebstrap", "--quiet", "--variant=minbase", "--include=" + ",".join(packages()),
        "--aptopt=APT::Install-Recommends \"false\"", f"--aptopt=APT::Default-Release \"{SUITE}-backports\"",
        SUITE, work / "root", f"deb {url} {SUITE} main", f"deb {url} {SUITE}-backports main",
    )  # fmt: skip
    shutil.rmtree(work / "root/var/cache/apt", ignore_errors=True)
    run("truncate", "-s", DISK_SIZE, work / "disk.img")
    run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0", "-O", "^has_journal", "-d", work / "root", work / "disk.img")


def archive(tree, target):
    """`tree` as a cpio archive that the kernel takes as an initrd."""
    with open(target, "wb") as out:
        names = subprocess.run(["find", ".", "-print0"], cwd=tree, check=True, capture_output=True).stdout
        run("cpio", "-0", "-o", "-H", "newc", "-R", "0:0", "--quiet", cwd=tree, input=names, stdout=out)


def busybox(tree, applets):
    for name in ("bin", "proc", "sys", "dev"):
        (tree / name).mkdir()
    shutil.copy("/bin/busybox", tree / "bin/busybox")
    for applet in applets.split():
        (tree / "bin" / applet).symlink_to("busybox")


def make_initrd(root, target):
    with tempfile.TemporaryDirectory() as directory:
        tree = pathlib.Path(directory)
        busybox(tree, "sh mount insmod sleep cp switch_root")
        (tree / "root").mkdir()
        (tree / "modules").mkdir()
        (kernel,) = (root / "lib/modules").iterdir()
        for number, module in enumerate(BOOT_MODULES):
            packed = kernel / "kernel" / f"{module}.ko.xz"
            (tree / f"modules/{number}.ko").write_bytes(lzma.decompress(packed.read_bytes()))
        shutil.copytree(cache.RIG / "guest/overlay", tree / "overlay")
        shutil.copy(cache.RIG / "guest/init", tree / "init")
        archive(tree, target)


def make_nested(root, work):
    """`nested.img`, a tar of the nested guests' disks: `report.img` (a boot sector) and `linux.img` (a kernel and an initrd under syslinux)."""
    nested = cache.RIG / "nested"
    images = work / "nested"
    images.mkdir()
    run("gcc", "-m32", "-c", "-o", work / "report.o", nested / "report.S")
    run("ld", "-m", "elf_i386", "-Ttext=0x7c00", "--oformat=binary", "-o", images / "report.img", work / "report.o")
    run("truncate", "-s", "1M", images / "report.img")
    with tempfile.TemporaryDirectory() as directory:
        tree = pathlib.Path(directory)
        busybox(tree, "sh mount cat cut devmem sleep")
        shutil.copy(nested / "linux-init", tree / "init")
        archive(tree, work / "linux-initrd")
    shutil.copy(nested / "syslinux.cfg", work)
    (kernel,) = (root / "boot").glob("vmlinuz-*")
    script = f"""
        image=/mnt/nested/linux.img
        truncate -s 32M $image
        mkfs.vfat -n RIG $image
        syslinux --install $image
        mcopy -i $image /mnt/syslinux.cfg ::syslinux.cfg
        mcopy -i $image /boot/{kernel.name} ::vmlinuz
        mcopy -i $image /mnt/linux-initrd ::initrd
    """
    run(*machine.inside(root, {"mnt": work}, "sh", "-ec", script), stdout=subprocess.DEVNULL)
    run("tar", "-C", images, "--sparse", "-c", "-f", work / "nested.img", ".")
    run("truncate", "-s", str(machine.PAYLOAD_SIZE), work / "nested.img")


def make_snapshot(base, work):
    """Boots the guest once, lets it settle and keeps it as `ready.ram` and `ready.qcow2`."""
    print("rig: booting the guest for a snapshot, about a minute once", flush=True)
    start = time.monotonic()
    make_initrd(base / "root", work / "initrd")
    make_nested(base / "root", work)
    disk = f"/srv/{base.name}/disk.img"
    run("qemu-img", "create", "-q", "-u", "-f", "qcow2", "-b", disk, "-F", "raw", work / "ready.qcow2", DISK_SIZE)
    booting = machine.Machine(base / "root", f"/srv/{work.name}", work / "nested.img")
    with booting:
        booting.boot()
        if booting.shell.run("/usr/local/lib/rig/settle", deadline=machine.BOOT_SECONDS):
            raise RuntimeError("the guest did not settle")
        booting.save()
    for leftover in ("nested", "nested.img", "linux-initrd", "syslinux.cfg", "report.o"):
        path = work / leftover
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    print(f"rig: snapshot taken after {time.monotonic() - start:.0f} s", flush=True)


def ready(environment):
    """The guest, built and booted where the cache has none like it."""
    url = mirror(environment)
    base = cache.made("base-" + cache.key(SUITE, DISK_SIZE, cache.RIG / "guest/packages"), lambda work: make_base(work, url))
    made_of = (base.name, machine.description(), *(cache.RIG / name for name in ("guest", "nested", "lib/guest.py")))
    snapshot = cache.made("guest-" + cache.key(*made_of), lambda work: make_snapshot(base, work))
    return Guest(base, snapshot)
