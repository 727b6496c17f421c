"""What the cases share. A check prints `ok …` or `not ok …`; nothing else decides over a case.

A case that raises ends with a bad status and has failed too.
"""

import errno
import json
import mmap
import os
import pathlib
import re
import subprocess
import time

PCI = pathlib.Path("/sys/bus/pci")
# The igb network card, which has virtual functions and nothing that the guest needs.
IGB = "0000:01:00.0"

DOMAIN = """
<domain type='kvm'>
  <name>{name}</name><memory unit='MiB'>{memory}</memory><vcpu>1</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type><boot dev='hd'/></os>
  <features><acpi/><apic/></features><cpu mode='host-passthrough'/>
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='raw'/><source file='/var/lib/libvirt/images/{name}.img'/><target dev='vda' bus='virtio'/><readonly/>
    </disk>
    <serial type='pty'><log file='/var/log/libvirt/qemu/{name}-serial.log'/></serial>
    <hostdev mode='subsystem' type='pci' managed='no'><source>
      <address domain='0x0000' bus='0x{bus}' slot='0x{slot}' function='0x{function}'/>
    </source></hostdev>
    <memballoon model='none'/><video><model type='none'/></video>
  </devices>
</domain>
"""


def check(text, truth, detail=""):
    print(f"{'ok' if truth else 'not ok'} {text}{f': {detail}' if detail else ''}", flush=True)
    return truth


def equal(text, expected, actual):
    return check(text, expected == actual, f"{actual}" if expected == actual else f"expected {expected!r}, got {actual!r}")


def eventually(seconds, condition):
    """Whether the condition came true in time."""
    end = time.monotonic() + seconds
    while not (truth := condition()) and time.monotonic() < end:
        time.sleep(0.2)
    return truth


def sh(command, **options):
    """A shell command's output, which is printed too."""
    print(f"$ {command}", flush=True)
    done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    print(done.stdout, end="", flush=True)
    return done.stdout


def device(address, attribute=""):
    return PCI / "devices" / address / attribute


def read(path):
    return pathlib.Path(path).read_text().rstrip("\n")


def link(path):
    """The name that a link leads to, or `none`."""
    return os.path.basename(os.readlink(path)) if path.is_symlink() else "none"


def store(path, value):
    """One open(2) and write(2), as gpuward's: the name of the errno, or `ok`."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        return "open " + errno.errorcode[error.errno]
    try:
        os.write(fd, value.encode())
    except OSError as error:
        return errno.errorcode[error.errno]
    finally:
        os.close(fd)
    return "ok"


def h100s():
    return sorted(path.name for path in (PCI / "devices").iterdir() if read(path / "vendor") == "0x10de" and read(path / "device") == "0x2330")


def virtual_functions(count):
    """Makes them, without a driver, and returns their addresses."""
    assert store(device(IGB, "sriov_drivers_autoprobe"), "0") == "ok"
    assert store(device(IGB, "sriov_numvfs"), str(count)) == "ok"
    return [link(device(IGB, f"virtfn{number}")) for number in range(count)]


def bind_to_vfio(address):
    store(device(address, "driver_override"), "vfio-pci")
    store(PCI / "drivers_probe", address)


def create_domain(name, memory, address):
    """A plain domain, without gpuward, which boots a nested guest with a function; what virsh says."""
    xml = DOMAIN.format(name=name, memory=memory, bus=address[5:7], slot=address[8:10], function=address[11])
    pathlib.Path("domain.xml").write_text(xml)
    return sh("virsh create domain.xml")


def host_state():
    """All that assigning a function may move, of every function."""
    attributes = ("driver_override", "power/control", "d3cold_allowed", "reset_method", "enable", "sriov_numvfs", "sriov_drivers_autoprobe")
    state = {}
    for path in sorted((PCI / "devices").iterdir()):
        values = {name: read(path / name) for name in attributes if (path / name).exists()}
        state[path.name] = {"driver": link(path / "driver"), "group": link(path / "iommu_group"), **values}
    state["/dev/vfio"] = sorted(os.listdir("/dev/vfio"))
    return state


def unchanged(text, before, after=None):
    after = after or host_state()
    moved = [f"{name}: {before.get(name)} is now {after.get(name)}" for name in {**before, **after} if before.get(name) != after.get(name)]
    check(text, not moved, "; ".join(moved) or f"{len(before) - 1} functions compared")


def register(address, offset, value=None):
    """A 32-bit register of BAR 0, read after it was written."""
    control = read(device(address, "power/control"))
    store(device(address, "power/control"), "on")  # QEMU unmaps the BARs of a sleeping function
    store(device(address, "enable"), "1")
    fd = os.open(device(address, "resource0"), os.O_RDWR | os.O_SYNC)
    with mmap.mmap(fd, 16 << 20) as memory, memoryview(memory) as data, data.cast("I") as words:
        if value is not None:
            words[offset // 4] = value
        answer = words[offset // 4]
    os.close(fd)
    store(device(address, "enable"), "0")
    store(device(address, "power/control"), control)
    return f"{answer:#010x}"
