"""Types of the module ``bagua_c10d_native`` (``bagua.csrc.load_c10d()``)."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from bagua.csrc import core

class Host:
    """This rank's channel, for all groups of the process. ``describe()`` says who waits for whom, in words."""

    def __init__(self, rank: core.Rank, describe: Callable[[], str]) -> None: ...

def make(
    host: Host,
    *,
    rank: int,
    size: int,
    comm: int,
    generation: int,
    timeout: timedelta,
    keeper: object,
    shut_down: Callable[[], object],
    processes: Sequence[int],
) -> Any:
    """A ``torch.distributed`` ``Backend`` over communicator ``comm``, whose ranks are in the group's order. ``keeper``
    lives as long as it. ``shut_down()`` is called when the group is destroyed by name. ``processes``: ids of the
    members' processes if they may read each other's memory, else none."""

def set_timeout(backend: Any, timeout: timedelta) -> bool:
    """Sets the timeout of operations that begin from now on. False: the backend is another one."""

def allocations() -> int:
    """Counts how often torch asked a backend for memory of the daemon."""

def can_read(process: int, address: int, nonce: int) -> bool:
    """True if this process may read that one's memory, and finds ``nonce``, of 64 bits, at that address."""

def keep_blocks() -> None:
    """From now on torch's memory on the CPU from 1 MiB on is kept when it is freed, for the next tensor of about
    that size. Memory in use and kept is never more than was in use at once before. Again: does nothing."""

def block_bytes() -> tuple[int, int, int]:
    """Bytes of such memory: in use, kept, and the most that were in use at once. Zeros before ``keep_blocks``."""
