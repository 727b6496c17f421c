#!/usr/bin/env python3
"""quarantine: An H100 is reset, woken, kept out when it cannot be reset, taken off the bus and found again.

needs: 2 H100
"""

import json
import pathlib

import gpuward
import lib

gpu, other = lib.h100s()


def knob(name):
    return lib.device(gpu, name)


def ended(command):
    """The exit status of a command that is shown with what it prints."""
    return lib.sh(f"{command}; echo status $?").splitlines()[-1]


def last():
    """The last entry of the device's history of a reset or check, and its steps by name."""
    entries = json.loads(lib.sh(f"gpuward history {gpu} --json"))["entries"]
    entry = next(entry for entry in entries if any(key.startswith("step-") for key in entry["details"]))
    steps = [text for key, text in sorted(entry["details"].items()) if key.startswith("step-")]
    return entry["kind"], [step.partition(":")[0] for step in steps], steps


pathlib.Path("/etc/gpuward/gpuward.toml.d").mkdir(parents=True, exist_ok=True)
pathlib.Path("/etc/gpuward/gpuward.toml.d/policy.toml").write_text("format = 1\n[policy]\nremove-rescan = true\n")
gpuward.start([('vendor = "10de"', "pool")])
native = lib.link(knob("driver"))
gpuward.move("assign", gpu)

lib.equal("it is reset", "status 0", ended(f"gpuward reset {gpu}"))
kind, names, steps = last()
lib.equal("the history says so", "sanitised", kind)
lib.equal("step by step", ["wake", "before", "method", "reset", "wake", "answers", "regions", "after"], names)
lib.check("by its own function level reset", "reset: flr" in steps[3], steps[3])

lib.store(knob("power/control"), "auto")
lib.check("it sleeps", lib.eventually(5, lambda: lib.read(knob("power_state")) == "D3hot"), lib.read(knob("power_state")))
lib.equal("it is reset all the same", "status 0", ended(f"gpuward reset {gpu}"))
lib.equal("and stays awake", ("on", "D0", "0"), (lib.read(knob("power/control")), lib.read(knob("power_state")), lib.read(knob("d3cold_allowed"))))

methods = lib.read(knob("reset_method"))
lib.store(knob("reset_method"), "\n")
lib.equal("it cannot be reset", "status 1", ended(f"gpuward reset {gpu}"))
lib.equal("it is in quarantine", "quarantined", gpuward.state(gpu))
lib.sh("gpuward quarantine list")
lib.equal("it is not released", "status 3", ended(f"gpuward release {gpu}"))

lib.equal("it is found again", "status 0", ended(f"gpuward quarantine recover {gpu}"))
lib.equal("it is the host's, on the driver it had", ("host", native), (gpuward.state(gpu), lib.link(knob("driver"))))
lib.equal("the kernel has forgotten what it was told", methods, lib.read(knob("reset_method")))
lib.equal("it answers", "0x180000a1", lib.register(gpu, 0))
lib.equal("it goes into the pool again", "done", gpuward.move("assign", gpu))
lib.equal("and is reset there", "status 0", ended(f"gpuward reset {gpu}"))
lib.sh(f"gpuward history {gpu}")
lib.equal("the other one was left alone", "host", gpuward.state(other))
