"""Joins this process to its job, and finds the communicator of a group of ``torch.distributed``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bagua.base.errors import ConfigError
from bagua.c10d import agreement
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.communicators import communicators
from bagua.torch_api.comm.members import hashed_number
from bagua.torch_api.job import environment, start
from bagua.torch_api.job.session import CURRENT, Session

DAEMON_SOCKET = start.DAEMON_SOCKET


@dataclass(frozen=True)
class Member:
    """Membership of this process in one group. ``communicator``: of the group's ranks, in their order, used by
    this group alone. ``default``: it is the default group."""

    session: Session
    communicator: Communicator
    default: bool

    def shut_down(self) -> None:
        """Ends, with the default group, the session that it began, if another one may follow. A process that a daemon
        started joins its job once.
        """
        self.communicator.destroy()
        if self.default and self.session is CURRENT.session and self.session.implicit and not _started_by_daemon():
            start.destroy_process_group()


def join(store: Any, rank: int, size: int, global_ranks: Sequence[int], name: str) -> Member:
    """The member that calls it. ``global_ranks`` is empty for the default group, which begins the session if there is
    none. Raises ConfigError, ServiceError, CommunicationError."""
    session = _current() if global_ranks else _session_for(store, rank, size)
    if not global_ranks and session.membership.island_size > 1:
        raise ConfigError(
            "torch.distributed's world is the island in this job: call bagua.init_process_group(), which makes it, "
            'and torch.distributed.new_group(backend="bagua") for a group over this backend. [BG410]'
        )
    # torch.distributed counts the ranks of this island alone, if there are several islands.
    ranks = [session.membership.island[rank] for rank in global_ranks or range(size)]
    if ranks != sorted(set(ranks)):
        raise ConfigError(
            f"The ranks of group {name!r} are {ranks}: they must be different, the smallest first. [BG410]"
        )
    made = communicators(session)
    if tuple(ranks) == made.world.ranks:
        communicator = Communicator(made.next_world_id(), ranks, session.membership.rank, session.connection)
    else:
        # torch counts groups anew after each default group, a session may outlive it, and members may change.
        key = f"{agreement.default_name()} {name}"
        number = hashed_number(f"{key} {made.count(key)} {ranks[0]}")  # each island has groups of these names
        communicator = Communicator(number, ranks, session.membership.rank, session.connection)
    return Member(session, communicator, not global_ranks)


def _current() -> Session:
    session = CURRENT.session
    if session is None or session.pid != os.getpid():
        raise ConfigError(
            'A group over the backend "bagua" needs a default group over it: call init_process_group("bagua"), or '
            '"cpu:bagua,cuda:nccl". [BG410]'
        )
    return session


def _started_by_daemon() -> bool:
    return bool(os.environ.get(DAEMON_SOCKET))


def _session_for(store: Any, rank: int, size: int) -> Session:
    """The session of this process, which begins if there is none."""
    session = CURRENT.session
    if session is not None and session.pid == os.getpid():
        place = (session.membership.rank, session.membership.world_size)
        if place != (rank, size) and session.implicit and not _started_by_daemon():
            start.destroy_process_group()  # of a default group before, which this torch ended without a word
            session = None
    if session is None or session.pid != os.getpid():
        environment.clear_place()
        _set_environment(rank, size)
        start.join(store, torch_wanted=False)
        session = _current()
        session.implicit = True
    found = session.membership
    if (found.rank, found.world_size) != (rank, size):
        raise ConfigError(
            f"torch.distributed was told rank {rank} of {size}, but this process is rank {found.rank} of "
            f"{found.world_size} of its job: leave rank and world_size to the environment. [BG410]"
        )
    return session


def _set_environment(rank: int, size: int) -> None:
    """Puts the rank of a process that has no daemon of its job into the environment. The environment's word on
    hosts holds unless it is about another job.
    """
    if _started_by_daemon():
        return
    place = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    if any(os.environ.get(name) != value for name, value in place.items()):
        # The old values are about another job: ranks count hosts anew.
        place |= {"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}
    environment.set_place(place)
