#!/usr/bin/env python3
"""vfs-restored: Virtual functions that gpuward made come back after their driver was loaded anew, and with them what was in the pool.

needs: nothing
"""

import gpuward
import lib

RULES = [(f'address = "{lib.IGB}"', "pool"), ('kind = "virtual-function"', "pool")]


def functions():
    return [lib.link(path) for path in sorted(lib.device(lib.IGB).glob("virtfn*"))]


gpuward.start(RULES)
before = lib.host_state()
lib.sh(f"modprobe igbvf; gpuward plan vfs {lib.IGB} 2; gpuward vfs set {lib.IGB} 2; gpuward vfs")
made = functions()
lib.equal("there are two", 2, len(made))
lib.equal("no host driver has them", ["none", "none"], [lib.link(lib.device(address, "driver")) for address in made])
lib.equal("nor would one that is loaded later", "0", lib.read(lib.device(lib.IGB, "sriov_drivers_autoprobe")))
lib.equal("one goes into the pool", "done", gpuward.move("assign", made[0]))
try:
    gpuward.wait(gpuward.call(gpuward.device(lib.IGB), "org.gpuward1.Sriov", "SetVfCount", "ua{sv}", 1, 0))
    lib.check("their number cannot change now", False)
except gpuward.Refused as refused:
    lib.check("their number cannot change now", refused.name == "Held" and made[0] in refused.message, str(refused))

lib.sh("modprobe -r igb; ls -d /sys/bus/pci/devices/0000:01:*; gpuward vfs")
lib.equal("without the driver they are gone", [], functions())
lib.sh("modprobe igb")
back = lib.eventually(60, lambda: gpuward.state(made[0]) == "free")
lib.sh("gpuward vfs; gpuward job list")
lib.check("the one in the pool is back", back, str(gpuward.state(made[0])))
lib.equal("so is the other", made, functions())
lib.equal("no host driver has it", "none", lib.link(lib.device(made[1], "driver")))

lib.equal("it can be released", "done", gpuward.move("release", made[0]))
lib.sh(f"gpuward vfs set {lib.IGB} 0; gpuward vfs")
lib.unchanged("the host is as before", before)
