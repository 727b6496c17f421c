#!/usr/bin/env python3
"""claim-domain: a device claimed for a domain of virsh's: exactly that domain starts, its end frees the device, and a manual claim outlives it.

needs: nothing
"""

import json
import pathlib

import gpuward
import lib

OURS, OTHER = "6b2f5c1e-2f6a-4d55-9f0e-5c7f3f3f0001", "6b2f5c1e-2f6a-4d55-9f0e-5c7f3f3f0002"


def claims():
    return json.loads(lib.sh("gpuward claims --json"))["claims"]


def claim(*options):
    lib.sh(f"gpuward claim make --vf 1 --domain {OURS} {' '.join(options)}")
    made = claims()
    return made[0] if lib.equal("there is one claim", 1, len(made)) else None


def create(uuid, hostdev):
    """What virsh says to a domain with this UUID and these devices."""
    start, rest = lib.DOMAIN.split("<hostdev", 1)
    xml = start + hostdev + rest.split("</hostdev>", 1)[1]
    xml = xml.format(name="report", memory=64).replace("<memory", f"<uuid>{uuid}</uuid><memory", 1)
    pathlib.Path("domain.xml").write_text(xml)
    return lib.sh("virsh create domain.xml")


vf = lib.virtual_functions(1)[0]
gpuward.start([('kind = "virtual-function"', "pool")])
lib.equal("the device goes into the pool", "done", gpuward.move("assign", vf))

made = claim("--release domain-stopped")
lib.equal("it is claimed", "claimed", gpuward.state(vf))
hostdev = lib.sh(f"gpuward claim xml {made['claim']}")
answer = create(OTHER, hostdev)
lib.check("libvirt refuses another domain, in our words", "error" in answer and f"is held through gpuward by domain {OURS}" in answer)
lib.check("the domain that was named starts", "created" in create(OURS, hostdev))
lib.check("the device is in use", lib.eventually(30, lambda: gpuward.state(vf) == "running"))
refused = lib.sh(f"gpuward claim release {made['claim']}; echo status $?")
lib.check("its claim is not released meanwhile", "status 3" in refused)
lib.sh("virsh destroy report")
lib.check("its end frees the device", lib.eventually(60, lambda: gpuward.state(vf) == "free" and not claims()))

made = claim()
for _ in range(2):
    lib.check("the domain starts", "created" in create(OURS, hostdev))
    lib.check("the device is in use", lib.eventually(30, lambda: gpuward.state(vf) == "running"))
    lib.sh("virsh destroy report")
    lib.check("a manual claim outlives it", lib.eventually(30, lambda: gpuward.state(vf) == "claimed"))
released = lib.sh(f"gpuward claim release {made['claim']}; echo status $?")
lib.check("it ends when that is asked for", "status 0" in released and gpuward.state(vf) == "free")
