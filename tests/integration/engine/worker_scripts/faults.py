"""Faults, and calls that a rank may make at any moment."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np

from worker_scripts.rank import Rank, core, pause, say


def call(rank: Rank, calls: list[list[Any]]) -> dict[str, Any]:
    """Runs the calls that ``calls`` gives this rank: [kind, dtype, keyword arguments]."""
    for kind, dtype, more in calls[rank.rank]:
        rank.run(kind, dtype, **more)
    return {}


def endless(rank: Rank, count: int) -> dict[str, Any]:
    """All-reduces until something ends it."""
    say(ready=True)
    while True:
        rank.run("allreduce", count=count)


def hang(rank: Rank, skip: int) -> dict[str, Any]:
    """Everybody but rank ``skip`` waits in an all-reduce; that one waits for a line."""
    say(ready=True)
    if rank.rank == skip:
        pause()
    rank.run("allreduce", count=100, label="bucket 3")
    return {}


def leave(rank: Rank, who: int, send: bool) -> dict[str, Any]:
    """Rank ``who`` leaves in good order while the others still want something of it."""
    rank.run("barrier")
    if rank.rank == who:
        return {}
    if send and rank.rank != 0:
        pause()
        return {}
    rank.run("recv" if send else "allreduce", count=10, root=who if send else -1)
    return {}


def early(rank: Rank, count: int) -> dict[str, Any]:
    """Rank 0 sends all that it has to give and destroys its communicators; rank 1 asks for it when told to."""
    for comm in (5, 6):
        rank.native.create_comm(comm, [0, 1])
    rank.run("barrier", comm=5)
    values = rank.view(rank.src, "float32", count)
    values[:] = np.arange(count) % 1000
    if rank.rank == 1:
        say(ready=True)
        pause()
    rank.run("reduce", comm=5, count=count, root=1)
    for comm in (5, 6):
        rank.native.destroy_comm(comm)
        if rank.rank == 0:
            say(destroyed=comm)
            pause()
    right = rank.rank == 0 or bool((rank.view(rank.dst, "float32", count) == 2 * values).all())
    rank.run("barrier")
    return {"right": right}


def interrupted(rank: Rank) -> dict[str, Any]:
    # A process that a shell starts in the background inherits that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    say(ready=True)
    try:
        rank.run("allreduce", count=10)
    except KeyboardInterrupt:
        return {"interrupted": True}
    return {"interrupted": False}


def segments(rank: Rank) -> dict[str, Any]:
    """Memory given back is counted, views outlive it, a freed segment can't be used."""
    extra = rank.native.alloc(5000)
    before = rank.native.counters()["segment_bytes"]
    view = memoryview(extra)
    assert extra.nbytes >= 5000 and extra.nbytes % 4096 == 0 and extra.address % 4096 == 0 and len(view) == extra.nbytes
    view[4999] = 7
    rank.native.free(extra.id)
    after = rank.native.counters()["segment_bytes"]
    identity = extra.id
    del extra
    assert view[4999] == 7
    try:
        rank.run("allreduce", count=4, at=(identity, 0))
    except core.CoreError as error:
        return {"freed": before - after, "error": str(error)}
    return {}


def refused(rank: Rank, task: dict[str, Any]) -> dict[str, Any]:
    """A second hello for this rank, and one with a wrong token."""
    errors = []
    for token in (task["token"], "00" * 32):
        try:
            core.Rank(data_socket=task["socket"], token=bytes.fromhex(token), rank=rank.rank)
        except core.CoreError as error:
            errors.append(str(error))
    rank.run("barrier")
    return {"errors": errors}


def forked(rank: Rank) -> dict[str, Any]:
    """A child that still holds the socket (as a loader of data does) must not hide its parent's death."""
    child = os.fork()
    if child == 0:
        try:
            rank.run("barrier")
        except core.CoreError as error:
            say(child=str(error))
        rank.native.close()  # not a goodbye of the parent
        time.sleep(1.5)
        os._exit(0)
    pause()
    return {}


def many(rank: Rank, count: int) -> dict[str, Any]:
    """Many operations in flight, waited for in another order, from two threads."""
    tickets = [rank.start("allreduce", count=1) for _ in range(count)]
    rest = tickets[::2]
    helper = threading.Thread(target=lambda: [rank.native.wait(t, 30.0) for t in tickets[1::2]])
    helper.start()
    for ticket in reversed(rest):
        assert rank.native.wait(ticket, 30.0) is not None and not errors_of(rank, ticket)
    helper.join()
    timed_out = True
    if rank.rank == 0:
        late = rank.start("recv", count=1, root=1)
        timed_out = rank.native.wait(late, 0.05) is None
        rank.run("barrier")
        rank.native.wait(late, 30.0)
    else:
        rank.run("barrier")
        rank.run("send", count=1, root=0)
    return {"timed_out": timed_out}


def errors_of(rank: Rank, ticket: int) -> bool:
    """True if a ticket that was waited for can be waited for again."""
    try:
        rank.native.wait(ticket, 0.0)
    except core.CoreError:
        return False
    return True


def ones(rank: Rank, count: int, times: int) -> dict[str, Any]:
    """All-reduces of ones: every value that came out, and the error that ended it."""
    seen: set[float] = set()
    rank.view(rank.src, "float32", count)[:] = 1
    try:
        for _ in range(times):
            rank.run("allreduce", count=count)
            seen |= {float(value) for value in np.unique(rank.view(rank.dst, "float32", count))}
    except core.CoreError as error:
        return {"values": sorted(seen), "error": str(error)}
    return {"values": sorted(seen), "error": ""}
