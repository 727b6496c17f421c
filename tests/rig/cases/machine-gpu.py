#!/usr/bin/env python3
"""machine-gpu: A machine with an H100 boots Linux, which reads the H100's registers; killing QEMU frees the H100.

needs: 2 H100
"""

import json
import os
import signal
import subprocess

import gpuward
import lib

gpu, other = lib.h100s()
gpuward.start([('vendor = "10de"', "pool")])
lib.equal("the H100 goes into the pool", "done", gpuward.move("assign", gpu))
path = gpuward.machine("train-1", gpu, image="linux", memory="256MiB")
lines = gpuward.reports(path, 150)
lib.check("the guest sees the H100", any("10de:2330 class 030200" in line for line in lines))
lib.check("the guest reads a register of it", any("GUEST-BOOT0 0x180000A1" in line for line in lines))
lib.sh("gpuward list; virsh list; tail -2 /var/log/libvirt/qemu/gpuward-*.log")

try:
    gpuward.move("release", gpu)
    lib.check("a device in use is not given back", False)
except gpuward.Refused as refused:
    lib.check("a device in use is not given back", refused.name in ("AlreadyClaimed", "Held"), str(refused))

os.kill(gpuward.leader(path), signal.SIGKILL)
gpuward.freed(path, gpu)
lib.equal("it stays in the pool", "vfio-pci", lib.link(lib.device(gpu, "driver")))

# What a simulated host cannot be asked: libvirt's word of QEMU, the widths of a real IOMMU, a real /proc.
findings = json.loads(subprocess.run(["gpuward", "--json", "preflight", "train-1"], capture_output=True, text=True).stdout)["findings"]
lib.sh("gpuward preflight train-1")
lib.equal("nothing speaks against another start", [], [found for found in findings if found["severity"] == "error"])
unknown = {found["code"] for found in findings if found["severity"] == "info"}
lib.check("libvirt, the IOMMU and memory are known", not unknown & {"hypervisor", "iommu-width", "free-memory", "mmio-window"}, unknown)
