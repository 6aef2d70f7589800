"""Faults, and calls that a rank may make at any moment."""

import os
import signal
import time

import numpy as np

from worker_scripts.rank import core, pause, say


def call(rank, calls):
    """Runs the calls that ``calls`` gives this rank: [kind, dtype, keyword arguments]."""
    for kind, dtype, more in calls[rank.rank]:
        rank.run(kind, dtype, **more)
    return {}


def endless(rank, count):
    """All-reduces until something ends it."""
    say(ready=True)
    while True:
        rank.run("allreduce", count=count)


def hang(rank, skip):
    """Everybody but rank ``skip`` waits in an all-reduce; that one waits for a line."""
    say(ready=True)
    if rank.rank == skip:
        pause()
    rank.run("allreduce", count=100, label="bucket 3")
    return {}


def leave(rank, who, send):
    """Rank ``who`` leaves in good order while the others still want something of it."""
    rank.run("barrier")
    if rank.rank == who:
        return {}
    if send and rank.rank != 0:
        pause()
        return {}
    rank.run("recv" if send else "allreduce", count=10, root=who if send else -1)
    return {}


def interrupted(rank):
    # A process that a shell starts in the background inherits that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    say(ready=True)
    try:
        rank.run("allreduce", count=10)
    except KeyboardInterrupt:
        return {"interrupted": True}
    return {"interrupted": False}


def forked(rank):
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


def ones(rank, count, times):
    """All-reduces of ones: every value that came out, and the error that ended it."""
    seen, error = set(), ""
    rank.view(rank.src, count)[:] = 1
    try:
        for _ in range(times):
            rank.run("allreduce", count=count)
            seen |= {float(value) for value in np.unique(rank.view(rank.dst, count))}
    except core.CoreError as why:
        error = str(why)
    return {"values": sorted(seen), "error": error}
