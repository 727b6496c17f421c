#!/usr/bin/env python3
"""assign-gpu: An H100 goes into the pool and back, and the host is as before.

needs: 2 H100
"""

import gpuward
import lib

gpu, other = lib.h100s()
gpuward.start([('vendor = "10de"', "pool")])
before = lib.host_state()
lib.equal("it is the host's", "host", gpuward.state(gpu))

lib.sh(f"gpuward plan assign {gpu}; gpuward assign {gpu}; gpuward list")
lib.equal("it is on vfio-pci", "vfio-pci", lib.link(lib.device(gpu, "driver")))
lib.equal("it is free", "free", gpuward.state(gpu))
after = lib.host_state()
lib.equal("nothing else moved", {gpu, "/dev/vfio"}, {name for name in before if before[name] != after[name]})

lib.equal("the job is done", "done", gpuward.move("release", gpu))
lib.unchanged("the host is as before", before)
lib.equal("it answers", "0x180000a1", lib.register(gpu, 0))
