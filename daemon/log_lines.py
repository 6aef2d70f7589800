"""Lines that the services write to stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from bagua.base.text import printable


def _visible(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Names and errors come from elsewhere: a terminal on which a log is read must not obey them."""
    return {key: printable(value, lines=True) if isinstance(value, str) else value for key, value in line.items()}


def configure_logging(as_json: bool) -> Any:
    """structlog to stderr, from INFO on, with time and level; returns a logger."""
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=False)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            _visible,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    return structlog.get_logger()
