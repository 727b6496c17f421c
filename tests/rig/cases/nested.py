#!/usr/bin/env python3
"""nested: The nested guests boot under plain libvirt and say which functions they were given.

needs: 1 H100
"""

import pathlib

import lib
from lib import check, eventually


def boot(name, memory, address, seconds):
    """The lines of the guest with this name."""
    lib.bind_to_vfio(address)
    lib.create_domain(name, memory, address)
    log = pathlib.Path(f"/var/log/libvirt/qemu/{name}-serial.log")
    check(f"{name} reports within {seconds} s", eventually(seconds, lambda: log.exists() and "GUEST-DONE" in log.read_text(errors="replace")))
    lines = lib.sh(f"grep -a GUEST {log}").splitlines()
    lib.sh(f"virsh --quiet destroy {name}")
    return [line.strip() for line in lines]


[vf] = lib.virtual_functions(1)
lines = boot("report", 64, vf, 60)
check("the boot sector sees the virtual function", any("8086:10ca" in line for line in lines))
lines = boot("linux", 256, lib.h100s()[0], 150)
check("Linux sees the H100", any("10de:2330 class 030200" in line for line in lines))
check("Linux reads a register of the H100", "GUEST-BOOT0 0x180000A1" in lines)
denied = lib.sh("dmesg | grep -E 'DENIED|WARNING|BUG:' || true")
check("the kernel has nothing to complain about", not denied)
