"""Joins this process to its job, and finds the communicator of a group of ``torch.distributed``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from bagua.base.errors import ConfigError
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.communicators import communicators
from bagua.torch_api.join import start
from bagua.torch_api.join.session import CURRENT, Session


@dataclass(frozen=True)
class Member:
    """This process in one group. ``communicator``: of the group's ranks, in their order, used by this group alone.
    ``name``: of the group, in torch."""

    session: Session
    communicator: Communicator
    name: str


def join(store: Any, rank: int, size: int, global_ranks: Sequence[int], name: str, timeout: timedelta) -> Member:
    """The member that calls it. ``global_ranks`` is empty for the default group, which begins the session if there is
    none. Raises ConfigError, ServiceError, CommunicationError."""
    if not global_ranks:
        _begin(store, rank, size)
    session = _session()
    ranks = list(global_ranks) or list(range(size))
    made = communicators(session)
    if tuple(ranks) == made.world.ranks:
        communicator = made.attach(made.next_world_id(), ranks)
    else:
        key = f"c10d {name}"
        communicator = made.make(f"{key} {made.count(key)}", ranks)
    return Member(session, communicator, name)


def _session() -> Session:
    session = CURRENT.session
    if session is None or session.pid != os.getpid():
        raise ConfigError('The default group of torch.distributed must be one of "bagua", too, where a sub-group is.')
    return session


def _begin(store: Any, rank: int, size: int) -> None:
    """Begins the session of this process, unless it has one."""
    session = CURRENT.session
    if session is None or session.pid != os.getpid():
        _export(rank, size)
        start.join(store, torch_wanted=False)
        session = _session()
    found = session.membership
    if (found.rank, found.world_size) != (rank, size):
        raise ConfigError(
            f"torch.distributed was told rank {rank} of {size}, but this process is rank {found.rank} of "
            f"{found.world_size} of its job: leave rank and world_size to the environment."
        )


def _export(rank: int, size: int) -> None:
    """The environment says how many ranks a host has, unless it is that of another job."""
    if (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) != (str(rank), str(size)):
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            if "BAGUA_DAEMON_SOCKET" not in os.environ:
                os.environ.pop(name, None)
    if "BAGUA_DAEMON_SOCKET" not in os.environ:
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)
