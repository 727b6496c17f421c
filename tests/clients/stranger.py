#!/usr/bin/python3
"""Calls methods of the service as whoever runs it, and says how each call ended.

usage: stranger.py ADDRESS, with lines `PATH INTERFACE MEMBER SIGNATURE` on standard input (`-`: no arguments).
Prints for each line `MEMBER ERROR-NAME`, or `MEMBER answered`.
"""

import sys

import dbus
import dbus.connection

# An argument of each type that the interface takes. Every one is right as such: nobody is refused for the wrong reason.
ARGUMENTS = {
    "a{sv}": dbus.Dictionary({}, signature="sv"),
    "aa{sv}": dbus.Array([{"goal": "assign", "device": "0000:43:00.0"}], signature="a{sv}"),
    "s": "0000:43:00.0",
    "t": dbus.UInt64(1),
    "u": dbus.UInt32(1),
}


def arguments(signature, member):
    if member in ("Get", "GetAll"):
        # The signature is that of the interface whose properties are read.
        return [signature] + (["State"] if member == "Get" else [])
    return [ARGUMENTS[str(part)] for part in dbus.Signature(signature)]


def main():
    bus = dbus.bus.BusConnection(sys.argv[1])
    for line in sys.stdin:
        path, interface, member, signature = line.split()
        method = dbus.Interface(bus.get_object("org.gpuward1", path, introspect=False), interface).get_dbus_method(member)
        try:
            method(*arguments("" if signature == "-" else signature, member))
            print(member, "answered")
        except dbus.DBusException as error:
            print(member, error.get_dbus_name())


main()
