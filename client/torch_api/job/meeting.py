"""Messages between the ranks of a job through the store of a torch.distributed rendezvous.

The store asks nobody who he is: others can read all values, write any, and take any away. So nothing secret passes
there, and nothing that comes from there is believed further than a failure of this attempt.

A store may outlive the ranks: torchrun starts them again with the store that they had, full of old messages.
Every attempt therefore has a number, and keys of its own. Rank 0 counts it; another rank takes the latest that has not
ended and that no process of this rank has taken before, or waits for the next. An attempt ends well only when every
rank has come. Numbers of restarts in the environment will not do: torchrun's agents count for themselves.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

import bagua
from bagua.base import islands
from bagua.base.errors import ServiceError
from bagua.csrc.wire_version import WIRE_VERSION
from bagua.torch_api.job.environment import get_island_size

DEADLINE_S = 300.0
FIRST_PAUSE_S, PAUSE_S, PAUSE_PER_RANK_S = 0.002, 0.2, 1e-4
"""Between two looks into the store. It can't wait for one key or another one, and its waits warn when they time out.
Many ranks look less often: 10,000 times a second in all."""
SHARE = 1 / 16
"""A pause is so much of the wait before it: what is looked for is found that much later."""
LAST_WORDS_S = 5.0
MAX_BYTES = 64 << 10
MAX_TEXT = 4_000
_BEGIN, _END = "begin", "end"


class Superseded(Exception):
    """Rank 0 was started again, and has begun another attempt."""


class Meeting:
    """One attempt. Every wait ends: with a value, with the attempt, or after five minutes."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        """Raises ServiceError if rank 0 does not come, or is of a release that can't talk with this one."""
        self._all = PrefixStore("bagua", store)
        self._rank = rank
        self._others = range(1, world_size)
        self._least_pause = max(FIRST_PAUSE_S, world_size * PAUSE_PER_RANK_S)
        try:
            self.number = self._begin() if rank == 0 else self._find(rank)
        except RuntimeError as error:
            raise _gone(error) from None
        self._store = PrefixStore(str(self.number), self._all)
        self.publish(_here(rank))
        begun = self.ask(_BEGIN, "Rank 0")
        self.name = f"{self.number} {text_of(begun, 'name')}"
        words = ""
        if begun.get("wire_version") != WIRE_VERSION:
            words = f"rank {rank} has {_release()}, rank 0 {_release(begun)}: install one release on all hosts."
        elif begun.get("island_size") != get_island_size():
            words = (
                f"rank {rank} has {islands.VARIABLE}={get_island_size()}, rank 0 {begun.get('island_size')}: give all "
                "hosts the same."
            )
        if words:
            self.fail(words)
            _raise_if_failed({"error": words})

    def _begin(self) -> int:
        number = int(self._all.add("attempts", 1))  # at one blow: two processes of rank 0 get two numbers
        if number > 1:  # ranks that still wait in the last one come here
            _end(PrefixStore(str(number - 1), self._all), {"superseded": True})
        mine = PrefixStore(str(number), self._all)
        about = {"version": bagua.__version__, "wire_version": WIRE_VERSION, "island_size": get_island_size()}
        mine.set(_BEGIN, json.dumps({"name": secrets.token_hex(8), **about}))
        return number

    def _find(self, rank: int) -> int:
        number = int(self._all.add("attempts", 0))  # reads it: ``get`` would wait where there is none
        # A rank that was started again has been there before.
        over = number == 0 or any(self._all.check([f"{number}/{key}"]) for key in (_END, _here(rank)))
        return number + 1 if over else number

    def publish(self, key: str, **value: Any) -> None:
        """Sets a value that all ranks may ask for. Raises ServiceError if the store is gone."""
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:
            raise _gone(error) from None

    def ask(self, key: str, who: str, alive: Callable[[], None] | None = None) -> dict[str, Any]:
        """The value that ``who`` has told under ``key``. ``alive`` is called now and then, and may raise.
        Raises ServiceError if the attempt fails, or nothing comes; Superseded."""
        began = time.monotonic()
        while (value := self._look(key)) is None:
            if key != _END:  # a rank that asks for the end gets the failure as its value
                _raise_if_failed(self._look(_END) or {})
            if alive is not None:
                alive()
            waited = time.monotonic() - began
            if waited > DEADLINE_S:
                raise ServiceError(f"{who} did not come within {DEADLINE_S:.0f} s. Look at its output. [BG909]")
            time.sleep(max(self._least_pause, min(waited * SHARE, PAUSE_S)))
        return value

    def succeed(self, job_id: str, alive: Callable[[], None] | None = None) -> None:
        """Ends the attempt well, for all ranks, once they have come. For rank 0. Raises like ``ask``."""
        for rank in self._others:
            self.ask(_here(rank), f"Rank {rank}", alive)
        self.publish(_END, job_id=job_id)

    def fail(self, reason: str) -> None:
        """Ends the attempt for all ranks, if it has not ended yet. Rank 0, in which the store may live, gives those
        that have come a moment to read why. Nothing if the store is gone."""
        try:
            _end(self._store, {"error": reason[:MAX_TEXT]})
            self._store.set(_gone_key(self._rank), "{}")
            deadline = time.monotonic() + LAST_WORDS_S
            # The store may end with this process.
            while self._rank == 0 and self._somebody_reads() and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
        except RuntimeError:
            return

    def _somebody_reads(self) -> bool:
        return any(
            self._store.check([_here(rank)]) and not self._store.check([_gone_key(rank)]) for rank in self._others
        )

    def result(self) -> str:
        """The id of the job, at the end of an attempt that went well. Raises like ``ask``."""
        end = self.ask(_END, "Rank 0")
        _raise_if_failed(end)
        return text_of(end, "job_id")

    def _look(self, key: str) -> dict[str, Any] | None:
        """The value under ``key`` now."""
        try:
            data = self._store.get(key) if self._store.check([key]) else None
        except RuntimeError as error:
            raise _gone(error) from None
        return None if data is None else _parse(key, data)


def _release(told: Mapping[str, Any] | None = None) -> str:
    version, number = (told.get("version"), told.get("wire_version")) if told else (bagua.__version__, WIRE_VERSION)
    return f"bagua {version} (wire version {number})"


def _here(rank: int) -> str:
    return f"here/{rank}"


def _gone_key(rank: int) -> str:
    return f"gone/{rank}"


def text_of(value: dict[str, Any], name: str) -> str:
    """A text that another rank has told. Raises ServiceError if it is none."""
    text = value.get(name)
    if not isinstance(text, str) or not text:
        raise _strange(name)
    return text


def _end(store: Store, value: dict[str, Any]) -> None:
    if not store.check([_END]):
        store.set(_END, json.dumps(value))


def _parse(key: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data) if len(data) <= MAX_BYTES else None  # others can write any length
    except (ValueError, RecursionError):  # deep nesting ends in RecursionError
        value = None
    if not isinstance(value, dict):
        raise _strange(key)
    return value


def _raise_if_failed(end: dict[str, Any]) -> None:
    if end.get("superseded"):
        raise Superseded
    if "error" in end:
        # Another rank wrote the text: no escape sequences for the terminal.
        reason = "".join(c if c.isprintable() or c == "\n" else "?" for c in str(end["error"])[:MAX_TEXT])
        raise ServiceError(f"The ranks could not come together: {reason} [BG909]")


def _strange(key: str) -> ServiceError:
    return ServiceError(
        f"The rendezvous store holds under {key!r} what no rank of this version wrote. Are all ranks of one version? "
        "Does somebody else write to MASTER_ADDR:MASTER_PORT? [BG909]"
    )


def _gone(error: Exception) -> ServiceError:
    return ServiceError(f"The rendezvous store does not answer any more ({str(error).splitlines()[0]}). [BG909]")
