"""Results of the data plane against a float64 reference: every dtype, op, kind, size and shape of a job.

The sample takes some seconds. With ``--full`` it is larger, for more layouts, and vectors have up to 1 GiB: see
tests/README.md.
"""

import pytest
from plane import cases, reference

SMALL_CHUNK, CHUNK = 16384, 524288

LAYOUTS = {
    "one rank": ([[0]], CHUNK),
    "two hosts": ([[0], [1, 2]], CHUNK),
}
FULL = {
    **{f"{n} ranks": ([list(range(n))], SMALL_CHUNK if n == 3 else CHUNK) for n in range(2, 9)},
    **{f"{n} hosts": ([[rank] for rank in range(n)], CHUNK) for n in range(2, 5)},
    "2 + 2": ([[0, 1], [2, 3]], CHUNK),
    "3 + 1": ([[0, 1, 2], [3]], SMALL_CHUNK),
    "4 + 4": ([[0, 1, 2, 3], [4, 5, 6, 7]], CHUNK),
    "mixed": ([[0, 3], [1], [2, 4]], SMALL_CHUNK),
    "2 + 1 + 3 + 2": ([[0, 1], [2], [3, 4, 5], [6, 7]], SMALL_CHUNK),
}
BATCH = 400  # cases that a rank gets at once


def run(make_job, layout, chunk, todo):
    """All cases in one job, and in another one, which has the same bits. The largest share of a bound that is used."""
    digests, shares = [], []
    for check in (True, False):
        job = make_job(layout, chunk_bytes=chunk)
        job.ask("alloc", nbytes=cases.segment_bytes(todo, job.size))
        for first in range(0, len(todo), BATCH):
            some, used = job.verify(todo[first : first + BATCH], check, timeout=600.0)
            digests, shares = [*digests, *some], [*shares, used]
        assert [job.state(host)["error"] for host in range(len(layout))] == [""] * len(layout)
        job.leave()
    assert digests[: len(todo)] == digests[len(todo) :]
    return max(shares)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_sample(make_job, name, request):
    """Every pair of dtype and op, and every kind, at sizes where something changes."""
    layout, chunk = {**LAYOUTS, **FULL}[name]
    ranks = sum(map(len, layout))
    extra = 3000 if request.config.getoption("--full") else 60
    todo = cases.sampled(ranks, len(layout), chunk, seed=0, extra=extra)
    assert {(c["dtype"], c["op"]) for c in todo if c["kind"] == "allreduce"} == {
        (dtype, op) for dtype, ops in reference.OPS.items() for op in ops
    }
    share = run(make_job, layout, chunk, todo)
    assert ranks == 1 or 0.2 < share <= 1.0, "the bounds are not near what happens"


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", [[[0, 1]], [[0], [1]]], ids=["one host", "two hosts"])
def test_up_to_a_gibibyte(make_job, layout):
    """Needs 6 GiB of memory."""
    run(make_job, layout, CHUNK, list(cases.large(2)))
