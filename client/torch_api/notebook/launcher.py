"""Starts a function as ranks, shows what rank 0 prints, and ends all ranks with the first that fails.

A rank is a fork of the notebook's process, because functions of a cell can't be imported anywhere else. Where a fork
can't work (this process has used CUDA or autograd's threads, or was a rank itself), ranks are fresh processes instead,
and cloudpickle carries the function to them.
"""

from __future__ import annotations

import codecs
import functools
import io
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from bagua.base.errors import BaguaError, ConfigError
from bagua.torch_api.job import start
from bagua.torch_api.job.environment import find_free_network_port
from bagua.torch_api.notebook import rank
from bagua.torch_api.notebook.cell import Cell

METHODS = ("fork", "spawn")
GRACE_S = 10.0  # for ranks to end by themselves after an interrupt, or after another one has failed
CHUNK = 1 << 16
TAIL = 2_000  # characters of a rank's output in an error


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    nproc: int = 2,
    *,
    environment: Mapping[str, str] | None = None,
    start_method: str | None = None,
) -> Any:
    """Runs ``function(*args)`` as ``nproc`` ranks on this machine, and returns what it returned on rank 0.

    ``function`` does what a script does: it calls ``bagua.init_process_group()`` first. What rank 0 prints appears at
    once, and what it tells ``bagua.report`` becomes a progress bar. An interrupt ends all ranks. A rank that fails ends
    the others, and its traceback is raised.

    Args:
        function: It may be defined in the notebook.
        args: Its arguments.
        nproc: Number of ranks.
        environment: Variables for the ranks, such as {"BAGUA_ALGORITHM": "bytegrad"}.
        start_method: "fork", "spawn" (fresh processes; needs cloudpickle), or None: fork where it can work.

    Returns numbers, tensors, texts and whatever ``torch.save`` takes. Raises ConfigError for arguments that can't be,
    BaguaError if a rank fails, KeyboardInterrupt after an interrupt.
    """
    if nproc < 1:
        raise ConfigError(f"nproc is {nproc}: at least one rank is needed. [BG613]")
    if start_method is None:
        start_method = "fork" if _can_fork() else "spawn"
    if start_method not in METHODS:
        raise ConfigError(f"start_method is {start_method!r}: it must be fork or spawn. [BG613]")
    call = functools.partial(function, *args)
    launch = _Launch(_carried(call) if start_method == "spawn" else call, nproc, start_method, environment or {})
    try:
        return launch.run()
    finally:
        launch.close()


def _can_fork() -> bool:
    """True if a forked child can be a rank. It is probed by a fork, because torch does not tell."""
    # torch's threads and CUDA don't survive a fork.
    if start.has_begun() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    child = _fork()
    if child == 0:
        try:
            # torch refuses autograd in a fork of a process that has used its threads.
            torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads, as notebooks do
        return os.fork()


def _carried(call: rank.Call) -> bytes:
    try:
        import cloudpickle  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise ConfigError(
            "This process has used CUDA, its autograd threads or bagua already, so ranks can't be forked from it: "
            "restart the notebook's kernel and launch first, or let ranks be fresh processes: "
            'pip install "bagua[notebook]". [BG613]'
        ) from None
    found: bytes = cloudpickle.dumps(call)
    return found


class _Rank:
    """A rank's process, its messages and its output, as the launcher sees them."""

    def __init__(self, number: int, process: BaseProcess, messages: Connection, output: Connection) -> None:
        self.number = number
        self.process = process
        self.open = {messages: self._hear, output: self._read}
        self.printed: list[str] = []  # and not shown yet
        self.tail = ""
        self.report: tuple[Any, ...] | None = None
        self.result = b""
        self.error = ""
        # Incremental: a character may be cut in two reads.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read_from(self, source: Connection) -> None:
        """Reads what there is; closes a source that has ended."""
        if not self.open[source](source):
            del self.open[source]
            source.close()

    def _hear(self, messages: Connection) -> bool:
        try:
            kind, *content = messages.recv()
        except (EOFError, OSError):
            return False
        if kind == "report":
            self.report = tuple(content)
        else:
            setattr(self, kind, content[0])
        return True

    def _read(self, output: Connection) -> bool:
        data = os.read(output.fileno(), CHUNK)
        text = self._decoder.decode(data)
        self.printed.append(text)
        self.tail = (self.tail + text)[-TAIL:]
        return bool(data)

    @property
    def failed(self) -> bool:
        """True if the rank has ended with an error."""
        return bool(self.process.exitcode)

    def reason(self) -> str:
        """Says in words how the rank failed."""
        code = self.process.exitcode or 0
        if self.error:
            return self.error.rstrip()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"Its process {how}. The end of its output:\n{self.tail.rstrip()}"


class _Launch:
    """The ranks of one call."""

    def __init__(self, call: rank.Call | bytes, nproc: int, method: str, environment: Mapping[str, str]) -> None:
        self._cell = Cell()
        self._ranks: list[_Rank] = []
        self._first: _Rank | None = None  # that failed
        self._call, self._nproc, self._context = call, nproc, multiprocessing.get_context(method)
        self._environment = {
            **environment,  # variables of the job win: what follows is not the user's to choose
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_network_port()),
        }

    def _start(self, number: int) -> None:
        context: Any = self._context
        messages, tells = context.Pipe(duplex=False)
        output, prints = context.Pipe(duplex=False)
        environment = {**self._environment, "RANK": str(number), "LOCAL_RANK": str(number)}
        arguments = (self._call, environment, tells, prints, os.getpid())
        process = context.Process(target=rank.run, args=arguments, name=f"bagua rank {number}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # as in ``_can_fork``
            process.start()
        tells.close()  # only the rank holds this end: the pipe closes with it
        prints.close()
        self._ranks.append(_Rank(number, process, messages, output))

    def run(self) -> Any:
        """Starts the ranks, and shows what they tell until all have ended; returns the result of rank 0."""
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # every rank that starts is known
            try:
                for number in range(self._nproc):
                    self._start(number)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            self._watch()
        except KeyboardInterrupt:
            self._signal(signal.SIGINT)
            self._watch(time.monotonic() + GRACE_S)
            raise
        if self._first is not None:
            raise BaguaError(
                f"Rank {self._first.number} failed, and the launch with it.\n{self._first.reason()} [BG613]"
            )
        return torch.load(io.BytesIO(self._ranks[0].result), weights_only=False)

    def _watch(self, deadline: float | None = None) -> None:
        """Watches until all ranks have ended, or the deadline. A rank that fails sets one for the others."""
        while waiting := self._sources():
            ready = wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
            for source in ready:
                waiting[source].read_from(source) if isinstance(source, Connection) else waiting[source].process.join()
            self._show()
            if self._first is None and (failed := [one for one in self._ranks if one.failed]):
                # One that has told why: others may have failed because of it.
                self._first = min(failed, key=lambda one: not one.error)
                deadline = time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() >= deadline:
                return

    def _sources(self) -> dict[Any, _Rank]:
        """Returns the messages, outputs and ends of processes that are still to come."""
        found: dict[Any, _Rank] = {}
        for one in self._ranks:
            found.update(dict.fromkeys(one.open, one))
            if one.process.exitcode is None:
                found[one.process.sentinel] = one
        return found

    def _show(self) -> None:
        speaker = self._ranks[0]
        if speaker.printed:
            self._cell.write("".join(speaker.printed))
        if speaker.report is not None:
            self._cell.progress(*speaker.report)
            speaker.report = None
        for one in self._ranks:
            one.printed.clear()

    def _signal(self, number: int) -> None:
        for one in self._ranks:
            if one.process.exitcode is None and one.process.pid is not None:
                with suppress(ProcessLookupError):  # the process may end just now
                    os.kill(one.process.pid, number)

    def close(self) -> None:
        """Ends the ranks that are left."""
        self._signal(signal.SIGKILL)
        for one in self._ranks:
            one.process.join()
            for source in one.open:
                source.close()
        self._cell.close()
