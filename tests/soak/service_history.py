"""The rules that a history of the service keeps, whatever happened meanwhile."""

import sqlite3
import time
from contextlib import closing

from bagua.daemon.coordinator.rules.identity import ADMINISTRATOR, DEFAULT_NAMESPACE
from bagua.daemon.coordinator.use.service import stored_key
from bagua.proto import common_pb2

HISTORY = (
    "a job that was acknowledged is there, once for each key, and has ended",
    "the ranks of a job were started at most once, and of one that succeeded once",
    "a job succeeded only if its ranks exit with 0, and is cancelled only if somebody asked for that",
    "its events begin with its submission, are numbered without a gap, and end with its state",
    "the database and backups that were taken meanwhile are whole",
    "no process of a job is left",
)
GONE_S = 60.0


def broken_rules(world):
    """Which of them are broken, in words; the first of each kind."""
    found = []
    kinds = set()
    for kind, words in _look(world):
        if kind not in kinds:
            kinds.add(kind)
            found.append(words)
    world.check("check")
    deadline = time.monotonic() + GONE_S
    while left := world.left_over():
        if time.monotonic() > deadline:
            found.append(f"processes of jobs are left: {left}")
            break
        time.sleep(0.2)
    return found


def _look(world):
    name = common_pb2.JobState.Name
    with closing(sqlite3.connect(f"file:{world.database}?mode=ro", uri=True, timeout=30)) as database:
        rows = database.execute("SELECT job_id, idempotency_key, state, reason FROM jobs").fetchall()
        events = {}
        query = "SELECT job_id, seq, kind, reason FROM events ORDER BY job_id, seq"
        for job_id, seq, kind, reason in database.execute(query):
            events.setdefault(job_id, []).append((seq, kind, reason))
    tried = {*world.jobs, *(path.name for path in world.marks.iterdir())}
    keys = {stored_key(key, DEFAULT_NAMESPACE, ADMINISTRATOR.name): key for key in tried}
    rows = [(job_id, keys.get(key, key), state, reason) for job_id, key, state, reason in rows]
    known = {job_id: key for job_id, key, _, _ in rows}
    for key, job_id in world.jobs.items():
        if known.get(job_id) != key:
            yield "lost", f"{job_id} was acknowledged for {key}, and the database has {known.get(job_id)}"
    for job_id, key, state, reason in rows:
        starts = _starts(world.marks / key)
        if key in world.jobs and state not in world.ENDED:
            yield "unfinished", f"{job_id} is {name(state)}: {reason}"
        if starts > 1 or (state == common_pb2.JOB_STATE_SUCCEEDED and starts != 1):
            yield "starts", f"{job_id} is {name(state)}, and its rank was started {starts} times"
        if state == common_pb2.JOB_STATE_SUCCEEDED and world.codes.get(key):
            yield "code", f"{job_id} succeeded, and its rank exits with {world.codes[key]}"
        if state == common_pb2.JOB_STATE_CANCELLED and job_id not in world.cancelled:
            yield "cancelled", f"{job_id} was cancelled, and nobody asked for that"
        history = events.get(job_id, [])
        if [seq for seq, _, _ in history] != list(range(1, len(history) + 1)) or history[0][1] != "submitted":
            yield "events", f"the events of {job_id} are {history}"
        last = [reason for _, kind, reason in history if kind == "state"][-1:]
        if state in world.ENDED and not (last and last[0].startswith(name(state).removeprefix("JOB_STATE_"))):
            yield "end", f"{job_id} is {name(state)}, and its last event of a state is {last}"


def _starts(mark):
    return len(mark.read_text().splitlines()) if mark.exists() else 0
