"""Beginning and end of a rank's session."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing.util
import os
import sys
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

from bagua.base import islands
from bagua.base.errors import BaguaError, ConfigError
from bagua.torch_api.job import environment, ephemeral, torch_distributed
from bagua.torch_api.job.daemon import DaemonClient, Membership
from bagua.torch_api.job.ending import GOOD_ORDER, WATCH, End, end_by
from bagua.torch_api.job.malloc import keep_memory
from bagua.torch_api.job.session import CURRENT, Session
from bagua.torch_api.job.torch_distributed import TorchGroup

DAEMON_SOCKET = "BAGUA_DAEMON_SOCKET"
JOB_ID = "BAGUA_JOB_ID"


class _Torch:
    """The default group of ``torch.distributed`` beside the session; None before the start and after the end."""

    group: TorchGroup | None = None
    begun = False


def has_begun() -> bool:
    """Returns True if this process has ever been a rank: then gRPC runs in it, and a forked child can't become one."""
    return _Torch.begun


def begin(store: Store | None = None, rank: int = -1, world_size: int = -1, local_world_size: int = -1) -> None:
    """See ``init_process_group``, which goes on where this ends."""
    session = CURRENT.session
    if session is not None and session.pid == os.getpid() and session.implicit:  # torch.distributed has begun it
        session.implicit = False  # the program's own from now on
        environment.show()
        return
    if session is not None and session.pid == os.getpid():
        raise BaguaError("init_process_group() was called twice: this process is a rank already. [BG407]")
    torch_wanted = torch_distributed.wanted()  # before the session: it asks whether the program has a group of its own
    environment.clear_place()  # a session that failed, or the parent of this fork, may have left it
    if store is not None:
        _use_store(rank, world_size, local_world_size)
    join(store, torch_wanted)
    environment.show()


def join(store: Store | None, torch_wanted: bool) -> None:
    """Begins the session of the rank that the environment names, which ``store`` has for ranks to meet, if it is given.
    ``torch_wanted``: ``torch.distributed`` comes up beside it."""
    keep_memory()
    socket = os.environ.get(DAEMON_SOCKET)
    try:
        if socket:
            daemon = DaemonClient(socket, os.environ.get(JOB_ID, ""))
            session = Session(daemon.join(environment.get_rank()), daemon)
        else:
            session = ephemeral.join(store)
        _begin(session, torch_wanted)
    except BaseException:
        environment.clear_place()
        raise


def _use_store(rank: int, world_size: int, local_world_size: int) -> None:
    """Checks the arguments beside a store, which are the rank's place."""
    for name, value, smallest in (
        ("rank", rank, 0),
        ("world_size", world_size, 1),
        ("local_world_size", local_world_size, 1),
    ):
        if value < smallest:
            raise ConfigError(f"With a store, {name} must be given and be at least {smallest}; it is {value}. [BG908]")
    if rank >= world_size or local_world_size > world_size:
        raise ConfigError(
            f"rank {rank} and local_world_size {local_world_size} don't fit world_size {world_size}. [BG908]"
        )
    local_rank = rank % local_world_size
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size}
    environment.set_place({name: str(value) for name, value in place.items()})


def _tell(membership: Membership) -> None:
    """Completes the rank's place, which the rank getters read: launchers set different variables. A newcomer was
    started with its member number for a rank, and others may have been lost since a process was started."""
    anew = membership.lobby or membership.later
    environment.set_place({k: v for k, v in membership.variables.items() if anew or not environment.look(k)})


def _begin(session: Session, torch_wanted: bool) -> None:
    _tell(session.membership)
    if (size := session.membership.island_size) > 1:
        if words := islands.misfit(size, list(map(len, session.membership.hosts))):
            session.close()  # in good order: ranks that come to this later say it themselves
            raise ConfigError(
                f"{words}: choose another --island-size (torchrun: {islands.VARIABLE}), or other numbers of ranks. "
                "[BG114]"
            )
        torch_distributed.refuse_samplers_of_islands(session.elastic)
    torch_group = session.companion = TorchGroup(session, torch_wanted)
    CURRENT.session = session
    _Torch.group, _Torch.begun = torch_group, True
    WATCH.install(_fail)
    if not faulthandler.is_enabled() and "PYTHONFAULTHANDLER" not in os.environ:  # the user's own setting stays
        with suppress(OSError, ValueError, RuntimeError):  # standard error is no file
            faulthandler.enable()
    atexit.register(_leave_at_exit)
    if multiprocessing.parent_process() is not None:
        # Comes before functions of atexit, which a forked process does not have, and sees what ends the program.
        multiprocessing.util.Finalize(None, _leave_child, exitpriority=1)


def destroy_process_group() -> None:
    """Leaves the job in good order. Afterwards ``init_process_group`` may be called again, but not in a process that a
    daemon started (``bagua run``): it joins its job once. Nothing if not initialised.

    Gradients of wrapped models stay readable. Other ranks that wait for this one get CommunicationError. Takes
    ``torch.distributed`` down again if ``init_process_group`` brought it up.
    """
    session, torch_group = CURRENT.session, _Torch.group
    if session is None:
        return
    handled = end_by(sys.exception())
    if not handled.words:  # else this rank may be in the middle of something, and nobody is waited for
        session.end()
    CURRENT.session = _Torch.group = None
    atexit.unregister(_leave_at_exit)  # a rank that has left exits as it likes
    if torch_group is not None:
        torch_group.close()
    session.close(handled.words)
    environment.clear_place()


def fail(error: BaseException) -> None:
    """Tells the others at once that this exception ends the program of this rank, if it is one."""
    _fail(end_by(error))


def _fail(end: End) -> None:
    if CURRENT.session is not None:
        CURRENT.session.fail(end)


def _leave_at_exit() -> None:
    _leave(WATCH.end())


def _leave_child() -> None:
    """Leaves the job at the end of a process of multiprocessing."""
    atexit.unregister(_leave_at_exit)
    _leave(end_by(sys.exception()))


def _leave(end: End | None) -> None:
    """Leaves the job at the end of the process. ``end`` None: it is a SystemExit whose code is not known."""
    session, torch_group = CURRENT.session, _Torch.group
    if session is None or torch_group is None or session.pid != os.getpid():  # a forked child is no rank
        return
    _Torch.group = None
    if session.dismissed or end is None:  # the daemon sees the code; without a farewell code 0 would be a loss
        torch_group.abandon()
        session.close("" if session.dismissed else "SystemExit")
    elif end == GOOD_ORDER and not session.failed:
        session.end()
        torch_group.close()
        session.close()
    else:
        session.fail(end)  # before ``abandon``, which may wait for threads: the others learn of it at once
        torch_group.abandon()
