"""Ports of loopback for servers that are started later, or again.

Whoever dials, or binds port 0, gets one from the kernel's range; in a run of many tests it may be the one that a server
has just left. So these lie below that range, where it leaves room.
"""

import contextlib
import random
import socket
from pathlib import Path

_LEAST = 10_000
_TRIES = 1000


def free_port():
    return free_ports(1)[0]


def free_ports(number):
    """Different ones that nobody has."""
    with contextlib.ExitStack() as stack:
        return [_bind(stack.enter_context(socket.socket())) for _ in range(number)]


def _bind(probe):
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first >= 2 * _LEAST:
        chance = random.SystemRandom()  # workers of one run have the same seed
        for _ in range(_TRIES):
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", chance.randrange(_LEAST, first)))
                return int(probe.getsockname()[1])
    probe.bind(("127.0.0.1", 0))
    return int(probe.getsockname()[1])
