"""This process and the one that started it: it ends with that one, and tells it when it serves."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int, parent: int = 0) -> bool:
    """Asks the kernel for signal ``number`` when the parent process dies. False if it has died already. ``parent``: its
    id, if that is known from before."""
    parent = parent or os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return os.getppid() == parent


def send_ready_line(descriptor: int | None, line: Mapping[str, str]) -> bool:
    """Writes one line of JSON, once, for whoever started this service. False if that has gone."""
    if descriptor is None:
        return True
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(line) + "\n")
    except OSError:
        return False
    return True
