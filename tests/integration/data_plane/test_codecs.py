"""All-reduces that cross between hosts encoded: within the codec's bound, the same bits everywhere and in every run."""

import pytest
from plane import cases

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
