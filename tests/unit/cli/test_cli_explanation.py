"""The page of `bagua job explain`: it never fails, and leaves out nothing that matters."""

from __future__ import annotations

import math
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
def test_any_history_becomes_a_page_that_names_all_that_matters(job_id: str, events: list[Event]) -> None:
    page = explain(job_id, events)
    assert page.endswith("\n") and page.replace("\n", "") == printable(page.replace("\n", ""))
    assert len(page.splitlines()) <= 2 * len(events) + 8
    words = " ".join(page.split())
    for event, mark in zip(events, marks_of(events), strict=True):
        if mark:
            assert " ".join(printable(event.reason).split()) in words, event


def history() -> list[Event]:
    return [
        Event(1000.0, "submitted", "2 x 2 ranks", 0),
        Event(1001.0, "waiting", "the job needs 2 nodes with 2 free slots, and there is 1", 0),
        Event(1010.0, "placed", "placed on a, b"),
        *(Event(1011.0 + rank, "rank_started", f"rank {rank} on node a started") for rank in range(6)),
        Event(1020.0, "state", "RUNNING: all 6 ranks started"),
        Event(1080.0, "rank_exited", "rank 3 on node b was killed by SIGKILL"),
        Event(1080.1, "suspended", "node a: rank 3 is lost"),
        Event(1080.2, "regrouped", "generation 2 of 5 ranks: rank 3 on node b was killed by SIGKILL", 2),
        Event(1090.0, "asked", "pause", 2),
        Event(1090.1, "state", "WAITING: paused", 3),
        Event(1150.1, "regrouped", "generation 4: it need not wait any more", 4),
        Event(1200.0, "rank_exited", "ranks 0-4 on node a exited with code 0", 4),
        Event(1200.1, "state", "STOPPING: all 5 ranks ended with exit code 0", 4),
        Event(1200.2, "state", "SUCCEEDED: all 5 ranks ended with exit code 0", 4),
    ]


def test_the_page_of_an_elastic_job() -> None:
    page = explain("job-1", history())
    lines = page.splitlines()
    assert lines[0] == "Job job-1 succeeded after 3 min 20 s: all 5 ranks ended with exit code 0"
    assert "for nodes 10.0 s, starting 10.0 s, running 2 min 0 s, waiting 1 min 0 s" in lines[2]
    assert lines[3].split() == "Lost: 2 x, marked 'loss' below".split()
    assert "rank 3 on node b was killed by SIGKILL" in page
    assert "and 4 more of this kind" in page
    assert page.count("-- generation") == 4
    assert "1970-01-01 00:16:40" in lines[8]


def test_ranks_that_the_service_stops_are_no_losses() -> None:
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


def test_a_job_that_goes_on_and_one_without_events() -> None:
    page = explain("job-1", history()[:-2], 1220.1)
    assert page.startswith("Job job-1 has not ended. The last change: generation 4")
    assert "running 2 min 20 s, waiting 1 min 0 s" in page
    assert explain("job-2", []) == "Job job-2 has no events.\n"
    assert "?" in explain("job-3", [Event(math.nan, "submitted", "1 x 1 ranks", 0)])
