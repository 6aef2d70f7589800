"""Finds out whether all ranks passed the same list to ``new_group``: else each would wait for others of its own.

torch asks a backend for groups on their members alone, so this looks at the calls themselves. Every rank notes its list
in the store of the default group. When all ranks of the job have done so, each sees whether the lists agree. torch lets
ranks that are no members come later, or never: for them a rank waits ``GRACE_S``, and then for the members of its own
list alone.

With ``use_local_synchronization`` only members call, and lists that differ make groups of different names. Such ranks
would wait for each other: each rank notes in which group it waits, and one that waits for long looks for a circle.

A store may outlive the ranks (torchrun's does), and torch counts groups anew: each default group has keys of its own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from bagua.base.errors import ConfigError
from bagua.c10d.names import NAME
from bagua.torch_api.comm.communicator import Communicator

LOG = logging.getLogger("bagua")
GRACE_S = 5.0  # how long a rank waits for ranks that are not in its list
# The least that members of a new group wait for each other: its timeout is for operations.
MEETING = timedelta(minutes=5)
FIRST_LOOK, LAST_LOOK = 1.0, 30.0  # seconds until a rank that waits looks for a circle, doubled up to the second
# Between two looks into the store, whose own waits warn when they time out. Many ranks look less often: 10,000 times a
# second in all.
FIRST_PAUSE_S, PAUSE_S, PAUSE_PER_RANK_S = 0.001, 0.05, 1e-4
LONG = 64  # ranks in a list that is noted as it is; of longer ones the beginning and a digest


class _Default:
    """The default group of this process. ``name``: of its notes, the same on all ranks, and no other group's.
    ``refused``: names of groups that this rank was refused. ``agreed``: how often it was not."""

    name = ""
    refused: ClassVar[set[str]] = set()
    agreed: ClassVar[Counter[str]] = Counter()


def compare_new_groups(everyone: Communicator) -> None:
    """Begins to compare lists of new groups over backend "bagua". All ranks of a new default group call it."""
    number = torch.tensor([int.from_bytes(os.urandom(7), "big")])  # seven bytes: an int64 without its sign
    everyone.broadcast(number, 0)
    _Default.name = f"bagua groups {int(number):x}"
    _Default.refused.clear()
    _Default.agreed.clear()
    _install()


def _install() -> None:
    original = getattr(distributed_c10d, "_new_process_group_helper", None)
    if original is None or hasattr(original, "_bagua"):  # torch has moved it: lists are not compared, and tests fail
        return

    @functools.wraps(original)
    def make(
        size: int, me: int, ranks: Sequence[int], backend: Any, store: Any, name: Any, *rest: Any, **options: Any
    ) -> Any:
        if ranks and NAME in distributed_c10d.BackendConfig(backend).get_device_backend_map().values():
            _Call(store, str(name), list(ranks)).agree(options.get("timeout") or MEETING)
        return original(size, me, ranks, backend, store, name, *rest, **options)

    make._bagua = True  # type: ignore[attr-defined]
    distributed_c10d._new_process_group_helper = make  # type: ignore[assignment]


def default_name() -> str:
    """The name of the present default group: the same on all its ranks. No default group before it had it."""
    return _Default.name


class _Call:
    """Call of ``new_group`` on this rank."""

    def __init__(self, store: Any, name: str, ranks: list[int]) -> None:
        self._store = PrefixStore(_Default.name, store)
        self._name = name
        self._notes = f"{name} {_Default.agreed[name]}"  # torch may give a list the same name again
        self._everyone_calls = name.isdigit()  # else torch has made the name of the list: only members call
        self._ranks = ranks
        default = distributed_c10d._get_default_group()
        self._me, self._world = default.rank(), default.size()

    def agree(self, timeout: timedelta) -> None:
        """Raises ConfigError where a rank passed another list, or a member does not come."""
        try:
            self._agree(timeout)
        except ConfigError as error:
            _Default.refused.add(self._name)
            self._store.set(f"refused {self._me}", json.dumps([self._name, str(error)]))
            if not self._everyone_calls:
                self._store.delete_key(self._note(self._me))  # it has not come, should others make this group later
            raise
        _Default.agreed[self._name] += 1

    def _agree(self, timeout: timedelta) -> None:
        if _Default.refused:
            self._store.set(f"refused {self._me}", "")  # the program goes on without that group
        text = _text(self._ranks)
        self._store.set(self._note(self._me), text)
        if self._everyone_calls:
            if self._all_came(text):
                return
            self._compare([rank for rank in range(self._world) if self._came([self._note(rank)])], text)
        if self._me in self._ranks:
            self._await_members(max(timeout, MEETING))
            if self._everyone_calls:
                self._compare(self._ranks, text)

    def _note(self, rank: int) -> str:
        return f"{self._notes}/{rank}"

    def _came(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def _wait(self, key: str, limit_s: float) -> bool:
        deadline, pause = time.monotonic() + limit_s, FIRST_PAUSE_S
        while not self._came([key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, max(PAUSE_S, self._world * PAUSE_PER_RANK_S))
        return True

    def _all_came(self, text: str) -> bool:
        """True if all ranks of the job come soon, and have passed the same list. Ranks are counted, so that none has to
        read the notes of all."""
        mine, over = f"{self._name} {text}", f"{self._name} over"
        self._store.add(mine, 1)
        if self._store.add(f"{self._name} noted", 1) == self._world:  # the last to come tells all
            self._store.set(over, str(int(self._store.add(mine, 0) == self._world)))
        return self._wait(over, GRACE_S) and self._store.get(over) == b"1"

    def _compare(self, others: Sequence[int], text: str) -> None:
        for rank in others:
            other = self._store.get(self._note(rank)).decode()
            if other != text:
                raise ConfigError(
                    f"Group {self._name!r} differs between ranks: rank {self._me} passed ranks {text}, rank {rank} "
                    f"passed {other}. All ranks must call new_group() with the same ranks, in the same order of calls. "
                    "[BG410]"
                )

    def _await_members(self, timeout: timedelta) -> None:
        """Waits until all ranks of the list have noted it."""
        place = f"at {self._me}"
        self._store.set(place, json.dumps([self._notes, self._ranks]))
        left, look = timeout.total_seconds(), FIRST_LOOK
        for rank in self._ranks:
            while not self._wait(self._note(rank), min(look, left)):
                left -= min(look, left)
                self._check_refusals()
                if words := self._circle():
                    raise ConfigError(f"{words} [BG410]")
                if left <= 0:
                    raise ConfigError(
                        f"Rank {rank} has not made group {self._name!r} of ranks {_text(self._ranks)} in "
                        f"{timeout.total_seconds():.0f} s. [BG410]"
                    )
                if look == LAST_LOOK:  # seldom: the first looks come soon after each other
                    LOG.warning("Rank %d waits in new_group() of ranks %s for rank %d.", self._me, self._ranks, rank)
                look = min(2 * look, LAST_LOOK)
        self._store.set(place, "")

    def _check_refusals(self) -> None:
        """Raises ConfigError if a member was refused this group, or another one that was made here: it does not come,
        or comes in another order of calls."""
        for rank in self._ranks:
            key = f"refused {rank}"
            if self._came([key]) and (refusal := self._store.get(key)):
                name, words = json.loads(refusal)
                if name not in _Default.refused:
                    raise ConfigError(
                        f"Group {self._name!r} of ranks {_text(self._ranks)} was not made. Rank {rank} was told: "
                        f"{words}"
                    )

    def _circle(self) -> str:
        """Words about ranks that wait for each other, and for which this one waits. "" if there are none.

        Notes are read one after the other while ranks go on. Those that are the same when they are read again were so
        at one moment: a rank notes the same place once."""
        found = self._find_circle()
        if not found or found != self._find_circle():
            return ""
        waits = [
            f"rank {rank} waits in new_group() of ranks {_text(ranks)} for rank {other}" for rank, ranks, other in found
        ]
        return (
            f"Group {self._name!r} differs between ranks: {', '.join(waits)}. All members must call new_group() with "
            "the same ranks, in the same order of calls."
        )

    def _find_circle(self) -> list[tuple[int, list[int], int]]:
        """Ranks, the lists in which they wait, and for whom."""
        done: set[int] = set()
        path: dict[int, tuple[int, list[int], int]] = {}

        def visit(rank: int) -> list[tuple[int, list[int], int]]:
            if rank in path:
                return list(path.values())[list(path).index(rank) :]
            if rank not in done:
                for ranks, other in self._waits(rank):
                    path[rank] = rank, ranks, other
                    if found := visit(other):
                        return found
                    del path[rank]
                done.add(rank)
            return []

        return visit(self._me)

    def _waits(self, rank: int) -> Iterator[tuple[list[int], int]]:
        """The list in which a rank waits, with each rank that has not come there."""
        place = f"at {rank}"
        noted = self._store.get(place) if self._came([place]) else b""
        if noted:
            notes, ranks = json.loads(noted)
            for other in ranks:
                if other != rank and not self._came([f"{notes}/{other}"]):
                    yield ranks, other


def _text(ranks: Sequence[int]) -> str:
    if len(ranks) <= LONG:
        return str(list(ranks))
    digest = hashlib.blake2b(json.dumps(ranks).encode(), digest_size=4).hexdigest()
    return f"[{', '.join(map(str, ranks[:3]))}, ... {ranks[-1]}] ({len(ranks)} ranks, digest {digest})"
