"""The end of an allocation of Slurm, which may end the coordinator before the command that started it."""

import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from bagua.base.errors import UnavailableError
from bagua.cli import run
from bagua.cli.cluster import native, slurm
from bagua.proto import common_pb2

AWAY = "No coordinator answers at 127.0.0.1:1 (Connection refused). Start one with `bagua coordinator`. [BG801]"


@pytest.fixture
def options(monkeypatch):
    """A run over nodes of Slurm job 42 that starts nothing."""
    cluster = SimpleNamespace(start_coordinator=lambda: None, start_nodes=lambda *_: None, kill=lambda _: None)
    build = SimpleNamespace(wait=lambda _: None)
    monkeypatch.setattr(run, "_cluster", lambda *_: nullcontext(cluster))
    monkeypatch.setattr(native, "NativeBuild", lambda: nullcontext(build))
    monkeypatch.setattr(slurm, "COME_S", 0.1)
    way = SimpleNamespace(job="42", ends_by_signal=True, announce_end=lambda: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *slurm.CHECKPOINT_PATIENCE_S)}
    yield run.RunOptions(common_pb2.JobSpec(entry="t.py", nnodes=1, nproc_per_node=1), way=way)
    for number, handler in before.items():
        signal.signal(number, handler)


def follow(*signals):
    """Follows a job that Slurm ends: first the coordinator is gone, or the signal comes."""

    def follow_job(spec, cluster, interrupts, *_):
        interrupts.follower = SimpleNamespace(job=common_pb2.JobSpec(), post=lambda _: None)
        for number in signals:
            os.kill(os.getpid(), number)
        assert interrupts.excuse() is bool(signals)  # for a coordinator that is away
        raise UnavailableError(AWAY)

    return follow_job


def test_slurm_is_named_where_it_has_ended_the_coordinator(options, monkeypatch, capsys):
    monkeypatch.setattr(run, "follow_job", follow(signal.SIGTERM))
    ended = run.run_embedded(options, 0)
    assert ended.code == 128 + signal.SIGTERM and ended.interrupted
    told = capsys.readouterr().err
    assert "Slurm has ended job 42" in told and "scancel" in told and "No coordinator answers" not in told


def test_a_coordinator_that_is_away_by_itself_is_called_so(options, monkeypatch):
    monkeypatch.setattr(run, "follow_job", follow())
    with pytest.raises(UnavailableError, match="No coordinator answers"):
        run.run_embedded(options, 0)
