#!/usr/bin/env python3
"""foreign-in-group: An H100 whose IOMMU group holds a network card is refused, and the card is named.

needs: 2 H100, a foreign function
"""

import gpuward
import lib

alone, shared = lib.h100s()
foreign = shared[:-1] + "1"
lib.sh(f"lspci -nn -s {shared[:-2]}; ls {lib.device(shared, 'iommu_group/devices')}")
driver = lib.link(lib.device(foreign, "driver"))
lib.check("the network card is in its group and has a driver", lib.device(shared, f"iommu_group/devices/{foreign}").exists() and driver != "none", driver)
gpuward.start([('vendor = "10de"', "pool")])
before = lib.host_state()

try:
    state = gpuward.move("assign", shared)
    lib.check("it is refused at once", False, state)
except gpuward.Refused as refused:
    lib.equal("it is refused at once", "GroupShared", refused.name)
    lib.check("the refusal names the card and its driver", foreign in refused.message and driver in refused.message, refused.message)
lib.equal("the command says so by its exit status", "3", lib.sh(f"gpuward assign {shared}; echo $?").splitlines()[-1])
lib.unchanged("nothing was touched", before)
lib.equal("the other H100 is not concerned", "done", gpuward.move("assign", alone))
