"""Makes the process groups that ``torch.distributed`` asks for: joins the job, finds the communicator, and gives the
C++ backend (csrc/c10d) this rank's channel to the daemon."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from bagua import csrc
from bagua.base.errors import BuildError, ServiceError
from bagua.c10d import agreement, ddp, joining, timeouts
from bagua.torch_api.comm.communicators import communicators
from bagua.torch_api.comm.transfer import ReduceOp
from bagua.torch_api.job.session import Session

LOG = logging.getLogger("bagua")


def create(options: Any, backend_options: Any = None) -> Any:
    """The creator that ``torch.distributed`` calls, on each member of a group.

    ``options``: a ``_DistributedBackendOptions``; its list of global ranks is empty for the default group. Returns a
    C++ ``Backend``. Raises ConfigError, ServiceError, CommunicationError, BuildError.
    """
    native = _native()  # first: the other ranks don't wait for one that can't build it
    member = joining.join(
        options.store,
        options.group_rank,
        options.group_size,
        list(options.global_ranks_in_group),
        str(options.group_id),
    )
    session, communicator = member.session, member.communicator
    if member.default:
        agreement.compare_new_groups(communicators(session).world)
        ddp.install()
        timeouts.install()
        if session.elastic and options.group_rank == 0:
            LOG.warning(
                "This job is elastic, but torch.distributed is not: when a rank is lost, operations raise an error "
                "that names it. with_bagua() is the way to go on without it."
            )
    process = session.keep(_Process)
    # Ranks of one host may copy from each other's memory.
    one_host = any(set(communicator.ranks) <= set(ranks) for ranks in session.membership.hosts)
    return native.make(
        process.host,
        rank=options.group_rank,
        size=options.group_size,
        comm=communicator.id,
        generation=session.membership.generation,
        timeout=options.timeout,
        keeper=communicator,
        shut_down=member.shut_down,
        processes=[process.ids[rank] for rank in communicator.ranks] if one_host and process.ids else [],
    )


def _native() -> Any:
    """The module of the backend, which is built when it is first asked for."""
    try:
        return csrc.load_c10d()
    except csrc.BuildError as error:
        raise BuildError(str(error)) from error


class _Process:
    """View that this process has of its session: its channel, and the processes of all ranks if those of each host
    may read each other's memory (``ids``, by rank; else empty). All ranks make theirs at the same point."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.host = _native().Host(session.connection.native, self._describe)
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
        # can_read tries whether it finds this number at this address.
        own = torch.tensor([os.getpid(), self._nonce.data_ptr(), int(self._nonce.item())])
        found = torch.empty(world.nranks(), 3, dtype=torch.int64)
        world.allgather(own, found)
        rank = session.membership.rank
        here = next(ranks for ranks in session.membership.hosts if rank in ranks)
        readable = torch.tensor([all(_native().can_read(*found[other].tolist()) for other in here)], dtype=torch.uint8)
        world.allreduce_inplace(readable, ReduceOp.MIN)
        return [int(number) for number in found[:, 0]] if readable.item() else []
