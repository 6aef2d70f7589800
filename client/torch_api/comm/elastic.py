"""Communicators of an elastic job: all-reduce, broadcast and barrier are repeated when a member was lost."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua.algorithms.codec import Codec
from bagua.base.errors import MembershipChanged
from bagua.torch_api.comm.checks import check_root
from bagua.torch_api.comm.commit.retry import Units, nothing
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.members import world_number
from bagua.torch_api.comm.transfer import Carried, ReduceOp, check_tensor
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.job.connection import Connection, Regrouped
from bagua.torch_api.job.session import Session


class ElasticCommunicator(Communicator):
    """``Communicator``. Inside a unit of something else all operations raise Regrouped, and are repeated with
    it."""

    def __init__(
        self,
        id: int,
        ranks: Sequence[int],
        global_rank: int,
        connection: Connection,
        units: Units,
        shrinks: bool,
        grows: bool,
    ) -> None:
        super().__init__(id, ranks, global_rank, connection)
        self.shrinks, self.grows = shrinks, grows
        self._units = units
        self._note_end()

    def _note_end(self) -> None:
        self._over = weakref.finalize(self, self._units.end, self.id)
        self._over.atexit = False  # the session's end is the end of its communicators

    def renumber(self, id: int) -> None:
        self._over.detach()  # the former number may be another communicator's
        super().renumber(id)
        self._note_end()

    def _session(self) -> Session:
        session = super()._session()
        self._check_whole("communicator", self.ranks)
        return session

    def barrier(self) -> None:
        if self._units.inside:
            super().barrier()
        else:
            self._session()
            self._repeat(nothing)

    def broadcast(self, tensor: Carried, src: int = 0) -> None:
        if self._units.inside:
            super().broadcast(tensor, src)
            return
        tensor = check_tensor(tensor)
        self._session()
        check_root(src, self, "src")
        results: list[torch.Tensor] = []

        def attempt() -> None:
            results[:] = [tensor if self.rank() == src else torch.empty_like(tensor)]  # another rank, if that was lost
            super(ElasticCommunicator, self).broadcast(results[0], src)

        def commit() -> None:
            if results[0] is not tensor:
                _put(results[0], tensor)()

        self._repeat(attempt, commit)

    def allreduce(
        self,
        send_tensor: Carried,
        recv_tensor: Carried,
        op: ReduceOp = ReduceOp.SUM,
        *,
        codec: Codec | str | None = None,
    ) -> None:
        if self._units.inside:
            super().allreduce(send_tensor, recv_tensor, op, codec=codec)
            return
        target = check_tensor(recv_tensor)
        self._session()
        result = torch.empty_like(target)  # the old values stay until all ranks have new ones
        self._repeat(
            lambda: super(ElasticCommunicator, self).allreduce(send_tensor, result, op, codec=codec),
            _put(result, target),
        )

    def allreduce_inplace(
        self, tensor: Carried, op: ReduceOp = ReduceOp.SUM, *, codec: Codec | str | None = None
    ) -> None:
        if self._units.inside:
            super().allreduce_inplace(tensor, op, codec=codec)
        else:
            self.allreduce(tensor, tensor, op, codec=codec)

    def _repeat(self, attempt: Callable[[], None], commit: Callable[[], None] = nothing) -> None:
        self._units.all_wrapped = True
        self._units.together(self._scope, lambda: self, attempt, show=commit)

    @property
    def _scope(self) -> int:
        return self.id

    def destroy(self) -> None:
        super().destroy()
        self._units.end(self.id)


class ElasticWorld(ElasticCommunicator):
    """The communicator of all members that take part. Number 0 means all members, so it has another number while some
    rest."""

    def _is_known(self) -> bool:
        return self.id != 0  # the daemon has number 0 by itself

    def renew(self) -> None:
        assert self.connection is not None
        self.id = world_number(self.connection.membership)
        super().renew()

    @property
    def _scope(self) -> int:
        return 0


def _put(result: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    def commit() -> None:
        # Torch refuses to write a tensor of inference mode outside of it.
        with torch.inference_mode() if target.is_inference() else torch.no_grad():
            target.copy_(result)

    return commit


def _once(name: str) -> Callable[..., None]:
    """The primitive of this name: it is not repeated, because its caller may have seen its end on one rank and not on
    another."""
    plain = getattr(Communicator, name)

    def call(self: ElasticCommunicator, *arguments: Any, **named: Any) -> None:
        session = self._session()
        if self._units.inside:
            plain(self, *arguments, **named)
            return
        generation = self._units.present()
        try:
            with session.connection.steady(generation):
                plain(self, *arguments, **named)
                devices(session).await_results()
        except Regrouped as error:
            self._units.recover(generation)
            self._units.changes.tell()
            raise MembershipChanged(
                f"{error} The job goes on without it. {name} is not repeated by itself: all ranks that are left call "
                "it again, or what they do instead. all-reduce, broadcast and barrier are repeated. [BG508]"
            ) from None

    call.__name__, call.__doc__ = name, plain.__doc__
    return call


for _name in (
    "send",
    "recv",
    "reduce",
    "allgather",
    "gather",
    "gather_inplace",
    "scatter",
    "scatter_inplace",
    "reduce_scatter",
    "alltoall",
    "alltoall_v",
):
    setattr(ElasticCommunicator, _name, _once(_name))
