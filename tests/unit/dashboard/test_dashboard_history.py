"""The past of a job's figures is bounded and whole, and shows a straggler."""

import json

import pytest

from bagua.dashboard.feed import JobFeed
from bagua.dashboard.history import MAX_COLUMNS, MAX_POINTS, MAX_ROWS, History, Report, Shares
from bagua.dashboard.stream import JobView, as_event
from bagua.proto import common_pb2, job_pb2


def report(time, rank=0, step=1, compute=10.0, **more):
    shares = Shares(compute, 0.0, 2.0, 3.0)
    return Report(time, rank, f"node-{rank // 2}", step, 100, **{"metrics": {"loss": 1.0}, "shares": shares} | more)


def test_points_are_thinned_and_keep_the_whole_past():
    history = History()
    for second in range(10 * MAX_POINTS):
        history.add(report(float(second), step=second))
    points = history.points
    assert len(points.points) <= MAX_POINTS
    times = [point.time for point in points.points]
    assert times[0] == 0.0 and times[-1] > 9.5 * MAX_POINTS
    assert times == sorted(times) and points.version > 0


def test_a_map_of_ranks_is_bounded_in_both_directions():
    history = History()
    for second in range(2 * MAX_POINTS):
        for rank in range(0, 1000, 50):
            history.add(report(float(second), rank, second, compute=20.0 if rank == 700 else 10.0))
    document = history.map_document(1000)
    assert len(document["rows"]) <= MAX_ROWS
    assert {len(row) for row in document["rows"]} == {len(document["rows"][0])}
    assert MAX_COLUMNS // 2 < len(document["rows"][0]) <= MAX_COLUMNS
    slow = [number for number, row in enumerate(document["rows"]) if row[-1] == 20.0]
    assert slow == [700 // document["ranks_in_row"]]
    assert len(json.dumps(document)) < 150_000
    assert document["begin"] + len(document["rows"][0]) * document["width"] == pytest.approx(2 * MAX_POINTS, rel=0.05)


def test_a_straggler_is_named_and_equal_ranks_are_not():
    history = History()
    for second in range(5):
        for rank in range(4):
            history.add(report(float(second), rank, second, compute=10.0 + 0.1 * rank))
    assert history.straggler() is None
    for second in range(5, 15):
        for rank in range(4):
            history.add(report(float(second), rank, second, compute=30.0 if rank == 2 else 10.0))
    late = history.straggler()
    assert late is not None and (late.rank, late.node) == (2, "node-1")
    assert late.ms > 25 and late.median == pytest.approx(10.0, abs=0.5)
    history.forget_ranks()
    assert history.straggler() is None and history.lead() is None


def test_a_job_of_many_ranks_with_long_words_is_a_small_document():
    text = "x" * 6_000
    spec = common_pb2.JobSpec(name=text, args=[text] * 500, env={f"{at}{text}": text for at in range(500)})
    ranks = [common_pb2.RankStatus(rank=rank, exit_code=rank == 700, error_tail=text) for rank in range(1_000)]
    feed = JobFeed("job-1")
    feed.put_job(job_pb2.Job(job_id="job-1", created_at=1, spec=spec, reason=text, ranks=ranks, gone=ranks))
    for seq in range(2_000):
        feed.put_event(job_pb2.JobEvent(seq=seq + 1, reason=text))
        metrics = {f"{seq}": 1.0, "compute ms": 10.0}
        feed.put_progress(common_pb2.Progress(rank=seq % 1_000, step=seq, metrics=metrics))
    view = JobView(feed)
    sizes = {kind: len(as_event(kind, document)) for kind, document in view.news()}
    assert set(sizes) == {"job", "events", "now", "chart", "heat"}
    assert max(sizes.values()) < 600_000, sizes
    assert view.news() == []
