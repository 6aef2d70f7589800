"""Results of the data plane against a float64 reference: every dtype, op, kind, size and shape of a job.

The sample here takes some seconds. ``pytest tests/integration/data_plane --full`` runs all of it, up to vectors of
1 GiB: see tests/README.md.
"""

import pytest
from plane import cases, reference

SMALL_CHUNK, CHUNK = 16384, 524288

SAMPLED = {
    "one rank": ([[0]], CHUNK),
    "three ranks": ([[0, 1, 2]], SMALL_CHUNK),
    "two hosts": ([[0], [1, 2]], CHUNK),
    "mixed ranks": ([[0, 3], [1], [2, 4]], SMALL_CHUNK),
    "eight ranks, four hosts": ([[0, 1], [2], [3, 4, 5], [6, 7]], SMALL_CHUNK),
}
FULL = {
    **{f"{n} ranks": ([list(range(n))], CHUNK) for n in range(1, 9)},
    **{f"{n} hosts": ([[rank] for rank in range(n)], CHUNK) for n in range(2, 5)},
    "2 + 2": ([[0, 1], [2, 3]], CHUNK),
    "3 + 1": ([[0, 1, 2], [3]], SMALL_CHUNK),
    "4 + 4": ([[0, 1, 2, 3], [4, 5, 6, 7]], CHUNK),
    "1 + 2 + 1": ([[0], [1, 2], [3]], SMALL_CHUNK),
    "mixed": ([[0, 3], [1], [2, 4]], CHUNK),
    "2 + 2 + 2 + 2": ([[0, 1], [2, 3], [4, 5], [6, 7]], CHUNK),
    "2 + 1 + 3 + 2": ([[0, 1], [2], [3, 4, 5], [6, 7]], SMALL_CHUNK),
}
BATCH = 400  # cases that a rank gets at once


def run(make_job, layout, chunk, todo, check=True):
    """All cases in one job."""
    job = make_job(layout, chunk_bytes=chunk)
    job.ask("alloc", nbytes=cases.segment_bytes(todo, job.size))
    digests, share = [], 0.0
    for first in range(0, len(todo), BATCH):
        some, used = job.verify(todo[first : first + BATCH], check, timeout=600.0)
        digests, share = digests + some, max(share, used)
    for host in range(len(layout)):
        assert job.state(host)["error"] == ""
    job.leave()
    return digests, share


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name.startswith(("eight", "mixed", "three")) else ())
        for name in SAMPLED
    ],
)
def test_sample(make_job, name):
    """Every pair of dtype and op, and every kind, at sizes where something changes; twice, with the same bits."""
    layout, chunk = SAMPLED[name]
    ranks = sum(map(len, layout))
    todo = cases.sampled(ranks, len(layout), chunk, seed=0, extra=60 if ranks < 8 else 0)
    assert {(c["dtype"], c["op"]) for c in todo if c["kind"] == "allreduce"} == {
        (dtype, op) for dtype, ops in reference.OPS.items() for op in ops
    }
    digests, share = run(make_job, layout, chunk, todo)
    assert ranks == 1 or 0.2 < share <= 1.0, "the bounds are not near what happens"
    again, _ = run(make_job, layout, chunk, todo, check=False)
    assert again == digests


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FULL)
def test_everything(make_job, name):
    layout, chunk = FULL[name]
    ranks = sum(map(len, layout))
    todo = list(cases.full(ranks, len(layout), chunk))
    digests, _ = run(make_job, layout, chunk, todo)
    again, _ = run(make_job, layout, chunk, todo, check=False)
    assert again == digests


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", [[[0, 1]], [[0], [1]]], ids=["one host", "two hosts"])
def test_up_to_a_gibibyte(make_job, layout):
    """Needs 6 GiB of memory."""
    todo = list(cases.large(2))
    digests, _ = run(make_job, layout, CHUNK, todo)
    again, _ = run(make_job, layout, CHUNK, todo, check=False)
    assert again == digests
