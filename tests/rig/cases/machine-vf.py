#!/usr/bin/env python3
"""machine-vf: A machine with a virtual function boots as a nested guest that sees it; killing QEMU frees it.

needs: nothing
"""

import os
import pathlib
import signal

import gpuward
import lib

[vf] = lib.virtual_functions(1)
gpuward.start([('kind = "virtual-function"', "on-demand")])
before = lib.host_state()
path = gpuward.machine("one", vf, kind="vf")
lib.equal("the device is running", "running", gpuward.state(vf))
lines = gpuward.reports(path, 60)
lib.check("the guest sees the virtual function", any("8086:10ca" in line for line in lines))

pathlib.Path("domain.xml").write_text(gpuward.call(path, f"{gpuward.SERVICE}.Machine", "GetDomainXML", "a{sv}", 0))
lib.check("the domain is valid by this libvirt's schema", "validates" in lib.sh("virt-xml-validate domain.xml domain"))
lib.check("this libvirt turns it into a command line", "vfio-pci" in lib.sh("virsh domxml-to-native qemu-argv domain.xml"))

leader = gpuward.leader(path)
lib.check("Leader is QEMU", b"qemu-system" in pathlib.Path(f"/proc/{leader}/cmdline").read_bytes(), str(leader))
os.kill(leader, signal.SIGKILL)
gone = lib.eventually(60, lambda: gpuward.get(path, "Machine", "State") in ("off", "failed") and gpuward.state(vf) == "host")
lib.check("the device is the host's again", gone, f"{gpuward.state(vf)}, machine {gpuward.get(path, 'Machine', 'State')}")
lib.equal("the claim is gone", [], gpuward.get(path, "Machine", "Claims"))
lib.unchanged("the host is as before", before)
