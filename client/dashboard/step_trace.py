"""A recorded step of a job, small enough for a page: rows of ranks and hosts, with what they did in it."""

from __future__ import annotations

from typing import Any

from bagua.base.errors import ConflictError
from bagua.client import Client
from bagua.timeline import chrome

STEPS = 3  # recorded; the one in the middle is shown
LIMIT_S = 30.0
MAX_SPANS = 6_000
MAX_LANES = 120

Trace = dict[str, Any]


def record(client: Client, job_id: str) -> Trace:
    """``{"lanes": [[process, thread, [[begin ms, length ms, phase, name], ...]], ...], "missing": [...]}`` of a step
    that is recorded now. Raises ConflictError if none was."""
    document = chrome.to_chrome(client.trace(job_id, STEPS, LIMIT_S))
    step, missing = chrome.step_in_the_middle(document), document["otherData"]["missing"]
    if step is None:
        raise ConflictError(f"{' '.join(['No step was recorded.', *missing])} [BG824]")
    found = chrome.lanes(chrome.step_of(document, step))
    zero = min(event["ts"] for _, _, spans in found for event in spans)
    left, lanes = MAX_SPANS, []
    for process, thread, spans in found[:MAX_LANES]:
        rows = [
            [round((one["ts"] - zero) / 1e3, 4), round(one["dur"] / 1e3, 4), one["cat"], one["name"]]
            for one in spans[:left]
        ]
        left -= len(rows)
        lanes.append([process, thread, rows])
    return {"missing": missing[:20], "lanes": lanes}
