#!/usr/bin/env python3
"""sim-rules: The rules that the simulated kernel (tests/simhost) answers by, asked of the real one; one line a rule.

needs: 2 H100, a foreign function
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import struct
import subprocess
import time

import lib
from lib import PCI, device, link, read, store

NIC = lib.IGB
PORT = "0000:00:06.0"  # the port above it: a driver without SR-IOV


def driver(address):
    return link(device(address, "driver"))


def observed(rule, expected, *answers):
    verdict = "ok" if answers == expected else "not ok"
    wanted = "" if verdict == "ok" else f" (expected: {', '.join(expected)})"
    print(f"{verdict} {rule}: {', '.join(answers)}{wanted}", flush=True)


def override(name):
    return store(device(NIC, "driver_override"), name + "\n")


def bind(name, address=NIC):
    return store(PCI / "drivers" / name / "bind", address)


def unbind(name, address=NIC):
    return store(PCI / "drivers" / name / "unbind", address)


def probe(address=NIC):
    return store(PCI / "drivers_probe", address)


def numvfs(count, address=NIC):
    return store(device(address, "sriov_numvfs"), count)


def binding_rules():
    observed("driver_override_reads_null_when_unset", ("(null)",), read(device(NIC, "driver_override")))
    observed("driver_override_does_not_unbind", ("ok", "igb"), override("vfio-pci"), driver(NIC))
    observed("bind_of_a_bound_device_is_ebusy", ("EBUSY", "igb"), bind("vfio-pci"), driver(NIC))
    observed("drivers_probe_of_a_bound_device_changes_nothing", ("ok", "igb"), probe(), driver(NIC))
    observed("unbind_from_another_driver_is_enodev", ("ENODEV", "igb"), unbind("vfio-pci"), driver(NIC))
    observed("unbind_takes_the_driver_away", ("ok", "none"), unbind("igb"), driver(NIC))
    observed("unbind_of_an_unbound_device_is_enodev", ("ENODEV",), unbind("igb"))
    observed("bind_against_the_override_is_enodev", ("ENODEV", "none"), bind("igb"), driver(NIC))
    observed("drivers_probe_binds_what_the_override_names", ("ok", "vfio-pci"), probe(), driver(NIC))
    observed("unbind_from_vfio_pci", ("ok", "none"), unbind("vfio-pci"), driver(NIC))
    observed("an_override_of_no_driver_is_stored", ("ok", "no-such-driver"), override("no-such-driver"), read(device(NIC, "driver_override")))
    observed("drivers_probe_succeeds_though_nothing_bound", ("ok", "none"), probe(), driver(NIC))
    observed("an_empty_override_clears_it", ("ok", "(null)"), override(""), read(device(NIC, "driver_override")))
    observed("bind_without_a_match_is_enodev", ("ENODEV", "none"), bind("vfio-pci"), driver(NIC))
    observed("bind_takes_a_matching_device", ("ok", "igb"), bind("igb"), driver(NIC))
    observed("bind_of_an_unknown_device_is_enodev", ("ENODEV",), bind("igb", "0000:7f:00.0"))
    observed("unbind_of_an_unknown_device_is_enodev", ("ENODEV",), unbind("igb", "0000:7f:00.0"))
    observed("drivers_probe_of_an_unknown_device_is_enodev", ("ENODEV",), probe("0000:7f:00.0"))
    observed("drivers_probe_of_junk_is_enodev", ("ENODEV",), probe("junk"))


def override_length_rules():
    page = os.sysconf("SC_PAGESIZE")
    for length in (page - 3, page - 2, page - 1, page, page + 1):
        answer = store(device(NIC, "driver_override"), "x" * length)
        print(f"# driver_override of {length} bytes: {answer}, reads {len(read(device(NIC, 'driver_override')))}")
    observed("driver_override_of_a_page_less_one_is_einval", ("EINVAL",), store(device(NIC, "driver_override"), "x" * (page - 1)))
    observed("a_refused_override_leaves_the_last", ("ok", "EINVAL", "vfio-pci"), override("vfio-pci"), store(device(NIC, "driver_override"), "x" * (page - 1)), read(device(NIC, "driver_override")))
    observed("driver_override_ends_at_the_first_newline", ("ok", "igb"), override("igb\nvfio-pci"), read(device(NIC, "driver_override")))
    override("")


def attribute_rules():
    control = device(NIC, "power/control")
    observed("power_control_refuses_junk", ("EINVAL", "on"), store(control, "junk"), read(control))
    observed("power_control_takes_auto_and_on", ("ok", "auto", "ok", "on"), store(control, "auto"), read(control), store(control, "on"), read(control))
    cold = device(NIC, "d3cold_allowed")
    observed("d3cold_allowed_refuses_junk", ("EINVAL", "1"), store(cold, "junk"), read(cold))
    observed("reset_refuses_other_than_1", ("EINVAL", "EINVAL"), store(device(NIC, "reset"), "0"), store(device(NIC, "reset"), "junk"))
    methods = read(device(NIC, "reset_method"))
    observed("reset_method_refuses_an_unknown_name", ("EINVAL", methods), store(device(NIC, "reset_method"), "junk"), read(device(NIC, "reset_method")))
    observed("an_empty_reset_method_disables_reset", ("ok", "", "ENOTTY"), store(device(NIC, "reset_method"), "\n"), read(device(NIC, "reset_method")), store(device(NIC, "reset"), "1"))
    observed("reset_method_default_restores", ("ok", methods), store(device(NIC, "reset_method"), "default"), read(device(NIC, "reset_method")))
    observed("a_missing_attribute_is_enoent_at_open", ("open ENOENT",), store(device(NIC, "no_such_attribute"), "1"))
    observed("a_read_only_attribute_is_eacces_at_open", ("open EACCES",), store(device(NIC, "vendor"), "1"))


def settled(path, wanted):
    """What `path` reads when it reads `wanted`, or after 2 s: a function falls asleep by itself."""
    for _ in range(20):
        if read(path) == wanted:
            break
        time.sleep(0.1)
    return read(path)


def power_rules():
    control, state = device(NIC, "power/control"), device(NIC, "power_state")
    override("vfio-pci")
    observed("unbind_leaves_a_function_awake", ("ok", "D0"), unbind("igb"), read(state))
    observed("a_power_control_set_before_vfio_pci_is_lost", ("on", "ok", "auto"), read(control), probe(), read(control))
    observed("vfio_pci_lets_an_idle_function_sleep", ("auto", "D3hot"), read(control), settled(state, "D3hot"))
    observed("power_control_on_wakes_a_function_of_vfio_pci", ("ok", "D0"), store(control, "on"), read(state))
    observed("power_control_auto_lets_it_sleep_again", ("ok", "D3hot"), store(control, "auto"), settled(state, "D3hot"))
    observed("unbind_from_vfio_pci_wakes_a_function_and_keeps_it_awake", ("ok", "on", "D0"), unbind("vfio-pci"), read(control), read(state))
    override("")
    probe()
    observed("a_host_driver_leaves_its_function_awake", ("igb", "D0"), driver(NIC), read(state))


def registers_are_in_place(address):
    """Whether configuration space begins with the ids, and its region registers have what `resource` says."""
    config = device(address, "config").read_bytes()
    if config[:2] != int(read(device(address, "vendor")), 16).to_bytes(2, "little"):
        return f"begins with {config[:4].hex()}"
    for index, line in enumerate(read(device(address, "resource")).splitlines()[:6]):
        base, _, flags = (int(word, 16) for word in line.split())
        register = int.from_bytes(config[16 + 4 * index : 20 + 4 * index], "little") & (~3 if flags & 0x100 else ~15)
        if base and register != base & 0xFFFFFFFF:
            return f"region {index} is at {register:#x}, not {base:#x}"
    return "True"


def reset_rules():
    override("vfio-pci")
    unbind("igb")
    probe()
    store(device(NIC, "power/control"), "on")
    observed("a_reset_leaves_ids_and_registers_in_place", ("ok", "True"), store(device(NIC, "reset"), "1"), registers_are_in_place(NIC))
    bridge = device(PORT, "reset_subordinate")
    observed("reset_subordinate_refuses_junk", ("EINVAL",), store(bridge, "junk"))
    observed("reset_subordinate_of_0_is_no_change", ("ok",), store(bridge, "0"))
    observed("reset_subordinate_leaves_what_is_below_in_place", ("ok", "True"), store(bridge, "1"), registers_are_in_place(NIC))
    observed("only_bridges_have_reset_subordinate", ("open ENOENT",), store(device(NIC, "reset_subordinate"), "1"))
    unbind("vfio-pci")
    override("")
    probe()


def removal_rules():
    remove, rescan = device(NIC, "remove"), PCI / "rescan"
    group, methods = link(device(NIC, "iommu_group")), read(device(NIC, "reset_method"))
    observed("remove_refuses_junk", ("EINVAL",), store(remove, "junk"))
    observed("remove_of_0_is_no_change", ("ok", "igb"), store(remove, "0"), driver(NIC))
    observed("rescan_refuses_junk", ("EINVAL",), store(rescan, "junk"))
    observed("rescan_changes_nothing_that_is_there", ("ok", "igb"), store(rescan, "1"), driver(NIC))
    told = override("vfio-pci"), store(device(NIC, "d3cold_allowed"), "0"), store(device(NIC, "reset_method"), "flr")
    observed("a_function_is_told_what_it_will_forget", ("ok", "ok", "ok"), *told)
    observed("remove_takes_a_function_off_the_bus", ("ok", "False"), store(remove, "1"), str(device(NIC).exists()))
    observed("rescan_finds_what_was_removed", ("ok", "True"), store(rescan, "1"), str(device(NIC).exists()))
    observed("what_is_found_again_is_offered_to_drivers", ("(null)", "igb"), read(device(NIC, "driver_override")), driver(NIC))
    forgot = read(device(NIC, "d3cold_allowed")), read(device(NIC, "reset_method"))
    observed("what_is_found_again_has_forgotten_its_knobs", ("1", methods), *forgot)
    observed("what_is_found_again_is_in_a_group_of_the_same_number", (group,), link(device(NIC, "iommu_group")))


def sriov_rules():
    total = int(read(device(NIC, "sriov_totalvfs")))
    observed("sriov_numvfs_refuses_junk", ("EINVAL",), numvfs("junk"))
    observed("sriov_numvfs_refuses_more_than_total", ("ERANGE", "0"), numvfs(str(total + 1)), read(device(NIC, "sriov_numvfs")))
    observed("sriov_numvfs_of_the_same_count_is_no_change", ("ok", "0"), numvfs("0"), read(device(NIC, "sriov_numvfs")))
    store(device(NIC, "sriov_drivers_autoprobe"), "0")
    observed("sriov_numvfs_makes_functions", ("ok", "2", "True"), numvfs("2"), read(device(NIC, "sriov_numvfs")), str(device(NIC, "virtfn1").is_symlink()))
    vf = link(device(NIC, "virtfn0"))
    print(f"# virtfn0 is {vf}, ids {read(device(vf, 'vendor'))} {read(device(vf, 'device'))}, group {os.path.basename(os.readlink(device(vf, 'iommu_group')))}, d3cold_allowed {read(device(vf, 'd3cold_allowed'))}, control {read(device(vf, 'power/control'))}")
    observed("vfs_stay_without_driver_with_autoprobe_off", ("none",), driver(vf))
    observed("drivers_probe_of_a_vf_with_autoprobe_off_binds_nothing", ("ok", "none"), probe(vf), driver(vf))
    observed("bind_of_a_vf_with_autoprobe_off_is_enodev", ("ENODEV", "none"), bind("igbvf", vf), driver(vf))
    observed("an_override_binds_a_vf_with_autoprobe_off", ("ok", "ok", "vfio-pci"), store(device(vf, "driver_override"), "vfio-pci"), probe(vf), driver(vf))
    group = link(device(vf, "iommu_group"))
    observed("a_bound_group_has_its_vfio_node", ("True",), str(pathlib.Path("/dev/vfio", group).exists()))
    observed("sriov_numvfs_again_is_no_change", ("ok", "2"), numvfs("2"), read(device(NIC, "sriov_numvfs")))
    observed("sriov_numvfs_of_another_count_is_ebusy", ("EBUSY", "2"), numvfs("1"), read(device(NIC, "sriov_numvfs")))
    observed("a_vf_has_no_remove", ("open ENOENT",), store(device(vf, "remove"), "1"))
    observed("sriov_numvfs_of_0_removes_functions", ("ok", "False"), numvfs("0"), str(device(vf).exists()))
    observed("a_group_without_device_loses_its_vfio_node", ("False",), str(pathlib.Path("/dev/vfio", group).exists()))
    store(device(NIC, "sriov_drivers_autoprobe"), "1")
    unbind("igb")
    observed("sriov_numvfs_without_driver_is_enoent", ("ENOENT",), numvfs("1"))
    override("vfio-pci")
    probe()
    observed("sriov_numvfs_of_vfio_pci_is_enoent", ("ENOENT", "vfio-pci"), numvfs("1"), driver(NIC))
    unbind("vfio-pci")
    override("")
    probe()


VFIO_SET_IOMMU, VFIO_GROUP_SET_CONTAINER, VFIO_GROUP_GET_DEVICE_FD = 0x3B66, 0x3B68, 0x3B6A
VFIO_TYPE1V2_IOMMU = 3


@contextlib.contextmanager
def opened(address):
    """The function as a process has it that runs a guest with it: container, group and device."""
    files = [os.open("/dev/vfio/vfio", os.O_RDWR), os.open("/dev/vfio/" + link(device(address, "iommu_group")), os.O_RDWR)]
    try:
        container, group = files
        fcntl.ioctl(group, VFIO_GROUP_SET_CONTAINER, struct.pack("i", container))
        fcntl.ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1V2_IOMMU)
        files.append(fcntl.ioctl(group, VFIO_GROUP_GET_DEVICE_FD, bytearray(address.encode() + b"\0")))
        yield
    finally:
        for fd in reversed(files):
            os.close(fd)


def reads(path):
    reader = subprocess.Popen(["cat", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return "answers" if reader.wait(2) == 0 else "fails"
    except subprocess.TimeoutExpired:
        return "waits"


def lock_rules():
    lib.bind_to_vfio(NIC) if unbind("igb") == "ok" else None
    with opened(NIC):
        writer = subprocess.Popen(["python3", "-c", f"import os; os.write(os.open('{PCI}/drivers/vfio-pci/unbind', os.O_WRONLY), b'{NIC}')"])
        time.sleep(2)
        # On Linux 6.12 `driver_override` waits too (driver_override_show takes the device's lock); on 7.3 it does not.
        for name in ("driver_override", "power/control", "d3cold_allowed", "config", "reset_method", "numa_node", "current_link_speed", "vendor"):
            print(f"# while a driver has the lock a read of {name} {reads(device(NIC, name))}")
        observed("a_read_of_sriov_numvfs_waits_for_the_devices_lock", ("waits",), reads(device(NIC, "sriov_numvfs")))
        observed("a_read_of_the_ids_does_not", ("answers",), reads(device(NIC, "vendor")))
    writer.wait(20)
    override("")
    probe()


def refusal_to_open(address):
    try:
        with opened(address):
            return "none"
    except OSError as error:
        return errno.errorcode[error.errno]


def holder_rules():
    shared = lib.h100s()[-1]
    neighbour = shared[:-1] + "1"
    observed("a_group_has_all_functions_of_a_slot_without_acs", (link(device(shared, "iommu_group")),), link(device(neighbour, "iommu_group")))
    native = driver(neighbour)
    lib.bind_to_vfio(shared)
    observed("a_group_with_a_host_driver_is_not_viable", ("EPERM",), refusal_to_open(shared))
    observed("unbind_of_the_neighbour", ("ok", "none"), unbind(native, neighbour), driver(neighbour))
    with opened(shared):
        observed("a_host_driver_is_refused_in_a_group_in_use", ("EBUSY", "none"), bind(native, neighbour), driver(neighbour))
        path = f"{PCI}/drivers/vfio-pci/unbind"
        writer = subprocess.Popen(["python3", "-c", f"import os; os.write(os.open('{path}', os.O_WRONLY), b'{shared}')"])
        try:
            waited = str(writer.wait(3))
        except subprocess.TimeoutExpired:
            waited = "waits"
        observed("unbind_waits_for_who_has_the_device_open", ("waits",), waited)
    observed("unbind_returns_when_the_device_is_closed", ("0", "none"), str(writer.wait(10)), driver(shared))
    observed("the_neighbour_can_be_bound_again", ("ok", native), bind(native, neighbour), driver(neighbour))


lib.sh("modprobe igbvf")
observed("the_host_is_as_expected", ("igb", "pcieport"), driver(NIC), driver(PORT))
binding_rules()
override_length_rules()
attribute_rules()
power_rules()
sriov_rules()
reset_rules()
removal_rules()
holder_rules()
lock_rules()
observed("the_host_is_as_before", ("igb", "(null)", "on", "0"), driver(NIC), read(device(NIC, "driver_override")), read(device(NIC, "power/control")), read(device(NIC, "sriov_numvfs")))
