"""Cases: what each needs, one fresh guest for each, and what its lines say."""

import os
import re
import subprocess
import time

import cache
import machine

# The longest takes two minutes on busy cores.
CASE_SECONDS = 600
RESULT = re.compile(r"(ok|not ok|skip) \S")


class Case:
    """A program for the guest. Its leading comment says what it is about and, in a line `needs:`, what it needs."""

    def __init__(self, path):
        self.path = path
        self.name = path.stem
        head = path.read_text().split("\n\n")[0]
        found = re.search(rf"{re.escape(self.name)}: (.*)", head)
        needs = re.search(r"needs: (.*)", path.read_text())
        if not found or not needs:
            raise SystemExit(f"{path}: wants a first comment `{self.name}: …` and a line `needs: …`")
        self.about = found.group(1)
        self.needs = set(needs.group(1).split(", ")) - {"nothing"}

    def gpus(self):
        return max((int(need.split()[0]) for need in self.needs if need.endswith("H100")), default=0)

    def foreign(self):
        """Whether the last H100 shares its slot, and so its IOMMU group, with a network function."""
        return "a foreign function" in self.needs

    def loses_power(self):
        """Whether it is run as `CASE before`, and, when the power was lost and the guest has booted, as `CASE after`."""
        return "a loss of power" in self.needs


class Outcome:
    """The result lines of one case, and whether it passed, failed or was skipped."""

    def __init__(self):
        self.counts = {"ok": 0, "not ok": 0, "skip": 0}
        self.reason = None

    def line(self, text):
        print(text, flush=True)
        if found := RESULT.match(text):
            self.counts[found.group(1)] += 1
            if found.group(1) == "skip":
                self.reason = text.removeprefix("skip ")

    def verdict(self, status):
        """A case passes by saying so: silence, a failing line or a bad exit is a failure."""
        if status or self.counts["not ok"]:
            return "failed"
        if self.counts["skip"]:
            return "skipped"
        return "passed" if self.counts["ok"] else "failed"


def all_cases():
    """Every program in `cases/`; a module there is not executable."""
    return [Case(path) for path in sorted((cache.RIG / "cases").glob("*.py")) if os.access(path, os.X_OK)]


class FakeGpus:
    """The server of the fake H100s, on sockets in a machine's directory. It outlives the machine: QEMU hangs otherwise."""

    def __init__(self, program, directory, count):
        self.names = [f"gpu{number}" for number in range(count)]
        self.log = open(directory / "fakegpu.log", "w")
        command = [*machine.DIES_WITH_THE_RUNNER, program, directory, str(count)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        while not all((directory / name).exists() for name in self.names):
            if self.process.poll() is not None:
                raise RuntimeError(f"the fake GPU server ended: {(directory / 'fakegpu.log').read_text()}")
            time.sleep(0.02)

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


class Suite:
    def __init__(self, guest, payload, fakegpu):
        self.guest = guest
        self.payload = payload
        self.fakegpu = fakegpu
        self.totals = {"passed": 0, "failed": 0, "skipped": 0}

    def open(self, gpus=0, foreign=False):
        """A restored guest with the payload unpacked and `gpus` H100s plugged in."""
        return Opened(self, gpus, foreign)

    def run(self, case):
        print(f"\n=== {case.name}: {case.about}", flush=True)
        start = time.monotonic()
        outcome = Outcome()
        status = self._run_in_guest(case, outcome)
        verdict = outcome.verdict(status)
        self.totals[verdict] += 1
        reason = f": {outcome.reason}" if verdict == "skipped" else ""
        if verdict == "failed" and not outcome.counts["not ok"]:
            reason = f": exit status {status}, {outcome.counts['ok']} checks passed"
        print(f"=== {case.name} {verdict} in {time.monotonic() - start:.0f} s{reason}", flush=True)

    def _run_in_guest(self, case, outcome):
        try:
            with self.open(case.gpus(), case.foreign()) as guest:
                try:
                    return self._run_phases(case, guest, outcome)
                except (TimeoutError, EOFError) as error:
                    print(f"{guest.console()[-3000:]}\n{guest.output()}", flush=True)
                    outcome.line(f"not ok {type(error).__name__}: {error}")
        except RuntimeError as error:
            outcome.line(f"not ok {error}")
        return 1

    def _run_phases(self, case, guest, outcome):
        run = f"cd /rig/cases && exec ./{case.path.name}"
        if not case.loses_power():
            return guest.shell.run(run, deadline=CASE_SECONDS, line=outcome.line)
        status = guest.shell.run(f"{run} before", deadline=CASE_SECONDS, line=outcome.line)
        if status:
            return status
        print("=== the power is cut, and comes back", flush=True)
        guest.lose_power()
        return guest.shell.run(f"{run} after", deadline=CASE_SECONDS, line=outcome.line)

    def closing_line(self):
        return "rig: {passed} passed, {failed} failed, {skipped} skipped".format(**self.totals)


class Opened:
    def __init__(self, suite, gpus, foreign):
        self.suite = suite
        self.count = gpus
        self.foreign = foreign
        self.gpus = None
        self.machine = None

    def __enter__(self):
        guest = self.suite.guest
        self.machine = machine.Machine(guest.root, f"/srv/{guest.ready.name}", self.suite.payload)
        try:
            if self.count:
                self.gpus = FakeGpus(self.suite.fakegpu, self.machine.directory, self.count)
            self.machine.restore()
            if self.machine.shell.run("mkdir -p /rig && tar -x -f /dev/vdb -C /rig && /rig/cases/prepare", deadline=300):
                raise RuntimeError("gpuward could not be installed in the guest")
            if self.gpus:
                self._plug()
        except BaseException:
            self.__exit__()
            raise
        return self.machine

    def __exit__(self, *_):
        self.machine.__exit__()
        if self.gpus:
            self.gpus.stop()

    def _plug(self):
        last = self.gpus.names[-1]
        for name, port in zip(self.gpus.names, machine.GPU_PORTS):
            shared = self.foreign and name == last
            if shared:
                self.machine.add_network_function(port, 1)
            self.machine.add_gpu(name, port, shared)
        wait = f"for i in $(seq 300); do [ $(lspci -n -d 10de:2330 | wc -l) = {self.count} ] && exit; sleep 0.2; done; exit 1"
        if self.machine.shell.run(wait, deadline=120):
            raise RuntimeError("the hot-plugged H100s did not appear")
