"""The place of a job's spans in a distributed trace: W3C's trace context, from the standard library alone.

A job carries it in the variable TRACEPARENT of its environment, so it goes from ``bagua job submit`` through
coordinator and daemons to the ranks. Ids of a job's spans follow from its id: coordinator and daemons know each other's
without a word, also after a restart.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "TRACEPARENT"
STEPS_VARIABLE = "BAGUA_TRACE_STEPS"
EVERY_STEPS = 1000
_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True)
class TraceContext:
    """``span_id``: of the span that is the parent of what comes; 0: none."""

    trace_id: int
    span_id: int

    @property
    def traceparent(self) -> str:
        """The context as W3C writes it."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"


def parse(text: str) -> TraceContext | None:
    """Reads a traceparent. None for anything else than a sound one."""
    found = _FORM.fullmatch(text.strip().lower())
    if found is None or not int(found[1], 16) or not int(found[2], 16):  # W3C forbids zeros
        return None
    return TraceContext(int(found[1], 16), int(found[2], 16))


def from_environment(environment: Mapping[str, str]) -> TraceContext:
    """The parent that the environment names; else a new trace, with nothing above."""
    return parse(environment.get(VARIABLE, "")) or TraceContext(secrets.randbits(128) | 1, 0)  # never 0


def of_job(job_id: str, environment: Mapping[str, str]) -> TraceContext:
    """The parent of a job's spans: as it was submitted; else a trace of its own, which follows from its id."""
    return parse(environment.get(VARIABLE, "")) or TraceContext(_number(job_id, "trace", 16), 0)


def span_id(job_id: str, name: str) -> int:
    """Id of the span of that name in a job."""
    return _number(job_id, name, 8)


def _number(job_id: str, name: str, size: int) -> int:
    digest = hashlib.sha256(f"{job_id}\0{name}".encode()).digest()
    return int.from_bytes(digest[:size], "big") | 1  # never 0, which stands for none
