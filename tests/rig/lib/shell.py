"""The root shell in the guest, over a virtio port."""

import base64
import secrets
import sys
import time


class Shell:
    def __init__(self, connection):
        self.connection = connection
        self.connection.settimeout(1)

    def run(self, script, deadline=60, line=None):
        """Runs `script` and returns its status; each line of its output goes to `line(text)`, or to our output."""
        line = line or (lambda text: print(text, flush=True))
        mark = secrets.token_hex(8)
        body = base64.b64encode(script.encode()).decode()
        # The mark is split, so that an echo of the command is not taken for its end.
        self.connection.sendall(f"bash -c \"$(echo {body} | base64 -d)\" </dev/null 2>&1; echo {mark[:8]}''{mark[8:]} $?\n".encode())
        end = time.monotonic() + deadline
        for text in self._lines(end):
            before, found, status = text.partition(mark)
            if not found:
                line(text)
                continue
            if before:
                line(before)
            return int(status)

    def interactive(self):
        """Joins the terminal with a shell in the guest until it ends."""
        import os, select, termios, tty  # noqa: E401  only here

        terminal = sys.stdin.fileno()
        saved = termios.tcgetattr(terminal)
        self.connection.sendall(b"python3 -c 'import pty; pty.spawn([\"bash\", \"-i\"])'; echo SHELL''-ENDED\n")
        try:
            tty.setraw(terminal)
            while True:
                for source in select.select([terminal, self.connection], [], [])[0]:
                    if source is self.connection:
                        data = self.connection.recv(65536)
                        os.write(1, data)
                        if not data or b"SHELL-ENDED" in data:
                            return
                    else:
                        self.connection.sendall(os.read(terminal, 4096))
        finally:
            termios.tcsetattr(terminal, termios.TCSADRAIN, saved)

    def _lines(self, end):
        rest = b""
        while True:
            if time.monotonic() > end:
                raise TimeoutError(rest.decode(errors="replace"))
            try:
                data = self.connection.recv(65536)
            except TimeoutError:
                continue
            if not data:
                raise EOFError("the guest ended")
            *lines, rest = (rest + data).split(b"\n")
            yield from (text.decode(errors="replace").rstrip("\r") for text in lines)
