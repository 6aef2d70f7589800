"""The C++ backend (csrc/c10d): built when it is first asked for, and made with this rank's channel to the daemon."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch

from bagua import csrc
from bagua.base.errors import BuildError, ServiceError
from bagua.c10d.joining import Member
from bagua.torch_api.comm.communicators import communicators
from bagua.torch_api.comm.transfer import ReduceOp
from bagua.torch_api.job.session import Session


def load() -> Any:
    try:
        return csrc.load_c10d()
    except csrc.BuildError as error:
        raise BuildError(str(error)) from error


def create(rank: int, size: int, timeout: timedelta, member: Member) -> Any:
    """A ``c10d::Backend`` for one group."""
    communicator = member.communicator
    hosts = member.session.membership.hosts
    process = member.session.keep(_Process)
    one_host = any(set(communicator.ranks) <= set(ranks) for ranks in hosts)
    return load().make(
        process.host,
        rank=rank,
        size=size,
        comm=communicator.id,
        generation=member.session.membership.generation,
        timeout=timeout,
        keeper=communicator,
        shut_down=member.shut_down,
        processes=[process.ids[rank] for rank in communicator.ranks] if one_host and process.ids else [],
    )


class _Process:
    """View that this process has of its session: its channel, and the processes of all ranks if those of each host
    may read each other's memory (``ids``, by rank; else empty). All ranks make theirs at the same point."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.host = load().Host(session.connection.native, self._describe)
        self._nonce = torch.tensor([int.from_bytes(os.urandom(7), "big")])
        self.ids = self._find_ids()

    def _describe(self) -> str:
        daemon = self._session.daemon
        try:
            return daemon.describe_waits() if daemon is not None else ""
        except ServiceError:
            return ""

    def _find_ids(self) -> list[int]:
        """Finds the process ids of the ranks of this host. An elastic job has none here, because its ranks change."""
        session, world = self._session, communicators(self._session).world
        if session.elastic or world.nranks() == 1:
            return []
        own = torch.tensor([os.getpid(), self._nonce.data_ptr(), int(self._nonce.item())])
        found = torch.empty(world.nranks(), 3, dtype=torch.int64)
        world.allgather(own, found)
        rank = session.membership.rank
        here = next(ranks for ranks in session.membership.hosts if rank in ranks)
        readable = torch.tensor([all(load().can_read(*found[other].tolist()) for other in here)], dtype=torch.uint8)
        world.allreduce_inplace(readable, ReduceOp.MIN)
        return [int(number) for number in found[:, 0]] if readable.item() else []
