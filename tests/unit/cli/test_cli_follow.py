"""Following a job: a scripted service on one side, a recording terminal on the other."""

from threading import Event

from bagua.cli.display.follow import Follower, Interrupted
from bagua.cli.display.terminal import Terminal
from bagua.proto import common_pb2, job_pb2

RUNNING = common_pb2.JOB_STATE_RUNNING
SUCCEEDED = common_pb2.JOB_STATE_SUCCEEDED
CANCELLED = common_pb2.JOB_STATE_CANCELLED


class Recorder(Terminal):
    """A terminal that remembers."""

    def __init__(self):
        super().__init__()
        self.lines = []
        self.notes = []

    def line(self, text):
        self.lines.append(text)

    def error(self, text):
        self.notes.append(text)


class Script:
    """A service that says what the test wrote down; an Event in the script is waited for."""

    def __init__(self, watches, logs=()):
        self.watches = list(watches)
        self.log_streams = list(logs)
        self.cancelled = Event()

    def watch(self, job_id, *, on_away=None):
        for step in self.watches.pop(0) if self.watches else ():
            if isinstance(step, Exception):
                raise step
            if isinstance(step, Event):
                assert step.wait(10)
            else:
                yield step

    def logs(self, job_id, *, ranks=(), follow=False, patience_s=0.0):
        assert follow
        for step in self.log_streams.pop(0) if self.log_streams else ():
            if isinstance(step, Exception):
                raise step
            yield step

    def cancel(self, job_id, reason=""):
        self.cancelled.set()
        return job(CANCELLED)


def job(state, nproc=1, ranks=1, reason=""):
    spec = common_pb2.JobSpec(name="train", nnodes=1, nproc_per_node=nproc)
    statuses = [common_pb2.RankStatus(rank=rank) for rank in range(ranks)]
    return job_pb2.Job(job_id="j1", spec=spec, state=state, ranks=statuses, reason=reason)


def is_now(state, **details):
    return job_pb2.JobUpdate(job=job(state, **details))


def chunk(data, offset=0, rank=0, eof=False):
    return common_pb2.LogChunk(rank=rank, data=data, offset=offset, eof=eof)


def never():
    raise AssertionError("nobody interrupted")


def follower(script, terminal, nproc=1, stop=never):
    return Follower(script, job(common_pb2.JOB_STATE_PENDING, nproc=nproc, ranks=0), terminal, stop)


def test_interrupt_does_not_wait_for_ever():
    followed = follower(Script([[is_now(RUNNING), Event()]]), Recorder(), stop=lambda: 0.05)
    followed.post(Interrupted())
    assert followed.run().state != CANCELLED


def test_output_that_is_gone_is_told_where_it_is_missing():
    """In the middle of a line: it ends there."""
    terminal = Recorder()
    gap = common_pb2.LogChunk(rank=0, data=b"late\n", offset=3_000_000, missing=2_999_990)
    source = Script([[is_now(RUNNING), is_now(SUCCEEDED)]], [[chunk(b"early\ncut "), gap, chunk(b"last\n", 3_000_005)]])
    Follower(source, job(RUNNING), terminal, lambda: 0.0).run()
    assert terminal.lines == ["early", "cut ", "late", "last"]
    gaps = [note for note in terminal.notes if "missing" in note]
    assert len(gaps) == 1 and gaps[0].startswith("2.9 MiB of the output of rank 0 are missing here")
