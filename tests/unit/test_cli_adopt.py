"""The ephemeral daemon's patience, and what it tells the ranks."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from bagua.base.errors import ServiceError, UnavailableError
from bagua.cli import adopt
from bagua.proto import common_pb2, job_pb2

WAITING, RUNNING, EXITED = (
    common_pb2.RANK_STATE_WAITING,
    common_pb2.RANK_STATE_RUNNING,
    common_pb2.RANK_STATE_EXITED,
)


def job(state: common_pb2.JobState.ValueType, *ranks: common_pb2.RankState.ValueType) -> job_pb2.Job:
    statuses = [common_pb2.RankStatus(rank=number, state=rank) for number, rank in enumerate(ranks)]
    return job_pb2.Job(job_id="j1", state=state, ranks=statuses)


class Service:
    """Plays cluster and client: tells of the job what the test wrote down, then nothing more."""

    def __init__(self, *told: job_pb2.Job | Exception) -> None:
        self.told = told
        self.cancelled = ""
        self.tell_of_end: Callable[[str], None] = lambda words: None

    def watch(self, job_id: str) -> Iterator[job_pb2.JobUpdate]:
        for what in self.told:
            if isinstance(what, Exception):
                raise what
            yield job_pb2.JobUpdate(job=what)
        Event().wait(10)

    def on_unexpected_end(self, tell: Callable[[str], None]) -> None:
        self.tell_of_end = tell

    def cancel(self, job_id: str, reason: str) -> job_pb2.Job:
        self.cancelled = reason
        return job(common_pb2.JOB_STATE_CANCELLED)


def wait(service: Any) -> job_pb2.Job:
    return adopt._wait(service, service, job(common_pb2.JOB_STATE_PENDING))


def test_until_the_job_has_ended() -> None:
    told = job(common_pb2.JOB_STATE_RUNNING, RUNNING), job(common_pb2.JOB_STATE_SUCCEEDED, EXITED)
    assert wait(Service(*told)).state == common_pb2.JOB_STATE_SUCCEEDED


def test_nobody_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt, "JOIN_PATIENCE_S", 0.05)
    service = Service(job(common_pb2.JOB_STATE_PENDING), job(common_pb2.JOB_STATE_STARTING, WAITING, WAITING))
    assert wait(service).state == common_pb2.JOB_STATE_CANCELLED
    assert "no rank joined" in service.cancelled


def test_one_that_joined_is_enough_to_go_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt, "JOIN_PATIENCE_S", 0.05)
    service = Service(
        job(common_pb2.JOB_STATE_STARTING, WAITING, WAITING),
        job(common_pb2.JOB_STATE_STARTING, RUNNING, WAITING),
        UnavailableError("the end of this test"),
    )
    with pytest.raises(ServiceError, match="the end of this test"):
        wait(service)
    assert not service.cancelled


def test_a_service_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setattr(service, "on_unexpected_end", lambda tell: tell("The coordinator was killed by SIGKILL."))
    with pytest.raises(ServiceError, match="was killed by SIGKILL"):
        wait(service)


def test_info_is_for_this_user_alone(tmp_path: Path) -> None:
    class Cluster:
        address, tls, socket = "127.0.0.1:1", "", "/run/rank.sock"

    cluster: Any = Cluster()
    adopt._write_info(tmp_path / "info", cluster, "secret", "j1")
    assert [path.name for path in tmp_path.iterdir()] == ["info"]
    assert stat.S_IMODE((tmp_path / "info").stat().st_mode) == 0o600
    document = json.loads((tmp_path / "info").read_text())
    assert document == {
        "coordinator": "127.0.0.1:1",
        "token": "secret",
        "tls": "",
        "job_id": "j1",
        "socket": "/run/rank.sock",
    }
