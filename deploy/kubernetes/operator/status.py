"""Phases and conditions of a BaguaJob, and times as Kubernetes writes them."""

from __future__ import annotations

import datetime
from typing import Any

from bagua.operator.facts import Manifest, Trouble

PENDING = "Pending"
STARTING = "Starting"
RUNNING = "Running"
STOPPING = "Stopping"
SUSPENDED = "Suspended"
RESTARTING = "Restarting"
SUCCEEDED = "Succeeded"
FAILED = "Failed"
CREATED = "Created"
ENDED = (SUCCEEDED, FAILED)
BLOCKED = "Blocked"
"""The condition with what the API server, the scheduler or a kubelet refuses."""


def stamp(seconds: float) -> str:
    """Seconds since the epoch -> RFC 3339, in whole seconds."""
    # Kubernetes keeps no fractions: they would look like a change
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(text: str) -> float:
    """RFC 3339 -> seconds since the epoch."""
    return datetime.datetime.fromisoformat(text).timestamp()


def with_condition(status: Manifest, kind: str, holds: bool, reason: str, message: str, now: float) -> Manifest:
    """The status with this condition; its time changes with its truth alone. A condition that never held is left out
    while it does not hold."""
    conditions: list[dict[str, Any]] = list(status.get("conditions", []))
    former = next((one for one in conditions if one["type"] == kind), None)
    if former is None and not holds:
        return status
    truth = "True" if holds else "False"
    made = {"type": kind, "status": truth, "reason": reason, "message": message or reason}
    since = former["lastTransitionTime"] if former and former["status"] == truth else stamp(now)
    same = former is not None and made == {key: former.get(key) for key in made}
    updated = former["lastUpdateTime"] if former and same and "lastUpdateTime" in former else stamp(now)
    made |= {"lastTransitionTime": since, "lastUpdateTime": updated}
    return {**status, "conditions": [one for one in conditions if one["type"] != kind] + [made]}


def with_phase(status: Manifest, phase: str, reason: str, message: str, now: float) -> Manifest:
    """The status in this phase: the conditions of the phases follow. ``reason`` is one word, ``message`` a sentence."""
    # Never an empty text: Kubernetes 1.20 takes it for null.
    found = {**status, "phase": phase, "message": message or reason}
    for kind in (RUNNING, SUSPENDED, RESTARTING, SUCCEEDED, FAILED):
        if kind == phase:
            found = with_condition(found, kind, True, reason, message, now)
        else:
            found = with_condition(found, kind, False, phase, "", now)
    if phase in ENDED:
        found.setdefault("completionTime", stamp(now))
    return found


def with_trouble(status: Manifest, trouble: Trouble | None, now: float) -> Manifest:
    """The status with what keeps the job from going on, or nothing: the condition BLOCKED, and the message of a job
    that waits for nothing else."""
    if trouble is None:
        return with_condition(status, BLOCKED, False, "Unblocked", "", now)
    found = with_condition(status, BLOCKED, True, trouble.reason, trouble.message, now)
    return {**found, "message": trouble.message} if found.get("phase") in (PENDING, RESTARTING) else found
