"""Loads the native core once, in a thread, and makes engines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import bagua.csrc
from bagua.base import net_plugin
from bagua.base.system_limits import process_words
from bagua.daemon.node.rules.job_specification import JobSpecification

if TYPE_CHECKING:
    from bagua.csrc import core

T = TypeVar("T")
LOAD_S = 2.0  # a core that is built is loaded within this time


@dataclass(frozen=True)
class WireSettings:
    """Settings of the connections of this node's engines to other hosts; see ``Engine`` in csrc/core.pyi."""

    measure_ring: bool
    plain_data: bool

    @property
    def encryption(self) -> str:
        """Kind of encryption, as ``Engine`` calls it."""
        return "never" if self.plain_data else "beyond loopback"


class CoreHost:
    """Loads the core when it is first wanted. A build may take a minute; whoever asks meanwhile waits for the same
    one."""

    def __init__(self) -> None:
        self._loading: asyncio.Future[Any] | None = None

    async def preload(self) -> bool:
        """Loads the core if it is built, so that the first job finds it there; True if it does. What is wrong with it,
        that job will tell."""
        with contextlib.suppress(RuntimeError, OSError):
            if await in_thread(bagua.csrc.is_built):
                await self.load()
                return True
        return False

    def start_loading(self) -> asyncio.Future[Any]:
        """Begins to load, if nobody has; the future holds the module or the error. A failed load is tried again."""
        done = self._loading is not None and self._loading.done()
        if self._loading is None or (done and self._loading.exception() is not None):
            self._loading = in_thread(lambda: bagua.csrc.load(tells=False))
            self._loading.add_done_callback(lambda future: future.exception())  # an error is told to whoever asks
        return self._loading

    async def load(self, on_build: Callable[[str], None] = lambda files: None) -> Any:
        """The module (types: csrc/core.pyi). If that takes so long that it must be a build, ``on_build`` hears how far
        it is: "3 of 9 files". Raises BuildError."""
        loading = self.start_loading()
        told = ""
        while not (await asyncio.wait([loading], timeout=LOAD_S))[0]:
            if (files := await in_thread(lambda: bagua.csrc.progress().files())) != told:
                on_build(told := files)
        return await asyncio.shield(loading)  # whoever gives up must not cancel it for the others


class RefusedFrames:
    """Counts frames of all engines that were damaged or not authentic. The first one may end its job, so the count
    outlasts the engines. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: list[core.Engine] = []
        self._of_ended = 0

    def add(self, engine: core.Engine) -> None:
        """Counts those of this engine, too."""
        with self._lock:
            self._engines.append(engine)

    def remove(self, engine: core.Engine) -> None:
        """Takes over the counts of an engine that is about to be closed."""
        with self._lock:
            self._engines.remove(engine)
            self._of_ended += engine.stats()["frames_refused"]

    def total(self) -> int:
        """Returns the frames refused since the daemon started."""
        with self._lock:
            return self._of_ended + sum(engine.stats()["frames_refused"] for engine in self._engines)


async def wanted_plugin(spec: JobSpecification, base: Mapping[str, str]) -> Path | None:
    """NCCL's network plugin, built if need be, where the job or this daemon (``base``) asks for it. Raises ConfigError
    and BuildError."""
    if not net_plugin.wanted({**base, **spec.program.env}):
        return None
    library = await in_thread(bagua.csrc.net_plugin)
    net_plugin.variables(library, base)  # what can't be set is told before a rank is started
    return library


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Runs ``function`` in a thread of its own that the end of the process does not wait for (the loop's executor
    would). Raises OSError where no thread can be started: that may pass."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            deliver = partial(future.set_result, function())
        except BaseException as error:
            deliver = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: None if future.cancelled() else deliver())

    try:
        threading.Thread(target=run, daemon=True, name="bagua-blocking").start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, process_words()) from error
    return future
