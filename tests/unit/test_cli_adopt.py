"""The ephemeral cluster: when it ends, what it tells the rank that started it, where it listens."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import pytest

from bagua.base import leash
from bagua.base.errors import ConfigError, ServiceError
from bagua.cli import adopt
from bagua.proto import common_pb2, job_pb2

RUNNING, EXITED = common_pb2.RANK_STATE_RUNNING, common_pb2.RANK_STATE_EXITED


def job(state: common_pb2.JobState.ValueType, *ranks: common_pb2.RankState.ValueType) -> job_pb2.Job:
    statuses = [common_pb2.RankStatus(rank=number, state=rank) for number, rank in enumerate(ranks)]
    return job_pb2.Job(job_id="j1", state=state, ranks=statuses)


class Service:
    """Plays cluster and client: tells of the job what the test wrote down, then nothing more."""

    def __init__(self, *told: job_pb2.Job | Exception) -> None:
        self.told = told
        self.tell_of_end: Callable[[str], None] = lambda words: None

    def watch(self, job_id: str) -> Iterator[job_pb2.JobUpdate]:
        for what in self.told:
            if isinstance(what, Exception):
                raise what
            yield job_pb2.JobUpdate(job=what)
        Event().wait(10)

    def on_unexpected_end(self, tell: Callable[[str], None]) -> None:
        self.tell_of_end = tell


def wait(service: Any) -> job_pb2.Job:
    return adopt._wait(service, service, job(common_pb2.JOB_STATE_PENDING))


def test_until_the_job_has_ended() -> None:
    told = job(common_pb2.JOB_STATE_RUNNING, RUNNING), job(common_pb2.JOB_STATE_SUCCEEDED, EXITED)
    assert wait(Service(*told)).state == common_pb2.JOB_STATE_SUCCEEDED


def test_a_service_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setattr(service, "on_unexpected_end", lambda tell: tell("The coordinator was killed by SIGKILL."))
    with pytest.raises(ServiceError, match="was killed by SIGKILL"):
        wait(service)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, int]]:
    """(the rank's end of the leash, the descriptor of ours)."""
    rank, ours = leash.pair()
    with rank:
        yield rank, ours.detach()


def gone(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Set when the main thread is told to end."""
    told = Event()
    monkeypatch.setattr(adopt.signal, "pthread_kill", lambda thread, number: told.set())
    return told


def test_a_rank_that_goes_before_it_has_joined(
    ends: tuple[socket.socket, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, ours = ends
    told = gone(monkeypatch)
    starter = adopt.Starter(ours)
    rank.close()
    assert told.wait(10)
    starter.tell(error="nobody hears it")
    starter.close()


def test_a_rank_that_has_joined_may_go(ends: tuple[socket.socket, int], monkeypatch: pytest.MonkeyPatch) -> None:
    rank, ours = ends
    told = gone(monkeypatch)
    starter = adopt.Starter(ours)
    leash.send(rank, {"host": 1, "hello": "x"})
    assert leash.receive(rank) == {"error": "The cluster is not ready for host and hello."}
    starter.answer_with(lambda message: {"welcome": message["hello"] * 2})
    leash.send(rank, {"host": 1, "hello": "x"})
    assert leash.receive(rank) == {"welcome": "xx"}
    leash.send(rank, leash.JOINED)
    rank.close()
    starter._thread.join(10)
    assert not starter._thread.is_alive() and not told.is_set()
    starter.close()


def test_the_first_host_listens_where_it_is_reached_and_nowhere_else() -> None:
    assert adopt.own_address("127.0.0.1") == adopt.own_address("localhost") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"MASTER_ADDR 192\.0\.2\.1 .* is no address of the first host"):
        adopt.own_address("192.0.2.1")
    with pytest.raises(ConfigError, match="means nothing on the first host"):
        adopt.own_address("no.such.name.invalid")


def test_of_several_addresses_that_of_a_network_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian names 127.0.1.1 after the host."""
    found = [(0, 0, 0, "", (address, 0)) for address in ("127.0.1.1", "192.0.2.1", "10.1.2.3")]
    monkeypatch.setattr(adopt.socket, "getaddrinfo", lambda *_, **__: found)
    bound: list[str] = []

    class Probe:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...
        def bind(self, address: tuple[str, int]) -> None:
            bound.append(address[0])
            if address[0] == "192.0.2.1":
                raise OSError("not ours")

    monkeypatch.setattr(adopt.socket, "socket", Probe)
    assert adopt.own_address("head") == "10.1.2.3" and bound == ["192.0.2.1", "10.1.2.3"]
