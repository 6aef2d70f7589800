"""Following a job: a scripted service on one side, a recording terminal on the other."""

from threading import Event
from types import SimpleNamespace

from bagua.cli.display.follow import Follower, Interrupted
from bagua.cli.display.terminal import Terminal
from bagua.proto import common_pb2, job_pb2

RUNNING, SUCCEEDED = common_pb2.JOB_STATE_RUNNING, common_pb2.JOB_STATE_SUCCEEDED


class Recorder(Terminal):
    """A terminal that remembers."""

    def __init__(self):
        super().__init__()
        self.lines, self.notes = [], []
        self.line, self.error = self.lines.append, self.notes.append


def job(state):
    spec = common_pb2.JobSpec(name="train", nnodes=1, nproc_per_node=1)
    return job_pb2.Job(job_id="j1", spec=spec, state=state, ranks=[common_pb2.RankStatus(rank=0)])


def follower(updates, logs, terminal, stop=lambda: 0.0):
    """``updates``, ``logs``: of the service."""
    service = SimpleNamespace(
        watch=lambda job_id, **_: updates(), logs=lambda job_id, **_: iter(logs), cancel=lambda *_: job(RUNNING)
    )
    return Follower(service, job(RUNNING), terminal, stop)


def test_interrupt_does_not_wait_for_ever():
    def updates():
        yield job_pb2.JobUpdate(job=job(RUNNING))
        assert Event().wait(10)

    followed = follower(updates, (), Recorder(), stop=lambda: 0.05)
    followed.post(Interrupted())
    assert followed.run().state == RUNNING


def test_output_that_is_gone_is_told_where_it_is_missing():
    terminal = Recorder()
    logs = (
        common_pb2.LogChunk(data=b"early\ncut "),
        common_pb2.LogChunk(data=b"late\n", offset=3_000_000, missing=2_999_990),
        common_pb2.LogChunk(data=b"last\n", offset=3_000_005),
    )
    follower(lambda: iter([job_pb2.JobUpdate(job=job(SUCCEEDED))]), logs, terminal).run()
    assert terminal.lines == ["early", "cut ", "late", "last"]
    [gap] = [note for note in terminal.notes if "missing" in note]
    assert gap.startswith("2.9 MiB of the output of rank 0 are missing here")
