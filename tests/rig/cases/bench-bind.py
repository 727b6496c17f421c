#!/usr/bin/env python3
"""bench-bind: How long a hand-over and a listing take by gpuward and by others, in one run: figures, and that all succeeded.

needs: nothing
"""

import statistics
import subprocess
import time

import gpuward
import lib
from lib import PCI, device, link, read, store

ROUNDS = 3


def run(command):
    done = subprocess.run(command, shell=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{command}: {done.stderr.strip()}", flush=True)
    return done.returncode == 0


def timed(work):
    started = time.monotonic()
    fine = work()
    return time.monotonic() - started, fine


def by_hand(address):
    """What all of them do in the end: the bare stores."""
    for override in ("vfio-pci", "\n"):
        store(device(address, "driver_override"), override)
        store(PCI / "drivers" / link(device(address, "driver")) / "unbind", address)
        store(PCI / "drivers_probe", address)
    return read(device(address, "driver_override")) == "(null)"


def is_back(address):
    """Whether its own driver has it, which is helped where somebody left it elsewhere or the driver refused it after a reset."""
    driver = link(device(address, "driver"))
    if driver == "igbvf":
        return True
    store(device(address, "driver_override"), "\n")
    if driver != "none":
        store(PCI / "drivers" / driver / "unbind", address)
    store(device(address, "reset"), "1")
    store(PCI / "drivers_probe", address)
    return link(device(address, "driver")) == "igbvf"


def figures(title, ways, before=lambda: True):
    """Each way in turn, so that what else the machine does hits all alike."""
    times = {name: [] for name in ways}
    failed = set()
    for _ in range(ROUNDS):
        for name, work in ways.items():
            lib.eventually(5, before)
            took, succeeded = timed(work)
            times[name].append(took)
            failed |= set() if succeeded else {name}
    medians = {name: statistics.median(took) for name, took in times.items()}
    ours = medians["gpuward"]
    text = ", ".join(f"{name} {median * 1000:.0f} ms" + (f" (gpuward takes {ours / median:.2f} of that)" if name != "gpuward" else "") for name, median in medians.items())
    # What others leave undone is told, and is not this case's to judge.
    lib.check(f"{title}, median of {ROUNDS}", "gpuward" not in failed, text + (f"; did not do it: {failed}" if failed else ""))


lib.sh("modprobe igbvf")
assert store(device(lib.IGB, "sriov_numvfs"), "1") == "ok"
vf = link(device(lib.IGB, "virtfn0"))
lib.eventually(10, lambda: link(device(vf, "driver")) == "igbvf")
node = "pci_" + vf.replace(":", "_").replace(".", "_")
gpuward.start([('kind = "virtual-function"', "pool")])
lib.sh("gpuward list; virsh nodedev-list --cap pci | head -3; driverctl --version")

figures("a function to vfio-pci and back", {
    "gpuward": lambda: run(f"gpuward assign {vf}") and run(f"gpuward release {vf}"),
    "driverctl": lambda: run(f"driverctl --nosave set-override {vf} vfio-pci && driverctl --nosave unset-override {vf}"),
    "virsh nodedev-detach and -reattach": lambda: run(f"virsh nodedev-detach {node} && virsh nodedev-reattach {node}"),
    "the bare stores": lambda: by_hand(vf),
}, lambda: is_back(vf))  # fmt: skip
figures("a list of devices", {
    "gpuward": lambda: run("gpuward list"),
    "virsh nodedev-list, -dumpxml each": lambda: run("for name in $(virsh nodedev-list --cap pci); do virsh nodedev-dumpxml $name || exit 1; done"),
    "lspci -vmmk": lambda: run("lspci -vmmk"),
})  # fmt: skip
