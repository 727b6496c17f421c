#!/usr/bin/env python3
"""pause-unit: A unit that holds a function is named, and where the configuration lets it be paused, it is, by systemd, and started again.

needs: nothing
"""

import pathlib

import gpuward
import lib

HOLDER = """
import os, time
try:
    os.open("/dev/vfio/{group}", os.O_RDWR)
except OSError as error:
    print(error)
time.sleep(3600)
"""

[vf] = lib.virtual_functions(1)
gpuward.start([('kind = "virtual-function"', "pool")])
lib.equal("it goes into the pool", "done", gpuward.move("assign", vf))
pathlib.Path("/run/holder.py").write_text(HOLDER.format(group=lib.link(lib.device(vf, "iommu_group"))))
pathlib.Path("/run/systemd/system/holder.service").write_text("[Service]\nExecStart=/usr/bin/python3 /run/holder.py\n")
lib.sh("systemctl daemon-reload; systemctl start holder.service")
held = lib.eventually(20, lambda: "holder.service" in lib.sh(f"gpuward --json show {vf}"))
lib.check("the unit is shown", held)
try:
    gpuward.move("release", vf)
    lib.check("a release is refused, and the unit named", False)
except gpuward.Refused as refused:
    lib.equal("a release is refused", "Held", refused.name)

config = pathlib.Path("/etc/gpuward/gpuward.toml")
config.write_text(config.read_text() + '[policy]\npause-units = ["holder.service"]\n')
lib.sh("systemctl reload gpuwardd.service; sleep 1")
plan = lib.sh(f"gpuward plan release {vf}")
lib.check("the plan shows that it is paused", "holder.service" in plan and "paused" in plan)
before = lib.sh("systemctl show --property=MainPID --value holder.service")
lib.equal("the function is released", "done", gpuward.move("release", vf))
lib.equal("it is the host's", "host", gpuward.state(vf))
lib.equal("the unit runs again", "active", lib.sh("systemctl is-active holder.service").strip())
after = lib.sh("systemctl show --property=MainPID --value holder.service")
lib.check("as another process", before != after, f"{before.strip()}, {after.strip()}")
