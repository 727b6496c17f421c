#!/usr/bin/env python3
"""inventory: What gpuward says of each function is what lspci and sysfs say.

needs: 2 H100
"""

import json

import gpuward
import lib
from lib import device, equal, link, read

vfs = lib.virtual_functions(2)
lib.bind_to_vfio(vfs[0])
gpuward.start([('vendor = "10de"', "pool")])


def lspci(address):
    """`lspci -vmmk` of a function as a dictionary; `-n` and `-nn` need the same care."""
    lines = lib.sh(f"lspci -D -vmmk -s {address}").splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def group(address):
    return int(link(device(address, "iommu_group")))


listed = {entry["address"]: entry for entry in json.loads(lib.sh("gpuward --json list"))["devices"]}
lib.check("the H100s and the virtual functions are listed", set(lib.h100s() + vfs) <= set(listed), ", ".join(listed))
paths = gpuward.call(gpuward.ENTRY, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects")
for address, entry in listed.items():
    said = lspci(address)
    properties = paths[gpuward.device(address)][f"{gpuward.SERVICE}.Device"]
    equal(f"{address} vendor", said["Vendor"], entry["vendor"])
    equal(f"{address} model", said["Device"], entry["model"])
    equal(f"{address} driver by lspci", said.get("Driver"), entry["driver"])
    equal(f"{address} driver by sysfs", link(device(address, "driver")), entry["driver"] or "none")
    override = read(device(address, "driver_override"))
    equal(f"{address} driver_override", None if override == "(null)" else override, entry["driver-override"])
    equal(f"{address} IOMMU group", group(address), entry["group"])
    equal(f"{address} members of the group", sorted(path.name for path in device(address, "iommu_group/devices").iterdir()), sorted(entry["group-members"]))
    node = int(read(device(address, "numa_node")))
    equal(f"{address} NUMA node", None if node < 0 else node, entry["numa-node"])
    methods = device(address, "reset_method")
    equal(f"{address} reset methods", read(methods).split() if methods.exists() else [], entry["reset-methods"])
    for key, name in (("address", "Address"), ("vendor", "Vendor"), ("model", "Model"), ("identity", "Identity"), ("class", "Class")):
        equal(f"{address} {name} on the bus", entry[key], properties[name])
    other = "virtual-function" if device(address, "physfn").exists() else "physical-function"
    equal(f"{address} class", "gpu" if read(device(address, "class")).startswith("0x03") else other, entry["class"])
