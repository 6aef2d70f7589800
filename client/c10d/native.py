"""The C++ backend (csrc/c10d): built when it is first asked for, and made with this rank's channel to the daemon."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from bagua.base.errors import BuildError
from bagua.c10d.joining import Member


def load() -> Any:
    """The module ``bagua_c10d_native``. Raises BuildError."""
    raise BuildError("there is none yet")


def create(store: Any, rank: int, size: int, timeout: timedelta, member: Member) -> Any:
    """A ``c10d::Backend`` for one group."""
    raise NotImplementedError
