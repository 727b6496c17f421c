#!/usr/bin/env python3
"""hook: libvirt refuses a foreign domain with a device of ours, by our hook and with our words.

needs: nothing
"""

import gpuward
import lib

vf, other = lib.virtual_functions(2)
gpuward.start([('kind = "virtual-function"', "pool")])
lib.equal("the device goes into the pool", "done", gpuward.move("assign", vf))
lib.sh("cat /run/gpuward/owned.json; ls -l /etc/libvirt/hooks/qemu.d/")

answer = lib.create_domain("report", 64, vf)
lib.check("libvirt refuses the domain", "error" in answer)
lib.check("the refusal is the hook's and names the device", vf in answer and "gpuward" in answer)
lib.check("nothing runs", not lib.sh("virsh --quiet list").strip())
lib.bind_to_vfio(other)
lib.check("a domain with a device that is not ours starts", "created" in lib.create_domain("report", 64, other))
lib.sh("virsh --quiet destroy report")
