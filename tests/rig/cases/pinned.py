#!/usr/bin/env python3
"""pinned: What gpuward owns is kept from the host's driver by udev and at boot, and restored by the unit before libvirt.

A virtual function of the igb card appears as at a boot: its driver igbvf is not loaded, and udev loads it for the very event. The guest is
not restarted for that, which takes minutes under emulation: the ledger is made to be of an earlier boot instead.

needs: nothing
"""

import json
import pathlib

import gpuward
import lib
from lib import device, link, read

PINNED = pathlib.Path("/run/gpuward/pinned")
LEDGER = pathlib.Path("/var/lib/gpuward/ledger.json")


def driver(address):
    return link(device(address, "driver"))


def appear():
    """The virtual function comes with autoprobe on, as drivers make it, and udev is done with it."""
    assert lib.store(device(lib.IGB, "sriov_drivers_autoprobe"), "1") == "ok"
    assert lib.store(device(lib.IGB, "sriov_numvfs"), "1") == "ok"
    lib.sh("udevadm settle")
    return link(device(lib.IGB, "virtfn0"))


def vanish():
    assert lib.store(device(lib.IGB, "sriov_numvfs"), "0") == "ok"
    lib.sh("udevadm settle; modprobe -r igbvf")


def of_an_earlier_boot():
    ledger = json.loads(LEDGER.read_text())
    for record in ledger["devices"].values():
        record["boot"] = "earlier"
    LEDGER.write_text(json.dumps(ledger))


lib.sh("udevadm control --reload; modprobe -r igbvf")
vf = appear()
lib.equal("without pins udev has igbvf loaded, which takes it", "igbvf", driver(vf))
gpuward.start([('kind = "virtual-function"', "pool")])
lib.equal("it goes into the pool", "done", gpuward.move("assign", vf))
pins = lib.sh("cat /var/lib/gpuward/pins").splitlines()
lib.check("it is pinned by slot and ids", len(pins) == 1 and pins[0].startswith("pci0000:00/06.0/") and pins[0].endswith(" 8086:10ca:1af4:1100 vfio-pci"), str(pins))
lib.sh("systemctl stop gpuwardd.service")
vanish()

lib.equal("it is back at its address", vf, appear())
lib.check("udev has igbvf loaded again", pathlib.Path("/sys/bus/pci/drivers/igbvf").exists())
lib.equal("and igbvf has not got it", ("none", "vfio-pci"), (driver(vf), read(device(vf, "driver_override"))))
lib.check("the kernel's log says why", f"gpuward: {vf} (" in lib.sh("dmesg | grep gpuward:"))
lib.equal("what was kept is noted", pins, PINNED.read_text().splitlines())

PINNED.unlink()
lib.store(device(vf, "driver_override"), "\n")
lib.sh("systemctl start gpuward-pin.service; systemctl --no-pager status gpuward-pin.service | head -5")
lib.equal("the unit at boot keeps it too", ("none", "vfio-pci"), (driver(vf), read(device(vf, "driver_override"))))

of_an_earlier_boot()
lib.sh("systemctl start gpuward-restore.service; journalctl --no-pager -o cat MESSAGE_ID=3f1d7c0b6a1e4f0d9c52a4f0f6b1d201")
lib.equal("the unit has succeeded", "success", lib.sh("systemctl show -P Result gpuward-restore.service").strip())
lib.equal("it is bound, and no driver of the host has had it", "vfio-pci", driver(vf))
lib.check("the note was looked at", not PINNED.exists())
order = lib.sh("systemctl show -P Before gpuward-restore.service").split()
lib.check("libvirt waits for it", {"libvirtd.service", "virtqemud.service"} <= set(order), " ".join(order))
lib.sh("systemctl start gpuwardd.service")
gpuward.ready()
lib.equal("it is free", "free", gpuward.state(vf))
history = lib.sh(f"gpuward history {vf}")
lib.check("a slow reader is not taken for somebody who moved it", "bound to vfio-pci, not to vfio-pci" not in history)

lib.equal("it goes back to its driver", ("done", "igbvf"), (gpuward.move("release", vf), driver(vf)))
lib.equal("nothing is pinned any more", "", pathlib.Path("/var/lib/gpuward/pins").read_text())
lib.sh("systemctl stop gpuwardd.service")
lib.store(device(vf, "driver/unbind"), vf)
pathlib.Path("/etc/gpuward/pins").write_text(pins[0] + "\n")
pathlib.Path("/var/lib/gpuward/pins").unlink()
lib.sh("/usr/lib/gpuward/pin")
lib.equal("an old copy in an initramfs keeps it all the same", "vfio-pci", read(device(vf, "driver_override")))
lib.sh("systemctl start gpuwardd.service")
gpuward.ready()
lib.equal("the next start gives it back", ("igbvf", "(null)"), (driver(vf), read(device(vf, "driver_override"))))
