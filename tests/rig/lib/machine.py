"""One QEMU: its command line, its monitor, and its end on every way out.

QEMU comes from the guest's own root file system and runs in it, in a mount namespace of its own that vanishes with
it, and is killed when the runner dies: no mount and no process can stay.
"""

import json
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time

import cache
from shell import Shell

# The disk with the cases and gpuward, as large in every run: the snapshot knows its size.
PAYLOAD_SIZE = 256 << 20
MEMORY = "3G"
# A boot takes a minute on two idle cores, and many on busy ones.
BOOT_SECONDS = 900
# Slots for hot-plugged H100s, with room for their BARs.
GPU_PORTS = ("hp0", "hp1")

# Units that only cost time under emulation: half of them each load a module that nothing here needs.
MASKED = """
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer
    getty@tty1.service serial-getty@ttyS0.service libvirt-guests.service systemd-networkd.service systemd-timesyncd.service
    modprobe@drm.service modprobe@efi_pstore.service modprobe@configfs.service modprobe@fuse.service modprobe@dm_mod.service
    modprobe@loop.service systemd-pstore.service systemd-random-seed.service sys-kernel-config.mount
    sys-fs-fuse-connections.mount sys-kernel-debug.mount sys-kernel-tracing.mount dev-mqueue.mount systemd-journal-flush.service
    ldconfig.service systemd-journal-catalog-update.service systemd-update-done.service systemd-binfmt.service dracut-shutdown.service
""".split()

# nouveau and nova_core would take a fake GPU.
KERNEL_LINE = " ".join([
    "root=/dev/vda console=ttyS0 quiet panic=-1 intel_iommu=on apparmor=1 security=apparmor mitigations=off nokaslr",
    "modprobe.blacklist=nouveau,nova_core systemd.wants=rig-agent.service",
    "systemd.default_timeout_start_sec=600 systemd.default_device_timeout_sec=600",
    *(f"systemd.mask={unit}" for unit in MASKED),
])  # fmt: skip

DEVICES = [
    "-device", "intel-iommu,intremap=on,caching-mode=on,device-iotlb=on",
    "-device", "virtio-blk-pci,drive=system,bus=pcie.0,addr=3",
    "-device", "virtio-blk-pci,drive=payload,bus=pcie.0,addr=4",
    "-device", "virtio-serial-pci,bus=pcie.0,addr=5",
    "-device", "virtserialport,chardev=shell,name=rig",
    "-device", "pcie-root-port,id=rp1,slot=1,bus=pcie.0,addr=6",
    "-device", "igb,bus=rp1,id=nic0,netdev=net0",
]  # fmt: skip
for number, port in enumerate(GPU_PORTS):
    DEVICES += ["-device", f"pcie-root-port,id={port},slot={16 + number},chassis={16 + number},bus=pcie.0,addr={7 + number},pref64-reserve=512M"]

MACHINE = [
    "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-smp", "2", "-m", MEMORY,
    "-machine", "q35,kernel-irqchip=split", "-nodefaults", "-no-reboot", "-display", "none", "-vga", "none",
    # With ACPI hot-plug a port never shows its link as up, and a bus reset fails.
    "-global", "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
    "-netdev", "user,id=net0,restrict=on",
]  # fmt: skip

# Before a command: even kill -9 of the runner leaves nothing running.
DIES_WITH_THE_RUNNER = ["setpriv", "--pdeathsig", "KILL"]


def description():
    """All of the machine that a snapshot depends on."""
    return json.dumps([MACHINE, DEVICES, KERNEL_LINE, PAYLOAD_SIZE])


def inside(root, binds, *command):
    """`command` in `root`, with `binds` (directory in the root: directory outside) in a private mount namespace."""
    mounts = ['mount -t proc proc "$0/proc"', 'mount --rbind /dev "$0/dev"']
    mounts += [f"mount --bind '{outside}' \"$0/{name}\"" for name, outside in binds.items()]
    script = "set -e; " + "; ".join(mounts) + '; exec chroot "$0" "$@"'
    return ["unshare", "--mount", "--propagation", "private", *DIES_WITH_THE_RUNNER, "sh", "-c", script, str(root), *command]


class Machine:
    """A QEMU with the guest; `with` ends it."""

    def __init__(self, root, state, payload):
        """`state` is the directory with initrd and snapshot, as seen in the root."""
        self.root = root
        self.state = state
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="gpuward-rig-"))
        subprocess.run(["cp", "--sparse=always", payload, self.directory / "payload.img"], check=True)
        self.process = None
        self.monitor = None
        self.shell = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def boot(self):
        """A cold start that keeps what it writes on the system disk."""
        self._start("", [])
        self._expect_console("RIG-READY", BOOT_SECONDS)
        self._connect()

    def restore(self):
        """A fresh guest from the snapshot, which is never written."""
        self._start(",snapshot=on", ["-incoming", "defer"])
        self.qmp("migrate-set-capabilities", capabilities=[{"capability": "mapped-ram", "state": True}])
        self.qmp("migrate-incoming", uri=f"file:{self.state}/ready.ram")
        self._await_status("inmigrate", 60)
        self.qmp("cont")
        self._connect()
        self.shell.run(f"date --set=@{int(time.time())} >/dev/null")

    def lose_power(self):
        """Resets the machine at once: what was not synced is lost, what is on its disk is not. Returns when it has booted."""
        self.qmp("set-action", reboot="reset")
        boots = self.console().count("RIG-READY")
        self.qmp("system_reset")
        end = time.monotonic() + BOOT_SECONDS
        while self.console().count("RIG-READY") == boots:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"it did not boot again:\n{self.console()[-3000:]}\n{self.output()}")
            time.sleep(0.2)
        self.shell.connection.close()
        self._connect()

    def save(self):
        """Freezes the guest as `ready.ram` beside its disk; it has ended afterwards."""
        self.qmp("stop")
        self.qmp("migrate-set-capabilities", capabilities=[{"capability": "mapped-ram", "state": True}])
        self.qmp("migrate", uri=f"file:{self.state}/ready.ram")
        while (status := self.qmp("query-migrate")["status"]) != "completed":
            if status == "failed":
                raise RuntimeError("QEMU could not save the guest")
            time.sleep(0.1)
        self.qmp("quit")
        self.process.wait(60)

    def add_gpu(self, name, port, shared):
        """Hot-plugs what the fake GPU server has on the socket `name`; the port takes the slot when function 0 comes."""
        socket_at = {"type": "unix", "path": f"/mnt/{name}"}
        self.qmp("device_add", driver="vfio-user-pci", id=name, bus=port, addr="0.0", multifunction=shared, socket=socket_at)

    def add_network_function(self, port, function):
        """Puts a network function into a slot which is still without its function 0."""
        self.qmp("device_add", driver="e1000e", id=f"{port}-{function}", bus=port, addr=f"0.{function}", multifunction=True)

    def console(self):
        path = self.directory / "console.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def qmp(self, command, **arguments):
        self.monitor.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self.monitor.flush()
        while line := self.monitor.readline():
            answer = json.loads(line)
            if "error" in answer:
                raise RuntimeError(f"QEMU refuses {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]
        raise RuntimeError(f"QEMU ended at {command}: {self.output()}")

    def _start(self, system, more):
        (kernel,) = (self.root / "boot").glob("vmlinuz-*")
        command = [
            "env", "TMPDIR=/mnt", "qemu-system-x86_64", *MACHINE,
            "-kernel", f"/boot/{kernel.name}", "-initrd", f"{self.state}/initrd", "-append", KERNEL_LINE,
            "-drive", f"if=none,id=system,file={self.state}/ready.qcow2,format=qcow2,cache=unsafe{system}",
            "-drive", "if=none,id=payload,file=/mnt/payload.img,format=raw,readonly=on",
            "-serial", "file:/mnt/console.log", "-qmp", "unix:/mnt/qmp,server=on,wait=off",
            "-chardev", "socket,id=shell,path=/mnt/shell,server=on,wait=off", *DEVICES, *more,
        ]  # fmt: skip
        command = inside(self.root, {"srv": cache.directory(), "mnt": self.directory}, *command)
        with open(self.directory / "qemu.log", "w") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.monitor = self._socket("qmp").makefile("rw")
        self.monitor.readline()
        self.qmp("qmp_capabilities")

    def _connect(self):
        self.shell = Shell(self._socket("shell"))

    def _socket(self, name):
        end = time.monotonic() + 30
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self.directory / name))
                return connection
            except OSError:
                connection.close()
                if self.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"QEMU did not start: {self.output()}") from None
                time.sleep(0.05)

    def _await_status(self, until_not, seconds):
        end = time.monotonic() + seconds
        while self.qmp("query-status")["status"] == until_not:
            if time.monotonic() > end:
                raise RuntimeError(f"QEMU is still in {until_not} after {seconds} s")
            time.sleep(0.05)

    def _expect_console(self, word, seconds):
        end = time.monotonic() + seconds
        while word not in self.console():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no {word} on the guest's console:\n{self.console()[-6000:]}\n{self.output()}")
            time.sleep(0.2)

    def output(self):
        return (self.directory / "qemu.log").read_text(errors="replace")[-2000:]
