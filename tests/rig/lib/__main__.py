"""tests/rig/run: prepares the guest, runs cases in it, and closes with one line that counts them."""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import cache
import guest
import payload
import suite


def arguments(cases):
    parser = argparse.ArgumentParser(prog="tests/rig/run", description=__doc__)
    parser.add_argument("case", nargs="*", help=f"one of: {', '.join(case.name for case in cases)}")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--shell", action="store_true", help="a prompt in a restored guest with gpuward and the H100s that the named case has")
    parsed = parser.parse_args()
    unknown = set(parsed.case) - {case.name for case in cases}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    return parsed


def main():
    cases = suite.all_cases()
    wanted = arguments(cases)
    if wanted.list:
        for case in cases:
            print(f"{case.name}: {case.about}")
        return 0
    # SIGTERM leaves by the same way as Ctrl-C: through every `with`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = [case for case in cases if not wanted.case or case.name in wanted.case]
    with tempfile.TemporaryDirectory(prefix="gpuward-rig-") as directory:
        image = payload.make(pathlib.Path(directory))
        runner = suite.Suite(guest.ready(os.environ), image, payload.fakegpu())
        if wanted.shell:
            return shell(runner, chosen[0] if wanted.case else None)
        for case in chosen:
            runner.run(case)
    print(f"\n{runner.closing_line()}", flush=True)
    return 1 if runner.totals["failed"] else 0


def shell(runner, case):
    with runner.open(*((case.gpus(), case.foreign()) if case else ())) as opened:
        opened.shell.interactive()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except subprocess.CalledProcessError as error:
        sys.exit(f"rig: {' '.join(error.cmd[:4])} … ended with {error.returncode}")
