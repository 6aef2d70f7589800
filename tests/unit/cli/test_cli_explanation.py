"""The page of `bagua job explain`: it never fails, and leaves out nothing that matters."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from bagua.base.text import printable
from bagua.cli.display.explanation import explain, marks_of


@dataclass(frozen=True)
class Event:
    time: float
    kind: str
    reason: str
    generation: int = 1


KINDS = (
    *("submitted", "placed", "engine_ready", "rank_started", "rank_exited", "state", "regrouped", "suspended"),
    *("node_error", "waiting", "newcomers", "newcomers_lost", "stopped", "asked", "cancel_requested", "node_stopped"),
)
REASONS = st.one_of(
    st.text(max_size=60),
    st.sampled_from(
        ["RUNNING: all 4 ranks started", "WAITING: paused", "FAILED: rank 1 was killed", "FAILED", ":", ""]
    ),
    st.builds("rank {} on node a exited with code {}".format, st.integers(0, 9), st.integers(0, 3)),
)
EVENTS = st.builds(
    Event, st.floats(), st.one_of(st.sampled_from(KINDS), st.text(max_size=12)), REASONS, st.integers(0, 1 << 64)
)


@given(st.text(max_size=20), st.lists(EVENTS, max_size=30))
@settings(max_examples=150, deadline=None)
def test_any_history_becomes_a_page_that_names_all_that_matters(job_id, events):
    page = explain(job_id, events)
    assert page.endswith("\n") and page.replace("\n", "") == printable(page.replace("\n", ""))
    assert len(page.splitlines()) <= 2 * len(events) + 8
    words = " ".join(page.split())
    for event, mark in zip(events, marks_of(events), strict=True):
        if mark:
            assert " ".join(printable(event.reason).split()) in words, event


def test_ranks_that_the_service_stops_are_no_losses():
    why = "rank 1 on node b exited with code 1: no data"
    events = [
        Event(1.0, "state", "RUNNING: all 3 ranks started"),
        Event(2.0, "rank_exited", why),
        Event(2.0, "state", f"STOPPING: {why}"),
        Event(2.1, "node_error", "node a (vm): rank 1 (pid 7) on node b exited with code 1"),
        Event(2.2, "rank_exited", "rank 0 on node a was killed by SIGTERM"),
        Event(2.3, "rank_exited", "rank 2 on node a exited with code 3: no disk"),
        Event(2.4, "state", f"FAILED: {why}"),
    ]
    assert marks_of(events) == ["", "loss", "end", "", "", "loss", "end"]
    page = explain("job-1", events)
    assert "2 x, marked 'loss'" in page and "seen by node a (vm): rank 1" in page
