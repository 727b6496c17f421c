#!/usr/bin/env python3
"""stuck-unbind: A driver that never returns costs one virtual function: the daemon answers, others move, and its late end is told.

needs: nothing
"""

import json
import os
import subprocess
import sys
import time

import gpuward
import lib

HOLDER = """
import fcntl, mmap, os, struct, sys
address, group, mapped = sys.argv[1:]
container, group = os.open("/dev/vfio/vfio", os.O_RDWR), os.open("/dev/vfio/" + group, os.O_RDWR)
fcntl.ioctl(group, 0x3B68, struct.pack("i", container))
fcntl.ioctl(container, 0x3B66, 3)
device = fcntl.ioctl(group, 0x3B6A, bytearray(address.encode() + b"\\0"))
if mapped == "mapped":
    memory = mmap.mmap(device, 4096, trackfd=False)
    os.close(device)
os.close(group)
os.close(container)
print("ready", flush=True)
sys.stdin.read()
"""


def holder(address, how):
    """A process that has the function open by its device alone, or by a mapping of it alone; both are held by VFIO's own rules."""
    group = lib.link(lib.device(address, "iommu_group"))
    command = [sys.executable, "-c", HOLDER, address, group, how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    lib.equal(f"a process has it {how}", "ready\n", process.stdout.readline())
    return process


def let_go(process):
    process.stdin.close()
    process.wait(20)


def seconds(command):
    started = time.monotonic()
    lib.sh(command)
    return time.monotonic() - started


def answers(text):
    took = {name: seconds(f"gpuward {name} >/dev/null") for name in ("list", "job list")}
    lib.check(f"the daemon answers {text}", all(time < 5 for time in took.values()), str({name: f"{time:.1f} s" for name, time in took.items()}))


def history(address):
    return [entry["kind"] for entry in json.loads(lib.sh(f"gpuward --json history {address}"))["entries"]]


vf, other, third = lib.virtual_functions(3)
gpuward.start([('kind = "virtual-function"', "pool")])
lib.equal("it goes into the pool", "done", gpuward.move("assign", vf))

lib.sh("gpuward list")
process = holder(vf, "open")
try:
    gpuward.move("release", vf)
    lib.check("a release is refused while it is open", False)
except gpuward.Refused as refused:
    lib.check("a release is refused while it is open", refused.name == "Held" and f"[{process.pid}]" in refused.message, str(refused))
let_go(process)

# Of a mapping alone nothing is to be seen in /proc: the store is made, and waits in the kernel.
process = holder(vf, "mapped")
job = gpuward.call(gpuward.device(vf), "org.gpuward1.Device", "Release", "a{sv}", 0)
waits = lib.eventually(30, lambda: "driver/unbind" in lib.sh("cat /run/gpuward/stores/* 2>/dev/null"))
lib.check("a child waits in the kernel", waits)
stuck = os.listdir("/run/gpuward/stores")
answers("while the driver waits")
lib.equal("another one goes into the pool meanwhile", "done", gpuward.move("assign", other))
ended = gpuward.wait(job)
lib.check("the job ends as stuck after its deadline", ended.get("error", "").endswith("Stuck"), json.dumps(ended)[:300])
lib.equal("its function is stuck", "stuck", gpuward.state(vf))
answers("after that")
try:
    gpuward.wait(gpuward.call(gpuward.device(vf), "org.gpuward1.Device", "ClearQuarantine", "a{sv}", 0))
    lib.check("its quarantine cannot be cleared while it is", False)
except gpuward.Refused as refused:
    lib.equal("its quarantine cannot be cleared while it is", "Stuck", refused.name)

lib.check("the daemon restarts meanwhile", seconds("systemctl restart gpuwardd.service") < 30)
gpuward.ready()
lib.equal("it is stuck still", "stuck", gpuward.state(vf))
lib.equal("and its child is the same", stuck, os.listdir("/run/gpuward/stores"))
answers("after the restart")
lib.equal("a third one goes into the pool", "done", gpuward.move("assign", third))

let_go(process)
back = lib.eventually(20, lambda: gpuward.state(vf) == "quarantined")
lib.check("its late end is noticed", back, str(gpuward.get(gpuward.device(vf), "Device", "Reason")))
lib.equal("no child is left", [], os.listdir("/run/gpuward/stores"))
lib.check("its history tells it", "stuck-ended" in history(vf))
cleared = gpuward.wait(gpuward.call(gpuward.device(vf), "org.gpuward1.Device", "ClearQuarantine", "a{sv}", 0))
lib.equal("its quarantine can be cleared now", "done", cleared["state"])
lib.sh("gpuward list")
lib.equal("it goes into the pool again", "done", gpuward.move("assign", vf))
