#!/usr/bin/env python3
"""libvirtd-restarted: Restarting libvirtd under a running machine changes nothing; one that ends meanwhile is noticed.

needs: 1 H100
"""

import os
import pathlib
import signal

import gpuward
import lib

[gpu] = lib.h100s()
gpuward.start([('vendor = "10de"', "on-demand")])
path = gpuward.machine("one", gpu)
gpuward.reports(path, 60)
leader = gpuward.leader(path)

lib.sh("systemctl restart libvirtd.service")
again = lib.eventually(60, lambda: gpuward.get(path, "Machine", "State") == "running" and gpuward.get(gpuward.ENTRY, "Manager", "HostState") == "ready")
lib.check("the machine runs", again, str(gpuward.get(path, "Machine", "State")))
lib.equal("it is the same process", leader, gpuward.leader(path))
lib.check("QEMU runs on", pathlib.Path(f"/proc/{leader}").exists())
lib.equal("the device is running", "running", gpuward.state(gpu))

lib.sh("systemctl stop libvirtd.service libvirtd.socket libvirtd-ro.socket libvirtd-admin.socket")
os.kill(leader, signal.SIGKILL)
lib.check("the claim stays while libvirt cannot be asked", not lib.eventually(5, lambda: gpuward.get(path, "Machine", "Claims") == []))
lib.sh("systemctl start libvirtd.socket libvirtd.service")
gone = lib.eventually(60, lambda: gpuward.get(path, "Machine", "Claims") == [] and gpuward.state(gpu) == "host")
lib.check("the device is the host's again once libvirt answers", gone, str(gpuward.state(gpu)))
