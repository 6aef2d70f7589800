"""A host's end of ``baguarun``: reads from standard input what to launch, launches it, and ends it when that closes.

The input is one line of JSON, {"arguments": […], "environment": {…}}. It stays open as long as the job may run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from threading import Thread
from typing import IO

STOP_PATIENCE_S = 10.0
"""Between SIGTERM and SIGKILL of the launcher."""


def main() -> int:
    """Returns the launcher's exit code, by the shell's convention."""
    # Without a buffer: its lock would be the thread's while the interpreter ends.
    source = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    line = source.readline()
    if not line.endswith(b"\n"):
        return 1  # the connection broke before the order was there
    order = json.loads(line)
    os.environ.update(order["environment"])
    command = [sys.executable, "-P", "-m", "bagua.distributed.launch", *order["arguments"]]
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    Thread(target=_end_with_input, args=(source, launcher), daemon=True).start()
    # sshd's own way to end a session: the input closes as well, and that ends the launcher in good order.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    code = launcher.wait()
    return 128 - code if code < 0 else code


def _end_with_input(source: IO[bytes], launcher: subprocess.Popen[bytes]) -> None:
    source.read()
    launcher.terminate()
    try:
        launcher.wait(STOP_PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
