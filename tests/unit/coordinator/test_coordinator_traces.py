"""Clocks of nodes, and which jobs can be traced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.base.errors import ConflictError, InvalidRequestError
from bagua.daemon.coordinator.rules.clock_offsets import Exchange, offset_during, offset_of
from bagua.daemon.coordinator.rules.domain import JobRecord, JobSpec, JobState
from bagua.daemon.coordinator.streams.traces import check, check_runs
from bagua.proto.job_pb2 import TraceJobRequest

DELAYS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=8)


def exchanges(true: int, delays: list[tuple[int, int]], sent: int = 0) -> list[Exchange]:
    """Exchanges with a node whose clock is ``true`` ns behind, with these delays of the two ways."""
    return [Exchange(sent, sent + there - true, sent + there + back) for there, back in delays]


@given(st.integers(-(10**15), 10**15), DELAYS, DELAYS)
def test_the_offset_is_within_its_bound(true: int, before: list[tuple[int, int]], after: list[tuple[int, int]]) -> None:
    found = offset_during(exchanges(true, before), exchanges(true, after, 10**9))
    assert abs(found.ns - true) <= found.bound
    assert found.bound <= max(min(there + back for there, back in one) for one in (before, after)) + 2


@given(st.integers(-(10**9), 10**9), st.integers(-(10**6), 10**6), DELAYS, DELAYS)
def test_the_bound_covers_clocks_that_drift(
    true: int, drift: int, before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> None:
    found = offset_during(exchanges(true, before), exchanges(true + drift, after, 10**9))
    assert abs(found.ns - true) <= found.bound and abs(found.ns - true - drift) <= found.bound


def test_the_quickest_exchange_counts() -> None:
    found = offset_of(exchanges(500, [(100, 9000), (10, 20), (4000, 0)]))
    assert (found.ns, found.bound) == (505, 15)


def job(state: JobState, paused: bool = False) -> JobRecord:
    spec = JobSpec("train", 1, 1, placement_timeout_s=0, stop_grace_s=0, master_port=0, wire=b"")
    return JobRecord("job-1", spec, created_at=0, state=state, reason="needs 2 nodes", paused=paused)


@pytest.mark.parametrize(
    ("state", "paused", "words"),
    [
        (JobState.SUCCEEDED, False, r"has ended \(succeeded\): only a job that runs"),
        (JobState.PENDING, False, r"waits for nodes \(needs 2 nodes\)"),
        (JobState.WAITING, True, "is paused: it makes no steps. `bagua job resume job-1`"),
        (JobState.RUNNING, True, "is paused"),
        (JobState.STOPPING, False, "is stopping: trace it when it runs"),
    ],
)
def test_jobs_that_make_no_steps(state: JobState, paused: bool, words: str) -> None:
    with pytest.raises(ConflictError, match=words):
        check_runs(job(state, paused))


def test_what_is_asked_for() -> None:
    check_runs(job(JobState.RUNNING))
    assert check(TraceJobRequest()) == (5, 60.0)
    assert check(TraceJobRequest(steps=7, timeout_s=2.5)) == (7, 2.5)
    for request in (
        TraceJobRequest(steps=1001),
        TraceJobRequest(timeout_s=-1),
        TraceJobRequest(timeout_s=601),
        TraceJobRequest(timeout_s=float("nan")),
    ):
        with pytest.raises(InvalidRequestError):
            check(request)
