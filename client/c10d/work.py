"""The handle of one operation: what ``torch.distributed`` calls Work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistBackendError, distributed_c10d
from torch.futures import Future

from bagua.base.errors import CommunicationError
from bagua.c10d.lanes import THREADS, Lane
from bagua.torch_api.job.connection import HostConnection

Work: Any = distributed_c10d.Work

# From this torch on, C++ that gets a work from Python keeps its Python part. Before, that part was freed in the hands
# of DDP's reducer and of functional collectives, which then found a work without methods.
HELD_SINCE = (2, 8)
MOST_KEPT = 1024
# Before HELD_SINCE: operations of which nobody has asked the end yet, the newest of them; by id.
KEPT: dict[int, Operation] = {}
KEEPS = tuple(map(int, torch.__version__.split(".")[:2])) < HELD_SINCE


def run_within(connection: HostConnection, name: str, seconds: float, deadline: float, run: Callable[[], None]) -> None:
    """``run()``, whose waits end at ``deadline`` (of ``time.monotonic``). Raises CommunicationError, which says there
    that operation ``name`` was not done in its ``seconds``, and who waits for whom."""
    try:
        with connection.patience(max(0.0, deadline - time.monotonic())):
            run()
    except CommunicationError as error:
        if time.monotonic() < deadline:
            raise
        raise CommunicationError(f"{name} was not done within its timeout of {seconds:g} s. {error}") from None


class Operation(Work):  # type: ignore[misc]
    """Operation, from the call to its end. ``outputs``: tensors that hold the result.

    ``wait`` raises the operation's error, and so does the future: for Python, and for C++ that knows nothing of Python
    (the reducer of DDP). Callbacks of the future run in a thread of their own: they may wait for other operations.
    """

    def __init__(self, name: str, outputs: Sequence[torch.Tensor], run: Callable[[], None], timeout: float) -> None:
        super().__init__()
        self.name = name
        self.outputs = list(outputs)
        self.source = -1
        self._run: Callable[[], None] | None = run
        self._timeout = timeout
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._inner: Future[Any] | None = None
        self._future: Future[Any] | None = None
        if KEEPS:
            KEPT[id(self)] = self
            if len(KEPT) > MOST_KEPT:
                KEPT.pop(next(iter(KEPT)), None)

    def start(self, lane: Lane, here: bool) -> Operation:
        """Puts it on ``lane``. ``here``: in this thread, if nothing is before it."""
        # The profiler sees this thread, and not those of lanes.
        with torch.profiler.record_function(f"bagua:{self.name}"):
            if not (here and lane.run_here(self.run)):
                lane.put(self.run)
        return self

    def run(self) -> None:
        """Carries it out. Raises nothing."""
        run, self._run = self._run, None
        assert run is not None
        error: Exception | None = None
        try:
            with torch.no_grad():
                run()
        except Exception as caught:  # whatever it is, whoever waits gets it
            error = DistBackendError(str(caught)) if isinstance(caught, CommunicationError) else caught
        del run
        self.end(error)

    def end(self, error: Exception | None) -> None:
        """Ends the operation with this error. Does nothing if it was over before."""
        with self._lock:
            if self._over.is_set():
                return
            self._error = error
            self._over.set()
            inner = self._inner
        if inner is not None:
            THREADS.run(lambda: inner.set_result(None))

    # The interface of Work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True when it is done. Raises its error, DistBackendError when ``timeout`` has passed."""
        limit = timeout.total_seconds() if timeout else 0.0
        # The operation has a limit of its own, at which it says who waits for whom: it comes a little earlier.
        if not self._over.wait(limit if limit > 0 else self._timeout + 5.0):
            raise DistBackendError(f"{self.name} was not done after {1000 * (limit or self._timeout):.0f} ms. [BG503]")
        KEPT.pop(id(self), None)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self.outputs

    def source_rank(self) -> int:
        """The sender of the message that was received."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Returns the future of ``result()``."""
        with self._lock:
            if self._future is not None:
                return self._future
            inner: Future[Any] = Future()
            # A callback that raises makes an error that C++ sees. ``set_exception`` makes a value that C++ takes for
            # the result: DDP's reducer then reads tensors that are none, and the process crashes.
            self._future = inner.then(self._set_result)
            over = self._over.is_set()
            self._inner = inner
        KEPT.pop(id(self), None)  # the future's callback keeps it from now on
        if over:
            inner.set_result(None)
        return self._future

    def _set_result(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self.outputs


class Together(Operation):
    """Operation that consists of several others."""

    def __init__(self, name: str, parts: Sequence[Operation], timeout: float) -> None:
        outputs = [tensor for part in parts for tensor in part.outputs]
        self._parts = list(parts)
        super().__init__(name, outputs, self._await_parts, timeout)
        THREADS.run(self.run)

    def _await_parts(self) -> None:
        for part in self._parts:
            part.wait()
