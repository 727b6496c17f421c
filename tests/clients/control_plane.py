#!/usr/bin/python3
"""What a control plane does with a device: plan, apply exactly that plan, wait, look, give it back.

usage: control_plane.py ADDRESS DEVICE
"""

import sys

import dbus
import dbus.bus


class Service:
    def __init__(self, address):
        self.bus = dbus.bus.BusConnection(address)
        self.manager = self.interface("/org/gpuward1", "Manager")

    def interface(self, path, name):
        return dbus.Interface(self.bus.get_object("org.gpuward1", path, introspect=False), f"org.gpuward1.{name}")

    def property(self, path, name, member):
        proxy = self.bus.get_object("org.gpuward1", path, introspect=False)
        return proxy.Get(f"org.gpuward1.{name}", member, dbus_interface=dbus.PROPERTIES_IFACE)

    def finish(self, job):
        """Waits for a job and gives its outcome; never longer than what common clients wait for an answer."""
        while True:
            try:
                return self.interface(job, "Job").Wait({"timeout": dbus.UInt32(20)}, signature="a{sv}")
            except dbus.DBusException as error:
                if error.get_dbus_name() != "org.gpuward1.Error.DeadlineExceeded":
                    raise


def main():
    address, device = sys.argv[1:]
    service = Service(address)
    path = service.manager.GetDevice(device)
    goals = [{"goal": "assign", "device": device}]
    plan = service.manager.Plan(goals, {}, signature="aa{sv}a{sv}")
    assert plan["steps"] and not plan["refusals"], plan
    options = {"plan-digest": plan["digest"], "request-id": "control-plane-1"}
    job = service.manager.Apply(goals, options, signature="aa{sv}a{sv}")
    print("assign", service.finish(job)["state"], service.property(path, "Device", "State"))
    again = service.manager.Apply(goals, options, signature="aa{sv}a{sv}")
    print("the same request is", "the same job" if again == job else "another job")
    job = service.interface(path, "Device").Release({}, signature="a{sv}")
    print("release", service.finish(job)["state"], service.property(path, "Device", "State"))


main()
