"""Agrees which exchanges count when a generation of an elastic job ends in the middle of one. It is pure: values alone.

A *unit* is exchanged whole or not at all: a synchronised backward pass of a model, an exchange of weights, or one of
the user's all-reduce, broadcast and barrier. Its results lie beside the old values. A member whose results are whole is
*ready*, and says so to the others in one more operation, the *flags*. Who hears that all are ready *commits*: the
results take the place of the old values.

When a generation ends, some members may have committed a unit, and others not. In the next one all tell each other
first how far they are. If one has committed a unit, its results are whole on all members, and all commit it. Otherwise
nobody has seen them, and all exchange it again.

Units of one *scope* are numbered from 1, and follow each other in the same order on all members. A scope is what goes
in an order of its own: a communicator.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_ENTRY = struct.Struct("<IQQ")


class Progress(NamedTuple):
    """Numbers of the newest unit of a scope that is ready here, and of the newest that is committed here."""

    ready: int = 0
    committed: int = 0


NOTHING = Progress()
COMMITTED = 1


class Ledger:
    """Progress of one member, by scope, and what it has heard of the others."""

    def __init__(self) -> None:
        self._mine: dict[int, tuple[int, int]] = {}  # ``Progress``, made without a call
        self._heard: dict[int, int] = {}  # the newest unit that some member has committed
        self._over: set[int] = set()

    def set_ready(self, scope: int) -> None:
        """The results of the next unit are whole here."""
        self._over.discard(scope)  # its number was given again
        done = self._mine.get(scope, NOTHING)[COMMITTED]
        self._mine[scope] = (done + 1, done)

    def set_unready(self, scope: int) -> None:
        """The next unit is exchanged again: its results will be others."""
        done = self._mine.get(scope, NOTHING)[COMMITTED]
        self._mine[scope] = (done, done)

    def commit(self, scope: int) -> None:
        """The next unit is ready on all members, or one of them has committed it: it counts."""
        self._over.discard(scope)
        done = self._mine.get(scope, NOTHING)[COMMITTED] + 1
        self._mine[scope] = (done, done)

    def must_commit(self, scope: int) -> bool:
        """Returns True if some member has committed the next unit of this scope, so that this one must, too. Otherwise
        all exchange it again."""
        ready, committed = self._mine.get(scope, NOTHING)
        return ready > committed and self._heard.get(scope, 0) >= ready

    def end(self, scope: int) -> None:
        """No unit of this scope will come. The others may still be in its last one: what is known of it is kept until
        they have heard it."""
        self._over.add(scope)

    def begin_with(self, told: Iterable[bytes]) -> None:
        """Takes over the numbers of members that are between two units, as these have told them."""
        self._mine, self._heard = {}, {}
        self._over.clear()
        for text in told:
            for scope, progress in read(text).items():
                done = max(progress.committed, self._mine.get(scope, NOTHING)[COMMITTED])
                self._mine[scope] = (done, done)

    def tell(self) -> bytes:
        """Returns how far this member is."""
        # A copy: other threads' units become ready meanwhile.
        return b"".join(_ENTRY.pack(scope, *progress) for scope, progress in sorted(self._mine.copy().items()))

    def hear(self, told: Iterable[bytes]) -> None:
        """Takes in the progress that all members of the new generation have told, this one among them."""
        for text in told:
            for scope, progress in read(text).items():
                self._heard[scope] = max(self._heard.get(scope, 0), progress.committed)
        for scope in tuple(self._over):  # a copy: other threads end scopes meanwhile
            self._mine.pop(scope, None)
            self._heard.pop(scope, None)
            self._over.discard(scope)


def read(told: bytes) -> Mapping[int, Progress]:
    """Parses the progress that a member has told, by scope. Raises ValueError for anything else."""
    if len(told) % _ENTRY.size:
        raise ValueError(f"A member told {len(told)} bytes of its progress: a multiple of {_ENTRY.size} was expected.")
    return {scope: Progress(ready, committed) for scope, ready, committed in _ENTRY.iter_unpack(told)}
