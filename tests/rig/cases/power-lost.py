#!/usr/bin/env python3
"""power-lost: The power is cut in the middle of a hand-over: after the boot virtual functions, pool and claims are there before libvirt, by the ledger.

needs: a loss of power
"""

import json
import os
import pathlib
import sys

import gpuward
import lib

DOMAIN = "1b4e28ba-2fa1-41d2-883f-0016d3cca427"
NOTES = pathlib.Path("/var/tmp/power-lost.json")


def functions():
    return [lib.link(path) for path in sorted(lib.device(lib.IGB).glob("virtfn*"))]


def before():
    lib.sh("systemctl enable gpuward-pin.service gpuward-restore.service gpuwardd.service")
    gpuward.start([(f'address = "{lib.IGB}"', "pool"), ('kind = "virtual-function"', "pool")])
    os.sync()  # The system as installed; from here on only what gpuward itself syncs outlives the power.
    lib.sh(f"gpuward vfs set {lib.IGB} 3")
    pool, claimed, moving = functions()
    for address in (pool, claimed, moving):
        lib.equal(f"{address} goes into the pool", "done", gpuward.move("assign", address))
    lib.sh(f"gpuward claim make --device {claimed} --domain {DOMAIN}; gpuward list")
    lib.equal("one is claimed", "claimed", gpuward.state(claimed))
    fd = os.open(NOTES, os.O_WRONLY | os.O_CREAT)
    os.write(fd, json.dumps({"pool": pool, "claimed": claimed, "moving": moving, "boot": lib.read("/proc/sys/kernel/random/boot_id")}).encode())
    os.fsync(fd)
    gpuward.call(gpuward.device(moving), "org.gpuward1.Device", "Release", "a{sv}", 0)


def after():
    was = json.loads(NOTES.read_text())
    lib.check("it is another boot", lib.read("/proc/sys/kernel/random/boot_id") != was["boot"])
    gpuward.ready()
    lib.sh("journalctl --no-pager -o cat -u gpuward-pin.service -u gpuward-restore.service | tail -20; gpuward list; gpuward claims")
    lib.check("the virtual functions are there", lib.eventually(60, lambda: len(functions()) == 3), str(functions()))
    settled = lib.eventually(60, lambda: gpuward.state(was["pool"]) == "free" and gpuward.state(was["claimed"]) == "claimed")
    lib.check("the pool and the claim are what they were", settled, f"{gpuward.state(was['pool'])}, {gpuward.state(was['claimed'])}")
    lib.equal("they are on vfio-pci", ["vfio-pci"] * 2, [lib.link(lib.device(was[name], "driver")) for name in ("pool", "claimed")])
    claim = json.loads(lib.sh("gpuward --json claims"))["claims"]
    lib.check("the claim is the domain's", len(claim) == 1 and DOMAIN in json.dumps(claim))
    driver, state = lib.link(lib.device(was["moving"], "driver")), gpuward.state(was["moving"])
    lib.check("the one that moved is whole on one side", (state, driver) in (("free", "vfio-pci"), ("host", "none")), f"{state}, {driver}")
    lib.equal("no journal is left", [], os.listdir("/run/gpuward/journal") if os.path.exists("/run/gpuward/journal") else [])
    lib.check("no host driver had them", "igbvf" not in lib.sh("journalctl --no-pager -k -b -o cat | grep -i 'igbvf.*01:10' || true"))
    order = lib.sh("systemctl show --property=Before --value gpuward-restore.service")
    lib.check("all that comes before libvirt", "libvirtd.service" in order and "virtqemud.service" in order)
    # Where the card's driver came after the unit, the daemon makes its virtual functions: told, not judged.
    lib.sh("systemctl show --property=Result gpuward-restore.service")


{"before": before, "after": after}[sys.argv[1]]()
