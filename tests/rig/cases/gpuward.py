"""The shipped daemon as the cases see it: over the bus by `busctl`, and by the command `gpuward`."""

import json
import pathlib
import re
import subprocess

import lib

SERVICE = "org.gpuward1"
ENTRY = "/org/gpuward1"


class Refused(Exception):
    """An error reply: its name without prefix (`GroupShared`), and its text."""

    def __init__(self, name, message):
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message


def plain(value):
    """busctl's JSON without the types that it gives with each variant."""
    if isinstance(value, dict):
        return plain(value["data"]) if set(value) == {"type", "data"} else {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def call(path, interface, method, *signature_and_arguments, user="root"):
    """One method call by busctl, printed as a person would type it."""
    words = ["busctl", "--json=short", "--timeout=120", "call", SERVICE, path, interface, method, *map(str, signature_and_arguments)]
    print("$", " ".join(f"'{word}'" if "{" in word else word for word in words), flush=True)
    # The name of an error is in busctl's debug log only.
    command = ["runuser", "-u", user, "--", "env", "SYSTEMD_LOG_LEVEL=debug", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        name = re.findall(r"error-name=(\S+) error-message=(.*)", done.stderr)
        error, message = name[-1] if name else ("none", done.stderr)
        print(f"{error}: {message}", flush=True)
        raise Refused(error.removeprefix(f"{SERVICE}.Error."), message)
    answer = plain(json.loads(done.stdout)["data"]) if done.stdout.strip() else []
    print(json.dumps(answer)[:800], flush=True)
    return answer[0] if len(answer) == 1 else answer


def manager(method, *arguments, **options):
    return call(ENTRY, f"{SERVICE}.Manager", method, *arguments, **options)


def get(path, interface, name):
    done = subprocess.run(
        ["busctl", "--json=short", "get-property", SERVICE, path, f"{SERVICE}.{interface}", name],
        capture_output=True, text=True,
    )  # fmt: skip
    return plain(json.loads(done.stdout)) if done.returncode == 0 else None


def device(address):
    return f"{ENTRY}/device/pci_" + address.replace(":", "_").replace(".", "_")


def state(address):
    return get(device(address), "Device", "State")


def wait(job):
    """How a job ended."""
    return call(job, f"{SERVICE}.Job", "Wait", "a{sv}", 0)


def move(goal, address):
    """Assigns or releases a device and says how the job ended; a refusal, before or in the job, is raised."""
    ended = wait(call(device(address), f"{SERVICE}.Device", goal.capitalize(), "a{sv}", 0))
    if "error" in ended:
        raise Refused(ended["error"].removeprefix(f"{SERVICE}.Error."), ended["message"])
    return ended["state"]


def start(rules):
    """Starts the daemon as installed, with `[[devices]]` of these rules, and waits until it takes changes."""
    text = "format = 1\n" + "".join(f"[[devices]]\nmatch = {{ {match} }}\nuse = \"{use}\"\n" for match, use in rules)
    pathlib.Path("/etc/gpuward").mkdir(exist_ok=True)
    pathlib.Path("/etc/gpuward/gpuward.toml").write_text(text)
    print(text, end="", flush=True)
    lib.sh("systemctl start gpuwardd.service; systemctl --no-pager --lines=0 status gpuwardd.service | head -3")
    return ready()


def ready():
    fine = lib.eventually(40, lambda: get(ENTRY, "Manager", "HostState") == "ready")
    lib.check("the daemon is ready", fine, str(get(ENTRY, "Manager", "HostState")))
    if not fine:
        lib.sh("journalctl --no-pager -u gpuwardd.service | tail -40")
        raise SystemExit(1)


SPEC = """\
format = 1
name = "{name}"
vcpus = 1
memory = "{memory}"
firmware = "bios"
stop-deadline = 5

[[disk]]
path = "/var/lib/libvirt/images/{image}.img"
readonly = true

[[device]]
identity = "{identity}"
kind = "{kind}"
"""


def machine(name, address, image="report", memory="64MiB", kind="gpu"):
    """Creates a machine with one device and starts it; returns its path once libvirt reports it running."""
    spec = SPEC.format(name=name, memory=memory, image=image, kind=kind, identity=get(device(address), "Device", "Identity"))
    pathlib.Path("machine.toml").write_text(spec)
    lib.sh(f"cat machine.toml; gpuward machine create default/{name} -f machine.toml")
    # The daemon is ready before it has reached libvirt.
    lib.eventually(60, lambda: "cannot be reached" not in lib.sh(f"gpuward machine start default/{name}"))
    lib.sh("gpuward machine list")
    path = manager("GetMachine", "ss", "default", name)
    if not lib.equal(f"{name} runs", "running", get(path, "Machine", "State")):
        lib.sh("gpuward job list; journalctl --no-pager -u gpuwardd.service | tail -30; tail -5 /var/log/libvirt/qemu/gpuward-*.log")
        raise SystemExit(1)
    return path


def serial_log(path):
    """The log of the machine's serial port, as its domain names it."""
    xml = call(path, f"{SERVICE}.Machine", "GetDomainXML", "a{sv}", 0)
    return pathlib.Path(re.search(r"<log file='([^']*)'", xml).group(1))


def reports(path, seconds):
    """The lines that the guest wrote once it was done."""
    log = serial_log(path)
    done = lib.eventually(seconds, lambda: log.exists() and b"GUEST-DONE" in log.read_bytes())
    lib.check(f"the guest reports within {seconds} s", done)
    return lib.sh(f"cat {log}").splitlines()


def leader(path):
    return get(path, "Machine", "Leader")


def freed(path, address):
    """What must be true once a machine's QEMU has gone."""
    gone = lib.eventually(60, lambda: state(address) == "free" and get(path, "Machine", "State") == "off")
    lib.check("the device is free and the machine off", gone, f"{state(address)}, {get(path, 'Machine', 'State')}")
    lib.equal("the claim is gone", [], get(path, "Machine", "Claims"))
    lib.equal("the device says so too", "/", get(device(address), "Device", "Claim"))
