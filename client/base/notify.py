"""Tells systemd how this process does (sd_notify): ready, reloading, stopping, and alive while a watchdog asks for it.

Where the process was not started by systemd (no NOTIFY_SOCKET), every call does nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import MutableMapping

BEATS = 3  # in each interval of the watchdog, so that a busy machine is no reason to be killed


class Notifier:
    """Takes its variables out of ``environment``: what this process starts must not speak in its name."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        interval = environment.pop("WATCHDOG_USEC", "")
        process = environment.pop("WATCHDOG_PID", "")
        # "@" stands for a name in the abstract namespace.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        # The variables may be those of a parent.
        asked = bool(address) and interval.isdecimal() and process in ("", str(os.getpid()))
        self.beat_s = int(interval) / 1e6 / BEATS if asked and int(interval) else math.inf
        """Seconds between two beats; infinite where nobody asks for them."""
        self._next_beat = 0.0

    def ready(self, status: str) -> None:
        """Tells systemd that the service does its work (again, after ``reloading``). ``status``: a line for `systemctl
        status`.
        """
        self._send("READY=1", f"STATUS={_line(status)}")

    def status(self, status: str) -> None:
        """A line for `systemctl status`."""
        self._send(f"STATUS={_line(status)}")

    def reloading(self) -> None:
        """Tells systemd that the service reloads; ``ready`` must follow."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now}")

    def stopping(self) -> None:
        """Tells systemd that the service was asked to end, and does."""
        self._send("STOPPING=1", "STATUS=stopping")

    def beat(self) -> float:
        """Says that this process lives, if it is time to; seconds until the next time (infinite: no watchdog)."""
        if math.isinf(self.beat_s):
            return math.inf
        now = time.monotonic()
        if now >= self._next_beat:
            self._send("WATCHDOG=1")
            self._next_beat = now + self.beat_s
        return self._next_beat - now

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        # A service goes on though nobody hears it.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as words:
            words.setblocking(False)  # systemd's queue may be full
            words.sendto("\n".join(lines).encode(), self._address)


def _line(text: str) -> str:
    return " ".join(text.split())  # one line: systemd reads assignments line by line
