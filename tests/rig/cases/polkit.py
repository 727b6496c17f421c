#!/usr/bin/env python3
"""polkit: An ordinary user may change nothing, see nothing and hear nothing; a member of the group may.

needs: nothing
"""

import subprocess
import time

import gpuward
import lib

vf, _ = lib.virtual_functions(2)
gpuward.start([('kind = "virtual-function"', "pool")])
before = lib.host_state()
MONITOR = "timeout 40 dbus-monitor --system \"type='signal',sender='org.gpuward1'\""
monitor = subprocess.Popen(["runuser", "-u", "alice", "--", "bash", "-c", MONITOR], stdout=subprocess.PIPE, text=True)
time.sleep(2)


def refused(text, *arguments, name="NotAuthorized"):
    try:
        answer = gpuward.call(*arguments, user="alice")
        lib.check(text, False, str(answer))
    except gpuward.Refused as refused:
        lib.check(text, refused.name.split(".")[-1] in (name, "AccessDenied"), str(refused))


lib.sh("id alice")
refused("alice cannot assign", gpuward.device(vf), f"{gpuward.SERVICE}.Device", "Assign", "a{sv}", 0)
refused("alice cannot list objects", gpuward.ENTRY, "org.freedesktop.DBus.ObjectManager", "GetManagedObjects")
refused("alice cannot introspect", gpuward.ENTRY, "org.freedesktop.DBus.Introspectable", "Introspect")
refused("alice cannot read a device", gpuward.device(vf), "org.freedesktop.DBus.Properties", "GetAll", "s", f"{gpuward.SERVICE}.Device")
lib.equal("the command says so by its exit status", "4", lib.sh(f"runuser -u alice -- gpuward assign {vf}; echo $?").splitlines()[-1])
lib.unchanged("nothing was touched", before)

lib.sh("usermod --append --groups gpuward alice; id alice")
job = gpuward.call(gpuward.device(vf), f"{gpuward.SERVICE}.Device", "Assign", "a{sv}", 0, user="alice")
lib.equal("a member of group gpuward may assign", "done", gpuward.wait(job)["state"])
monitor.terminate()
heard = [line for line in monitor.communicate()[0].splitlines() if "gpuward" in line and "NameAcquired" not in line]
lib.check("alice heard no signal while she was not one", not heard, " ".join(heard))
