"""``python -m bagua.daemon.node.keeper PID``: ends what runs below a daemon that can't do it itself.

A daemon that is stopped (SIGSTOP, a debugger, a terminal) ends no ranks when its lease is over; they would go on while
the coordinator runs their job elsewhere. This small process can. It reads deadlines from stdin, eight bytes each: a
double in seconds of CLOCK_BOOTTIME, the last one counts. At the deadline it writes the same eight bytes
to stdout, so that the daemon can tell why its ranks ended, and kills every process below the daemon. It ends with the
daemon: then stdin ends, and the kernel has killed the ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import struct
import sys
import time

from bagua.daemon.node import proc

DEADLINE = struct.Struct("d")
LOOK_S = 1.0  # between two looks at the clock: a suspended machine wakes up later than poll() believes
_KILL_S = 0.05  # between two looks at what is left


def main() -> None:
    """Until stdin ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    daemon = int(sys.argv[1])
    os.set_blocking(0, False)
    os.set_blocking(1, False)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    deadline = math.inf
    while True:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        try:
            deadline = _newest(deadline)  # after the look at the clock: this process may have been stopped itself
        except EOFError:
            return
        left = deadline - now
        if left <= 0 and kill_below(daemon, deadline) == 0:
            deadline = left = math.inf  # until the next one comes
        wait_s = _KILL_S if left <= 0 else min(left, LOOK_S)
        poll.poll(None if math.isinf(left) else math.ceil(wait_s * 1000))


def _newest(known: float) -> float:
    """The last deadline that lies in stdin, else ``known``. Raises EOFError when the daemon has gone."""
    try:
        while data := os.read(0, DEADLINE.size * 512):
            (known,) = DEADLINE.unpack(data[-DEADLINE.size :])
    except BlockingIOError:
        return known
    raise EOFError


def kill_below(daemon: int, deadline: float) -> int:
    """SIGKILL to every process below ``daemon`` but this one, because ``deadline`` has passed; returns how many."""
    found = [status.pid for status in proc.below(daemon) if status.pid != os.getpid()]
    if found:
        with contextlib.suppress(OSError):  # nobody has read for long, or nobody is there to read
            os.write(1, DEADLINE.pack(deadline))
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    if found:
        print(f"The daemon {daemon} could not renew its lease: {len(found)} processes are ended.", file=sys.stderr)
    return len(found)


if __name__ == "__main__":
    main()
