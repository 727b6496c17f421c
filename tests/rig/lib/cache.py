"""Where built things are kept: outside the checkout, each under the hash of what it is made of."""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import tempfile

RIG = pathlib.Path(__file__).resolve().parent.parent
TOP = RIG.parent.parent


def directory():
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    path = pathlib.Path(os.environ.get("GPUWARD_RIG_CACHE") or pathlib.Path(base) / "gpuward-rig")
    path.mkdir(parents=True, exist_ok=True)
    return path


def key(*parts):
    """The hash of texts, files and whole directories (names, modes and contents)."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(part.encode())
            continue
        for path in sorted([part, *part.rglob("*")] if part.is_dir() else [part]):
            digest.update(f"\0{path.relative_to(RIG)}\0{path.lstat().st_mode:o}\0".encode())
            if path.is_file():
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _lock(path):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made(name, make):
    """The directory `name` of the cache; `make(directory)` fills it where it is not there yet, all or nothing."""
    target = directory() / name
    with _lock(directory() / "lock"):
        if target.is_dir():
            return target
        for left_by_a_crash in directory().glob("making-*"):
            shutil.rmtree(left_by_a_crash)
        work = pathlib.Path(tempfile.mkdtemp(prefix="making-", dir=directory()))
        try:
            work.chmod(0o755)
            make(work)
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target
