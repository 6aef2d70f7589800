"""Watches processes through pidfds, and kills every process that a job leaves behind.

The keeper is the reaper of everything below it (``PR_SET_CHILD_SUBREAPER``): a process that a rank started and left
behind becomes a child of the keeper, and is killed when the job ends. It is known by the job's control group. Without
one it is known by its session, by the job in its environment, or by a limit that its rank was started with.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Callable, Collection, Mapping

from bagua.base.system_limits import SCARCE
from bagua.daemon.node.processes import proc

MAX_FILES = 65536
_SCARCE_PAUSE_S = 0.1

_PR_SET_CHILD_SUBREAPER = 36


def signal_group(pid: int, signum: int) -> None:
    """Sends ``signum`` to the process group that ``pid`` leads; a group that is gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


async def kill_members(
    leaders: Mapping[int, int],
    marks: Collection[bytes],
    timeout_s: float,
    root: int = 0,
    more: Callable[[], list[proc.ProcessStatus]] = list,
) -> list[int]:
    """SIGKILL to every process of a job (see ``proc.members``), and to those that ``more`` finds; returns the pids of
    those left after ``timeout_s``: only a process that the kernel holds can be."""

    def find() -> list[proc.ProcessStatus]:
        found = {status.pid: status for status in (*proc.members(leaders, marks, root), *more())}
        return [status for pid, status in found.items() if pid not in (root, os.getpid())]

    return await _kill_all(find, timeout_s)


async def end_children(timeout_s: float) -> None:
    """SIGKILL to everything below this process, generation by generation as orphans come up, and reaps it. For the
    end of the process: nobody else may wait for a child any more."""
    await _kill_all(proc.children, timeout_s)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


async def _look(find: Callable[[], list[proc.ProcessStatus]], deadline: float) -> list[proc.ProcessStatus]:
    """Calls ``find`` until there is a descriptor for a look at /proc. Raises OSError at the deadline."""
    while True:
        try:
            return await asyncio.to_thread(find)
        except RuntimeError:  # no thread can be started: these processes may be the reason
            return find()
        except OSError as error:
            if error.errno not in SCARCE or asyncio.get_running_loop().time() >= deadline:
                raise
        await asyncio.sleep(_SCARCE_PAUSE_S)


async def _kill_all(find: Callable[[], list[proc.ProcessStatus]], timeout_s: float) -> list[int]:
    """Kills what ``find`` finds, again for those that appear meanwhile, until there is none."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while left := await _look(find, deadline):
        if loop.time() >= deadline:
            return [status.pid for status in left]
        gone = [asyncio.ensure_future(_killed(status)) for status in left]
        _, waiting = await asyncio.wait(gone, timeout=deadline - loop.time())
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return []


async def _killed(status: proc.ProcessStatus) -> None:
    """Kills one process and returns at its death."""
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(status.pid)
    except OSError as error:
        if error.errno in SCARCE:  # then its end is not waited for, but looked for
            with contextlib.suppress(ProcessLookupError):
                os.kill(status.pid, signal.SIGKILL)
            await asyncio.sleep(_SCARCE_PAUSE_S)
        return
    dead: asyncio.Future[None] = loop.create_future()
    try:
        if proc.start_time(status.pid) != status.start_time:  # it died before, and the number is another's
            return
        loop.add_reader(descriptor, _set, dead)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        await dead
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class ProcessWatch:
    """Tells once when a process ends: ``on_exit(exit_code)`` with -N for a death by signal N, None for a process that
    somebody else reaps. One event loop."""

    def __init__(self, pid: int, on_exit: Callable[[int | None], None]) -> None:
        """Raises OSError if there is no such process."""
        self.pid = pid
        self._on_exit = on_exit
        self._descriptor = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._ended)

    def close(self) -> None:
        """Stops watching the process. Further calls do nothing."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _ended(self) -> None:
        code: int | None = None
        with contextlib.suppress(ChildProcessError):
            result = os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOHANG)
            if result is None:
                return
            code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        self.close()
        self._on_exit(code)


def allow_many_files() -> None:
    """Raises the soft limit of descriptors: each rank takes a handful, and 1024 is for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def become_reaper() -> None:
    """Makes this process the parent of orphans below it."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
