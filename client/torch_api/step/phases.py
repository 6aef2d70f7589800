"""Names the phases of a training step, for torch.profiler and for a trace of the job.

``torch.profiler`` shows ranges such as ``bagua:submit bucket 3`` beside the operators of the program. A trace of the
job (``tracer.py``) gets the same phases with their times. Where neither is under way, a phase costs 0.3 µs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.autograd.profiler as profiler

from bagua.torch_api.job.connection import Times

SUBMIT, PLAN, WAIT, RESULTS = "submit", "plan step", "wait", "results"
"""Phases of a step: handing a bucket over, a later step of its plan, waiting, and showing results in ``.grad``."""


class Sink(Protocol):
    """Gets phases while a trace is recorded. Times in ns of CLOCK_MONOTONIC."""

    def note(self, phase: str, name: str, begin: int, end: int) -> None:
        """A phase of this thread is over."""
        ...

    def ready(self, bucket: str) -> None:
        """The last gradient of a bucket came."""
        ...

    def operations(self, bucket: str, times: Sequence[Times]) -> None:
        """Operations of a bucket are over."""
        ...


class _Watch:
    """``sink``: of the trace that is recorded now, if one is."""

    sink: Sink | None = None


WATCH = _Watch()


# The flag is private to torch. Where it is missing a profiler may record at any time, and each phase costs some µs.
PROFILER: Any = profiler if hasattr(profiler, "_is_profiler_enabled") else SimpleNamespace(_is_profiler_enabled=True)
NOTHING = nullcontext()


class _Phase:
    """One phase: a range of torch.profiler, and a span for the sink."""

    __slots__ = ("_begin", "_name", "_phase", "_range")

    def __init__(self, phase: str, name: str) -> None:
        self._phase, self._name = phase, name
        profiled = PROFILER._is_profiler_enabled
        self._range = torch.profiler.record_function(f"bagua:{phase} {name}".rstrip()) if profiled else None

    def __enter__(self) -> None:
        self._begin = time.monotonic_ns()
        if self._range is not None:
            self._range.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        if self._range is not None:
            self._range.__exit__(*error)
        if (sink := WATCH.sink) is not None:
            sink.note(self._phase, self._name, self._begin, time.monotonic_ns())


def phase(kind: str, bucket: str | None = None) -> AbstractContextManager[None]:
    """``bagua:KIND bucket NAME`` for the time of a block; without the bucket where there is none."""
    if WATCH.sink is None and not PROFILER._is_profiler_enabled:
        return NOTHING
    return _Phase(kind, "" if bucket is None else bucket_name(bucket))


def bucket_name(bucket: str) -> str:
    """A bucket as operations, torch.profiler and traces call it."""
    return f"bucket {bucket}"[:36]
