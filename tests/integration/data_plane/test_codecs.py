"""All-reduces that cross between hosts encoded: within the codec's bound, the same bits everywhere and in every run."""

import pytest
from plane import cases, codecs

SIZES = [0, 1, 3, 100, 1023, 1024, 1025, 4095, 16384, 70_001]
LAYOUTS = {"two hosts": [[0], [1, 2]], "four hosts": [[0, 3], [1], [2], [4, 5]]}
LIMIT_S = 600.0  # with --full: vectors of 64 MiB through every codec, on one core for all ranks


@pytest.mark.timeout(2 * LIMIT_S + 100)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.full if name == "four hosts" else ()) for name in LAYOUTS]
)
def test_error_bounds(make_job, layout, request):
    hosts = LAYOUTS[layout]
    ranks = sum(map(len, hosts))
    large = [(1 << 20) + 17, 1 << 24] if request.config.getoption("--full") else [300_007]
    todo = cases.coded(ranks, [*SIZES, *large])
    found = []
    for check in (True, False):
        job = make_job(hosts, chunk_bytes=16384)
        job.ask("alloc", nbytes=cases.segment_bytes(todo, ranks))
        found.append(job.verify(todo, check, timeout=LIMIT_S)[0])
        assert [job.state(host)["error"] for host in range(len(hosts))] == [""] * len(hosts)
        job.leave()
    assert found[0] == found[1], "another run has other bits"


def one_case(name, count, **more):
    density = codecs.DENSITY if name == "topk" else 0
    return {
        "kind": "allreduce", "dtype": "float32", "op": "AVG", "count": count, "root": -1, "in_place": False,
        "src_at": 0, "dst_at": cases.EDGE, "special": False, "seed": 1, "codec": name, "density": density, **more,
    }  # fmt: skip


def test_error_feedback(make_job):
    """With a residual the mean of many results comes near what is right, also for codecs that are far off each time; a
    communicator made anew begins with nothing left over."""
    job = make_job([[0], [1, 2]])
    job.ask("alloc", nbytes=(40_000 << 2) + 4096)
    for number, name in enumerate(("onebit", "topk", "int4"), 1):
        plain = job.ask("feedback", case=one_case(name, 40_000), rounds=2)[0]["error"]
        fed = job.ask("feedback", case=one_case(name, 40_000, residual=number), rounds=48)[0]["error"]
        assert fed < 0.35 * plain, (name, plain, fed)
    job.leave()
