#!/usr/bin/env python3
"""assign-vf: A virtual function goes into the pool and back, and the host is as before.

needs: nothing
"""

import gpuward
import lib

vf, other = lib.virtual_functions(2)
gpuward.start([('kind = "virtual-function"', "pool")])
before = lib.host_state()
lib.equal("it is the host's", "host", gpuward.state(vf))

state = gpuward.move("assign", vf)
lib.equal("the job is done", "done", state)
lib.equal("it is on vfio-pci", "vfio-pci", lib.link(lib.device(vf, "driver")))
lib.equal("it is free", "free", gpuward.state(vf))
lib.check("its group has a VFIO node", lib.link(lib.device(vf, "iommu_group")) in lib.host_state()["/dev/vfio"])
after = lib.host_state()
lib.equal("nothing else moved", {vf, "/dev/vfio"}, {name for name in before if before[name] != after[name]})

lib.equal("the job is done", "done", gpuward.move("release", vf))
lib.equal("it is the host's", "host", gpuward.state(vf))
lib.unchanged("the host is as before", before)
