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
    """Records and cuts out. Raises ConflictError if nothing was recorded."""
    return cut(chrome.to_chrome(client.trace(job_id, STEPS, LIMIT_S)), chrome.step_of)


def cut(document: Trace, step_of: Any) -> Trace:
    """``{"lanes": [[process, thread, [[begin ms, length ms, phase, name], ...]], ...], "missing": [...]}`` of the step
    in the middle. Raises ConflictError if there is none."""
    steps = sorted({e["args"]["step"] for e in document["traceEvents"] if e.get("cat") == "step"})
    if not steps:
        said = " ".join(["No step was recorded.", *document["otherData"]["missing"]])
        raise ConflictError(f"{said} [BG824]")
    found = step_of(document, steps[len(steps) // 2])["traceEvents"]
    spans = [event for event in found if event["ph"] == "X"][:MAX_SPANS]
    zero = min(event["ts"] for event in spans)
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"].endswith("_name")}
    lanes: dict[tuple[int, int], list[list[Any]]] = {}
    for event in spans:
        row = [round((event["ts"] - zero) / 1e3, 4), round(event["dur"] / 1e3, 4), event["cat"], event["name"]]
        lanes.setdefault((event["pid"], event["tid"]), []).append(row)
    return {
        "missing": document["otherData"]["missing"][:20],
        "lanes": [
            [names.get(("process_name", pid, 0), ""), names.get(("thread_name", pid, tid), ""), rows]
            for (pid, tid), rows in sorted(lanes.items())[:MAX_LANES]
        ],
    }
