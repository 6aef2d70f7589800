"""Formats the log lines that the services write to stderr."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, MutableMapping
from enum import StrEnum
from typing import Any, TextIO

import structlog

from bagua.base.text import printable


def _visible(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Names and errors come from elsewhere: a terminal on which a log is read must not obey them."""
    return {key: printable(value, lines=True) if isinstance(value, str) else value for key, value in line.items()}


class LogFormat(StrEnum):
    """Form in which a service writes its log."""

    text = "text"
    json = "json"


def _about(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Adds to every line of JSON of which job, rank and generation it speaks; null: of none."""
    return {**dict.fromkeys(("job", "rank", "generation")), **line}


class Rarely:
    """Writes lines with ``once_a_minute`` once a minute for each event and value of it: whoever calls often, and needs
    no credential for it, must not fill a disk. The next line tells how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[tuple[Any, str], float] = {}
        self._left_out: Counter[tuple[Any, str]] = Counter()

    def __call__(self, _: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if "once_a_minute" not in line:
            return line
        kind, now = (line.get("event"), line.pop("once_a_minute")), self._clock()
        if now - self._told.get(kind, float("-inf")) < 60.0:
            self._left_out[kind] += 1
            raise structlog.DropEvent
        self._told[kind] = now
        left_out = self._left_out.pop(kind, 0)
        return {**line, "left_out": left_out} if left_out else line


class _Lenient:
    """A stream whose errors nobody meets: a service goes on when the disk of its log is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def configure_logging(as_json: bool) -> Any:
    """structlog to stderr, from INFO on, with time and level; returns a logger."""
    last: list[Any] = [structlog.dev.ConsoleRenderer(colors=False)]
    if as_json:
        last = [_about, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[
            Rarely(),  # first: a line that it drops costs no more
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            _visible,
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(_Lenient(sys.stderr)),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    return structlog.get_logger()
