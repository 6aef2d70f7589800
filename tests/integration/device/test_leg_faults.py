"""The end of a GPU leg: a rank killed, an engine aborted, NCCL that hangs. Everybody is freed, nothing is left."""

import pytest

ONE_HOST, TWO_HOSTS = [[0, 1, 2]], [[0, 1], [2, 3]]
LAYOUTS = [("staged", ONE_HOST), ("flat", ONE_HOST), ("hierarchical", TWO_HOSTS)]


def check_freed(result, reason, route):
    """The rank was told why, at once and later; its streams are free; nothing is left."""
    assert "raised" not in result, result.get("raised")
    found = result["result"]
    assert reason in found["said"] and reason in found["later"] and found["done"]
    assert (found["aborts"] > 0) == (route != "staged")
    left = found["left"]
    assert (left["communicators"], left["streams"], left["allocated"]) == (0, 1, 0)
    assert result["misuse"] == []


@pytest.mark.parametrize(("route", "hosts"), LAYOUTS)
def test_a_killed_rank_frees_the_others(make_job, route, hosts):
    job = make_job(hosts)
    job.start(("endings.lost", {"route": route, "hang": False}))
    job.lines()
    victim = max(job.tokens)
    job.kill(victim)
    for rank in job.tokens:
        if rank != victim:
            job.go_on(rank)
            check_freed(job.line(rank), f"rank {victim} ", route)


def test_nccl_that_hangs_is_aborted(make_job):
    """All ranks are there, and NCCL does nothing: the end of the engine's generation ends it."""
    job = make_job(ONE_HOST)
    job.start(("endings.lost", {"route": "flat", "hang": True}))
    job.lines()
    job.engines[0].abort("the generation ends")
    for rank in job.tokens:
        job.go_on(rank)
        check_freed(job.line(rank), "the generation ends", "flat")


def test_an_abort_ends_a_call_that_nccl_blocks(make_job):
    """The first operation makes connections, and blocks its caller until all have come: one lives, and never does. Only
    an abort ends that call. Meanwhile the leg knows that the caller waits."""
    job = make_job(ONE_HOST)
    job.start(("endings.ended_in_a_call", {"route": "flat"}), FAKE_NCCL_CONNECTS="1")
    job.lines()
    job.engines[0].abort("the generation ends")
    for rank in job.tokens:
        job.go_on(rank)
        result = job.line(rank)
        assert "raised" not in result and result["misuse"] == [], result
        found = result["result"]
        assert found["aborts"] == 2 and found["left"]["communicators"] == 0
        if rank != max(job.tokens):
            assert "NCCL connects with other ranks, for a reduction." in found["what"]
            assert "the generation ends" in found["said"]


def test_an_error_of_the_device_is_noticed(make_job):
    """Nobody has to ask, and nothing hangs."""
    job = make_job([[0, 1]])
    job.start(("endings.broken_device", {"route": "flat"}))
    for result in job.lines().values():
        assert "CUDA error 700" in result["result"]["said"]


def test_close_has_a_limit(make_job):
    """Where the device does not end what it began, ``close`` comes back all the same, and leaves everything to it."""
    job = make_job([[0, 1]])
    job.start(("endings.device_that_stops", {}))
    job.lines()
    job.go_on(1)
    assert job.line(1) == {"ready": True}  # so the result is there for rank 0, too
    job.go_on(0)
    result = job.line(0)
    assert "raised" not in result, result
    assert 5 < result["result"]["took"]
    job.go_on(1)
    assert "raised" not in job.line(1)


def test_a_daemon_that_dies_frees_its_ranks(make_job):
    job = make_job([[0, 1]])
    job.start(("endings.lost", {"route": "staged", "hang": False}))
    job.lines()
    job.engines[0].close()
    job.go_on(0)
    result = job.line(0)
    assert result["result"]["said"] and result["result"]["done"]


@pytest.mark.parametrize("route", ["staged", "flat"])
def test_how_long_a_rank_waits(make_job, route):
    """Only for what somebody waits for; and NCCL's operations are named, which no daemon knows."""
    job = make_job(ONE_HOST)
    job.start(("endings.waiting", {"route": route}))
    last = max(job.tokens)
    for rank in (0, last):
        assert job.line(rank) == {"ready": True}
    for rank in (last, 0):
        job.go_on(rank)
    for rank, result in job.lines().items():
        assert "raised" not in result and result["misuse"] == [], result
        found = result["result"]
        assert found["unasked"] == found["over"] == 0
        if rank == 0:
            words = "NCCL has not ended all-reduce of world between ranks 0, 1, 2"
            assert found["seconds"] >= 0.05 and (words in found["what"]) == (route == "flat"), found
