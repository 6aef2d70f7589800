"""Changes the timeout of a group that exists: ``_set_pg_timeout`` of torch before 2.14 knows Gloo and NCCL alone."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

from bagua import csrc
from bagua.c10d.names import NAME


def install() -> None:
    """Makes torch's function change the timeout of our groups, too. Called once in a process."""
    original = getattr(distributed_c10d, "_set_pg_timeout", None)  # private, and may move: a test tells
    # Torch from 2.14 on has set_timeout, which asks backends.
    if original is None or hasattr(original, "_bagua") or hasattr(distributed_c10d, "set_timeout"):
        return

    @functools.wraps(original)
    def set_timeout(timeout: timedelta, group: Any = None) -> None:
        found = distributed.group.WORLD if group is None else group
        backends = _backends(found) if isinstance(found, distributed.ProcessGroup) else [None]
        # A list: each of ours is set, whatever the others are.
        if not all([_set(backend, timeout) for backend in backends]):
            original(timeout, group)

    set_timeout._bagua = True  # type: ignore[attr-defined]
    distributed_c10d._set_pg_timeout = set_timeout


def _backends(group: Any) -> list[Any]:
    """Backends of a group, without the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    found = [group._get_backend(device) for device in group._device_types]
    return [getattr(backend, "wrapped_pg", backend) for backend in found]


def _set(backend: Any, timeout: timedelta) -> bool:
    """Sets it. False: the backend is none of ours."""
    if backend is None or backend.name() != NAME:
        return False
    done: bool = csrc.load_c10d().set_timeout(backend, timeout)
    return done
