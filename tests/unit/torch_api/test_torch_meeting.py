"""Attempts of ranks to find each other in a store that outlives them, and that others write to."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from bagua.base.errors import ServiceError
from bagua.csrc.wire_version import WIRE_VERSION
from bagua.torch_api.job import meeting as module
from bagua.torch_api.job.meeting import Meeting, Superseded, text_of


@pytest.fixture
def together():
    """Runs functions side by side; returns their futures."""
    with ThreadPoolExecutor(8) as pool:
        yield lambda *works: [pool.submit(work) for work in works]


def alive():
    return


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def attempt(store, rank, world, job="job"):
    meeting = Meeting(store, rank, world)
    if rank == 0:
        meeting.succeed(job, alive)
    return meeting.number, meeting.result()


def results(futures):
    return [future.result(timeout=30) for future in futures]


def test_all_come_to_the_same_end(together):
    store = HashStore()
    for number in (1, 2, 3):  # a new life of the ranks with the same store, whoever comes first
        job = f"job-{number}"
        works = [lambda rank=rank, job=job: attempt(store, rank, 3, job) for rank in (2, 0, 1)]
        assert results(together(*works)) == [(number, job)] * 3


def test_a_late_rank_belongs_to_the_attempt_of_the_others(together):
    store = HashStore()
    early = together(lambda: attempt(store, 0, 3), lambda: attempt(store, 1, 3))
    until(lambda: store.check(["bagua/1/here/1"]))
    assert not early[0].done()
    assert results(together(lambda: attempt(store, 2, 3))) == [(1, "job")] and results(early) == [(1, "job")] * 2


def test_a_rank_that_is_started_again_alone_waits_for_the_next_attempt(together):
    """Rank 1 came and died; its successor must not believe what was told to it."""
    store = HashStore()
    Meeting(store, 0, 3)
    Meeting(store, 1, 3)
    (second,) = together(lambda: attempt(store, 1, 2))
    (first,) = together(lambda: attempt(store, 0, 2))
    assert results([first, second]) == [(2, "job")] * 2


def test_rank_0_is_started_again_while_others_wait(together):
    store = HashStore()
    Meeting(store, 0, 3)  # and dies
    (waiting,) = together(lambda: Meeting(store, 1, 3).ask("nothing", "Nobody"))
    until(lambda: store.check(["bagua/1/here/1"]))
    (first,) = together(lambda: attempt(store, 0, 2))
    with pytest.raises(Superseded):
        waiting.result(timeout=30)
    assert results(together(lambda: attempt(store, 1, 2))) == [(2, "job")] and results([first]) == [(2, "job")]


def test_a_failure_reaches_all_and_ends_the_attempt(together):
    store = HashStore()
    zero = Meeting(store, 0, 3)

    def follow(rank):
        meeting = Meeting(store, rank, 3)
        try:
            meeting.ask("ready/1", "Rank 1")
        except ServiceError as error:
            read.append(str(error))
            meeting.fail("another reason, too late")

    read = []
    waits = together(lambda: follow(1), lambda: follow(2))
    until(lambda: store.check(["bagua/1/here/1", "bagua/1/here/2"]))
    zero.fail("no \x1b[31msecret")  # the store may end with rank 0: it stays until they have read
    assert len(read) == 2 and all("could not come together: no ?[31msecret" in text for text in read)
    results(waits)
    with pytest.raises(ServiceError, match="secret"):
        zero.ask("hello/1", "Rank 1")
    assert results(together(*[lambda rank=rank: attempt(store, rank, 2) for rank in (0, 1)])) == [(2, "job")] * 2


def test_ranks_of_releases_that_can_not_talk_are_told_at_once(monkeypatch):
    store = HashStore()
    others = [Meeting(store, rank, 3) for rank in (0, 2)]
    words = (
        rf"rank 1 has bagua 9\.1 \(wire version {WIRE_VERSION + 1}\), rank 0 bagua .* \(wire version {WIRE_VERSION}\)"
    )
    with monkeypatch.context() as newer, pytest.raises(ServiceError, match=words):
        newer.setattr(module, "WIRE_VERSION", WIRE_VERSION + 1)
        newer.setattr("bagua.__version__", "9.1")
        Meeting(store, 1, 3)
    for waiting in others:
        with pytest.raises(ServiceError, match=words):
            waiting.ask("ready/1", "Rank 1")


def test_hosts_whose_islands_have_other_sizes_are_told_at_once(monkeypatch):
    store = HashStore()
    others = [Meeting(store, rank, 3) for rank in (0, 2)]
    with monkeypatch.context() as other, pytest.raises(ServiceError, match="rank 1 has BAGUA_ISLAND_SIZE=2, rank 0 1"):
        other.setenv("BAGUA_ISLAND_SIZE", "2")
        Meeting(store, 1, 3)
    for waiting in others:
        with pytest.raises(ServiceError, match="give all hosts the same"):
            waiting.ask("ready/1", "Rank 1")


def test_nobody_waits_for_ever(monkeypatch):
    monkeypatch.setattr(module, "DEADLINE_S", 0.05)
    with pytest.raises(ServiceError, match="Rank 0 did not come"):
        Meeting(HashStore(), 1, 3)
    with pytest.raises(ServiceError, match="Rank 1 did not come"):
        attempt(HashStore(), 0, 2)


@pytest.mark.parametrize(
    "garbage", [b"", b"\xff\xfe", b"[]", b"null", b"7", b'{"a":', b"[" * 60_000, b" " * 70_000 + b"{}"]
)
def test_what_others_write_is_noticed(garbage):
    store = HashStore()
    meeting = Meeting(store, 0, 3)
    store.set("bagua/1/hello/1", garbage)
    with pytest.raises(ServiceError, match="'hello/1' what no rank of this version wrote"):
        meeting.ask("hello/1", "Rank 1")
    store.set("bagua/1/end", garbage)
    with pytest.raises(ServiceError, match="what no rank of this version wrote"):
        meeting.ask("hello/2", "Rank 2")


def test_a_store_that_is_gone():
    class Gone(HashStore):
        def check(self, keys):
            raise RuntimeError("Connection reset by peer\nat line 7")

    meeting = Meeting(HashStore(), 0, 3)
    meeting._store = Gone()
    with pytest.raises(ServiceError, match=r"does not answer any more \(Connection reset by peer\)"):
        meeting.ask("hello/1", "Rank 1")
    meeting.fail("nobody hears it")


@pytest.mark.parametrize("value", [{}, {"socket": 7}, {"socket": ""}, {"socket": ["/x"]}])
def test_values_of_the_wrong_kind(value):
    with pytest.raises(ServiceError, match="no rank of this version"):
        text_of(value, "socket")
