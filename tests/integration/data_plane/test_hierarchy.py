"""Between hosts travels what one rank for each host would send, however many ranks there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plane import cases, world

REPEAT = 5
HEADERS = 0.01  # share of the payload: frames of chunks and messages about operations


def sent(make_job: Callable[..., world.Job], layout: list[list[int]], kind: str, nbytes: int) -> list[int]:
    """Bytes that each host sends for one operation."""
    job = make_job(layout)
    case = {
        "kind": kind, "dtype": "float32", "op": "AVG", "count": nbytes // 4, "root": -1, "in_place": False, "src_at": 0,
        "dst_at": cases.EDGE, "special": False, "seed": 1,
    }  # fmt: skip
    job.ask("alloc", nbytes=nbytes + 4096)
    job.verify([case])
    before = [job.state(host)["stats"]["bytes_sent"] for host in range(len(layout))]
    job.verify([case] * REPEAT)
    after = [job.state(host)["stats"]["bytes_sent"] for host in range(len(layout))]
    job.leave()
    return [(now - was) // REPEAT for now, was in zip(after, before, strict=True)]


@pytest.mark.parametrize(
    ("layout", "single"),
    [([[0, 1], [2, 3]], [[0], [1]]), ([[0, 1, 2], [3]], [[0], [1]]), ([[0, 1], [2], [3, 4]], [[0], [1], [2]])],
    ids=["2 + 2", "3 + 1", "2 + 1 + 2"],
)
def test_bytes_between_hosts(
    make_job: Callable[..., world.Job], layout: list[list[int]], single: list[list[int]]
) -> None:
    nbytes = 2 << 20
    many, one = sent(make_job, layout, "allreduce", nbytes), sent(make_job, single, "allreduce", nbytes)
    floor = 2 * (len(layout) - 1) / len(layout) * nbytes
    for of_many, of_one in zip(many, one, strict=True):
        assert abs(of_many - of_one) <= HEADERS * floor, (many, one)
        assert floor <= of_one <= (1 + HEADERS) * floor, (one, floor)


def test_small_vectors_take_one_trip(make_job: Callable[..., world.Job]) -> None:
    """A small vector goes to each other host once, with one header and one description."""
    nbytes = 4096
    for of_host in sent(make_job, [[0, 1], [2, 3], [4]], "allreduce", nbytes):
        assert 2 * nbytes <= of_host <= 2 * (nbytes + 1024), of_host
