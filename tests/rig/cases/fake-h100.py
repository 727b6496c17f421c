#!/usr/bin/env python3
"""fake-h100: The hot-plugged H100s look and behave like PCI functions of their kind.

needs: 2 H100
"""

import lib
from lib import check, device, equal

SCRATCH = 0x1458

lib.sh("lspci -nn -d 10de:; lspci -vv -d 10de:2330 | grep -E 'Region|Capabilities|FLReset'")
for address in lib.h100s():
    equal(f"{address} has its class", "0x030200", lib.read(device(address, "class")))
    members = sorted(path.name for path in device(address, "iommu_group/devices").iterdir())
    equal(f"{address} is the only function of its IOMMU group", [address], members)
    equal(f"{address} can be reset", "flr bus", lib.read(device(address, "reset_method")))
    equal(f"{address} says what it is in BOOT_0", "0x180000a1", lib.register(address, 0))
    equal(f"{address} keeps a scratch register", "0x00001234", lib.register(address, SCRATCH, 0x1234))
    equal(f"{address} takes a reset", "ok", lib.store(device(address, "reset"), "1"))
    equal(f"{address} has lost the scratch register", "0x00000000", lib.register(address, SCRATCH))
serials = set(lib.sh("lspci -v -d 10de:2330 | grep 'Device Serial'").splitlines())
check("each has a serial number of its own", len(serials) == 2)
