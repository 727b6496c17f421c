#!/usr/bin/env python3
"""daemon-killed: Killing gpuwardd under a running machine changes nothing, and the next one adopts it.

needs: 1 H100
"""

import pathlib

import gpuward
import lib

[gpu] = lib.h100s()
gpuward.start([('vendor = "10de"', "on-demand")])
path = gpuward.machine("one", gpu)
gpuward.reports(path, 60)
leader = gpuward.leader(path)
claims = gpuward.get(path, "Machine", "Claims")
instance = gpuward.get(gpuward.ENTRY, "Manager", "InstanceId")
before = lib.host_state()

lib.sh("systemctl kill --signal=KILL --kill-whom=main gpuwardd.service")
lib.check("QEMU runs on", pathlib.Path(f"/proc/{leader}").exists())
lib.unchanged("nothing was touched", before)
lib.sh("systemctl start gpuwardd.service")
gpuward.ready()
lib.check("it is another daemon", gpuward.get(gpuward.ENTRY, "Manager", "InstanceId") != instance)
adopted = lib.eventually(30, lambda: gpuward.get(path, "Machine", "State") == "running")
lib.check("the machine runs", adopted, str(gpuward.get(path, "Machine", "State")))
lib.equal("it is the same process", leader, gpuward.leader(path))
lib.equal("it has the same claims", claims, gpuward.get(path, "Machine", "Claims"))
lib.equal("the device is running", "running", gpuward.state(gpu))
lib.unchanged("nothing was touched", before)
lib.sh("gpuward machine kill default/one; gpuward machine list; gpuward list")
lib.check("the adopted machine can be killed", not pathlib.Path(f"/proc/{leader}").exists())
