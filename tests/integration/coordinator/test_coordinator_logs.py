"""Logs of ranks travel from the node through the coordinator to whoever reads."""

import contextlib
import queue
import signal
import threading
import time

import pytest

from bagua.base.errors import InvalidRequestError, UnavailableError
from bagua.daemon.coordinator.streams.logs import WINDOW_BYTES
from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2 as n

from .conftest import PATIENT, held


@pytest.fixture
def run(coordinator, client, connect, run_on):
    """(node, its job with two ranks)."""
    a = connect(coordinator, "a")
    return a, run_on(client, a, 2)


def reply(peer, read, data, offset=0, **more):
    chunk = c.LogChunk(rank=read.rank, data=data, offset=offset, **more)
    peer.send(n.NodeFact(log=n.LogReply(request_id=read.request_id, chunk=chunk)))


class Reading(threading.Thread):
    """Reads in the background."""

    def __init__(self, client, job_id, **more):
        super().__init__(daemon=True)
        self.chunks = []
        self.call = client.logs(job_id, **more)
        self.start()

    def run(self):
        for chunk in self.call:
            self.chunks.append(chunk)

    def texts(self):
        self.join(20)
        assert not self.is_alive()
        found = {}
        for chunk in self.chunks:
            assert chunk.offset == len(found.get(chunk.rank, b"")) or not chunk.data
            found[chunk.rank] = found.get(chunk.rank, b"") + chunk.data
        return found


def test_logs_of_all_ranks_come_from_their_node(run, client):
    a, order = run
    reading = Reading(client, order.job_id, tail=5)
    reads = [a.expect(n.ReadLog), a.expect(n.ReadLog)]
    assert [(read.rank, read.follow, read.tail_lines) for read in reads] == [(0, False, 5), (1, False, 5)]
    for read in reads:
        reply(a, read, b"hello ")
        reply(a, read, f"from {read.rank}\n".encode(), offset=6, eof=True)
    assert reading.texts() == {0: b"hello from 0\n", 1: b"hello from 1\n"}


def test_what_a_node_can_not_read_is_told(run, client):
    a, order = run
    reading = Reading(client, order.job_id, ranks=[1], follow=True)
    read = a.expect(n.ReadLog)
    assert read.rank == 1 and read.follow
    reply(a, read, b"later\n", offset=1000, missing=1000, error="the file is gone", eof=True)
    reading.join(20)
    (told,) = reading.chunks
    assert (told.offset, told.missing, told.data) == (1000, 1000, b"later\n")
    assert (told.error, told.eof) == ("the file is gone", True)


def test_the_node_is_told_when_the_reader_goes_away(coordinator, run):
    a, order = run
    with coordinator.client() as reader:
        stream = reader.logs(order.job_id, ranks=[0], follow=True)

        def read_on():
            with pytest.raises(UnavailableError, match="closed"):
                next(stream)

        thread = threading.Thread(target=read_on)
        thread.start()
        read = a.expect(n.ReadLog)
    thread.join(20)
    assert a.expect(n.EndLog).request_id == read.request_id
    reply(a, read, b"nobody hears this")
    a.send(n.NodeFact(log=n.LogReply(request_id=12_345)))
    assert a.quiet()


def test_a_node_that_goes_away_ends_its_logs_with_words(run, client, until):
    """At once for those that don't follow, with the job for those that do."""
    a, order = run
    reading, following = (Reading(client, order.job_id, ranks=[0], follow=follow) for follow in (False, True))
    for _ in range(2):
        reply(a, a.expect(n.ReadLog), b"before")
    a.close()
    reading.join(20)
    assert reading.chunks[-1].eof and "node a has lost its connection" in reading.chunks[-1].error
    assert "node a is not connected" in next(client.logs(order.job_id, ranks=[0])).error
    client.cancel(order.job_id)
    until(client, order.job_id, c.JOB_STATE_CANCELLED, c.JOB_STATE_FAILED)
    following.join(20)
    assert following.chunks[-1].eof and "node a is not connected" in following.chunks[-1].error


def test_whoever_follows_has_the_rest_when_a_node_is_back(start, connect, run_on):
    coordinator = start(**PATIENT)  # so that the job goes on meanwhile
    a = connect(coordinator, "a")
    with coordinator.client() as client:
        order = run_on(client, a, 2)
        reading = Reading(client, order.job_id, ranks=[0], follow=True)
        reply(a, a.expect(n.ReadLog), b"before ")
        while not reading.chunks:
            time.sleep(0.05)
        a.close()
        while not reading.chunks[-1].error:
            time.sleep(0.05)
        told = reading.chunks.pop()
        assert not told.eof and "node a is not connected: the rest comes when it is back" in told.error
        a = connect(coordinator, "a", jobs=(held(order, 0, 1),))
        while not isinstance(read := a.next(), n.ReadLog):
            pass
        assert read.offset == len(b"before ")
        reply(a, read, b"and after", offset=read.offset, eof=True)
        assert reading.texts() == {0: b"before and after"}


def test_whoever_follows_has_the_rest_when_the_coordinator_is_back(start, connect, run_on):
    """Nothing twice, and nothing left out: neither of a rank that was read before nor of one that was not."""
    first = start()
    a = connect(first, "a")
    with first.client() as client:
        order = run_on(client, a, 2)
        away = []
        reading = Reading(client, order.job_id, follow=True, tail=3, on_away=away.append)
        reads = {read.rank: read for read in (a.expect(n.ReadLog), a.expect(n.ReadLog))}
        reply(a, reads[0], b"be")
        reply(a, reads[0], b"fore ", offset=2)
        while len(reading.chunks) < 2:
            time.sleep(0.05)
        first.end(signal.SIGKILL)
        second = start(listen=first.address)
        a = connect(second, "a", jobs=(held(order, 0, 1),))
        again = {}
        while len(again) < 2:
            if isinstance(found := a.next(), n.ReadLog):
                again[found.rank] = found
        assert [(again[rank].offset, again[rank].tail_lines) for rank in (0, 1)] == [(7, 0), (0, 3)]
        reply(a, again[0], b"before and after", eof=True)  # as from an older coordinator, which begins again
        reply(a, again[1], b"all", eof=True)
        assert reading.texts() == {0: b"before and after", 1: b"all"}
        assert "No coordinator answers" in away[0]


def test_jobs_without_ranks_yet(coordinator, client, connect):
    """Logs of one that waits are followed once it runs; one that never ran has none."""
    never = client.submit(c.JobSpec(entry="t.py", nnodes=9, nproc_per_node=1))
    assert list(client.logs(never.job_id, follow=True)) == []
    job = client.submit(c.JobSpec(entry="t.py", nnodes=1, nproc_per_node=1, placement_timeout_s=20))
    reading = Reading(client, job.job_id, follow=True)
    a = connect(coordinator, "a")
    a.expect(n.RunJob)
    reply(a, a.expect(n.ReadLog), b"there\n", eof=True)
    assert reading.texts() == {0: b"there\n"}


def test_a_reader_sets_the_pace_and_loses_nothing(run, client):
    """The node answers each request with as much as was asked for. No byte comes twice, and all are there."""
    a, order = run
    whole = bytes(range(256)) * 10_000
    reading = Reading(client, order.job_id, ranks=[1])
    sent = 0
    while sent < len(whole):
        read = a.expect(n.ReadLog)
        assert read.offset == sent and 0 < read.max_bytes <= WINDOW_BYTES
        data = whole[sent : sent + read.max_bytes]
        sent += len(data)
        reply(a, read, data, offset=read.offset, more=sent < len(whole), eof=sent == len(whole))
    assert reading.texts() == {1: whole}


def test_readers_that_do_not_read_cost_little(run, client):
    """Bytes that wait for a reader are bounded for any log: a window here, and gRPC's buffers."""
    a, order = run
    calls = [client.logs(order.job_id, ranks=[0], follow=True) for _ in range(10)]
    readers = [threading.Thread(target=next, args=(call,), daemon=True) for call in calls]
    for reader in readers:
        reader.start()
    asked = 0
    with contextlib.suppress(queue.Empty):  # nothing more is asked for
        while asked <= 200 << 20:
            read = a.next(timeout=2.0)
            asked += read.max_bytes
            reply(a, read, b"x" * read.max_bytes, offset=read.offset, more=True)
    for reader in readers:
        reader.join(20)
    assert 0 < asked <= 10 * (8 << 20)
    for call in calls:
        call.close()


def test_a_node_that_sends_more_than_it_was_asked_for(run, client):
    a, order = run
    reading = Reading(client, order.job_id, ranks=[0])
    read = a.expect(n.ReadLog)
    reply(a, read, b"x" * (read.max_bytes + 1))
    reading.join(20)
    assert "sends more than it was asked for" in reading.chunks[-1].error
    assert a.expect(n.EndLog).request_id == read.request_id


def test_bounds_of_a_request(run, client):
    _, order = run
    for asked, words in (
        ({"tail": 4_000_000_000}, "4000000000 are too many, 1000000 is the most"),
        ({"ranks": [0] * 100_000}, "100000 were named, the job has 2 ranks"),
        ({"ranks": [2]}, "there is no rank 2, the job has 2 ranks"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            list(client.logs(order.job_id, **asked))
