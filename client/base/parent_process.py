"""This process and the one that started it: it ends with that one, and tells it when it serves."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1
_PARENT = "BAGUA_PARENT"  # for a child alone, which takes it out of its environment


def environment_with_parent() -> dict[str, str]:
    """The environment of a child that is to ``die_with_parent``. It has this process's id: a child can't tell a parent
    that died during its imports from the process that adopted it."""
    return {**os.environ, _PARENT: str(os.getpid())}


def die_with_parent(number: int, parent: int = 0) -> bool:
    """Asks the kernel for signal ``number`` when the parent process dies. False if it has died already. ``parent``: its
    id, if that is known from before; else that of ``environment_with_parent``, or the parent of now."""
    parent = parent or int(os.environ.pop(_PARENT, "0")) or os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return os.getppid() == parent  # the parent may have died before the kernel was asked


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
