#!/usr/bin/env python3
"""two-daemons: Of daemons started at once exactly one serves; the others say why, and store nothing.

needs: nothing
"""

import subprocess

import gpuward
import lib

[vf] = lib.virtual_functions(1)
gpuward.start([('kind = "virtual-function"', "pool")])
gpuward.move("assign", vf)
lib.sh("systemctl stop gpuwardd.service")
before = lib.host_state()

daemons = [subprocess.Popen(["/usr/bin/gpuwardd"], stderr=subprocess.PIPE, text=True) for _ in range(4)]
gpuward.ready()
lib.eventually(20, lambda: sum(daemon.poll() is None for daemon in daemons) == 1)
ended = [daemon for daemon in daemons if daemon.poll() is not None]
lib.equal("one serves, and three have ended", 3, len(ended))
for daemon in ended:
    said = daemon.stderr.read().strip().splitlines()[-1]
    lib.check("each says why", daemon.returncode == 1 and ("another gpuwardd runs here" in said or "org.gpuward1" in said), said)
lib.equal("the device is free", "free", gpuward.state(vf))
lib.unchanged("nothing was touched", before)
lib.equal("the one that serves works", "done", gpuward.move("release", vf))
for daemon in daemons:
    daemon.terminate()
    daemon.wait(20)
