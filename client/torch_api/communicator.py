"""Ranks that communicate among themselves, as objects: who they are, and every primitive as a method."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from bagua.base.errors import CommunicationError

if TYPE_CHECKING:
    from bagua.torch_api.connection import Connection


class Communicator:
    """Positions in it (``rank()``, roots, peers) count from 0 in the order of ``ranks``, which are global numbers.

    One that a session made lives in the daemon until the last reference to it is gone, or ``destroy`` is called.
    Members may drop it at different moments. ``connection`` is None where somebody else looks after it.
    """

    def __init__(self, id: int, ranks: Sequence[int], global_rank: int, connection: Connection | None = None) -> None:
        self.id = id
        self.ranks = tuple(ranks)
        self.connection = connection
        self._rank = self.ranks.index(global_rank) if global_rank in self.ranks else -1
        self._destroy = None
        if connection is not None and id != 0:
            connection.create_comm(id, self.ranks)
            self._destroy = weakref.finalize(self, _destroy_quietly, connection, id)
            self._destroy.atexit = False  # the session's end is the communicators' end

    def rank(self) -> int:
        """Position of this process; -1 if it is no member."""
        return self._rank

    def nranks(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def destroy(self) -> None:
        """Gives it back to the daemon: this rank will not use it any more. Idempotent."""
        if self._destroy is not None:
            self._destroy()


class NonMember(Communicator):
    """Stands for a communicator that this process is no member of: primitives on it return at once. It is false."""

    def __init__(self) -> None:
        super().__init__(0, (), -1)

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "NON_COMM_MEMBER"


NON_COMM_MEMBER = NonMember()


def _destroy_quietly(connection: Connection, id: int) -> None:
    """Silent when the session has ended, and with it the communicator."""
    with suppress(CommunicationError):
        connection.destroy_comm(id)
