"""The disk that brings the cases and gpuward into a restored guest: a tar, as large as the snapshot knows the disk to be."""

import os
import pathlib
import subprocess

import cache
import machine

PROFILE = "debug"


def build():
    command = ["cargo", "build", "--quiet", "--locked", "--package", "gpuward-manager", "--package", "gpuward-tests", "--bins"]
    subprocess.run(command, cwd=cache.TOP, check=True)


def target():
    return pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or cache.TOP / "target") / PROFILE


def fakegpu():
    return target() / "rig-fakegpu"


def install(destination):
    """What `make install` lays down, from this checkout."""
    make = ["make", "--silent", "install", f"PROFILE={PROFILE}", f"CARGO_TARGET={target().parent}", f"DESTDIR={destination}"]
    subprocess.run(make, cwd=cache.TOP, check=True)
    for program in destination.glob("usr/bin/*"):
        # Debug information is most of a program's size, and the guest reads slowly.
        subprocess.run(["strip", "--strip-debug", program], check=True)


def make(directory):
    """`payload.img` in `directory`."""
    build()
    tree = directory / "payload"
    tree.mkdir()
    (tree / "install").mkdir()
    install(tree / "install")
    subprocess.run(["cp", "-a", cache.RIG / "cases", tree / "cases"], check=True)
    image = directory / "payload.img"
    subprocess.run(["tar", "-C", tree, "--owner=0", "--group=0", "-c", "-f", image, "."], check=True)
    if image.stat().st_size > machine.PAYLOAD_SIZE:
        raise SystemExit(f"{image.stat().st_size} bytes do not fit on the payload disk of {machine.PAYLOAD_SIZE}")
    subprocess.run(["truncate", "-s", str(machine.PAYLOAD_SIZE), image], check=True)
    return image
