"""Following a job: a scripted service on one side, a recording terminal on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Event

import pytest

from bagua.base.errors import ForbiddenError, NotFoundError, ServiceError
from bagua.cli.display.follow import Detached, Follower, Interrupted, ServiceDied
from bagua.cli.display.terminal import Terminal
from bagua.cli.options import ALL_SHOWN
from bagua.proto import common_pb2, job_pb2

RUNNING = common_pb2.JOB_STATE_RUNNING
SUCCEEDED = common_pb2.JOB_STATE_SUCCEEDED
CANCELLED = common_pb2.JOB_STATE_CANCELLED

Step = job_pb2.JobUpdate | Event | Exception


class Recorder(Terminal):
    """A terminal that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.notes: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def error(self, text: str) -> None:
        self.notes.append(text)


class Script:
    """A service that says what the test wrote down; an Event in the script is waited for."""

    def __init__(
        self, watches: Sequence[Sequence[Step]], logs: Sequence[Sequence[common_pb2.LogChunk | Exception]] = ()
    ) -> None:
        self.watches = list(watches)
        self.log_streams = list(logs)
        self.cancelled = Event()

    def watch(self, job_id: str, *, on_away: Callable[[str], None] | None = None) -> Iterator[job_pb2.JobUpdate]:
        for step in self.watches.pop(0) if self.watches else ():
            if isinstance(step, Exception):
                raise step
            if isinstance(step, Event):
                assert step.wait(10)
            else:
                yield step

    def logs(
        self, job_id: str, *, ranks: Iterable[int] = (), follow: bool = False, patience_s: float = 0.0
    ) -> Iterator[common_pb2.LogChunk]:
        assert follow
        for step in self.log_streams.pop(0) if self.log_streams else ():
            if isinstance(step, Exception):
                raise step
            yield step

    def cancel(self, job_id: str, reason: str = "") -> job_pb2.Job:
        self.cancelled.set()
        return job(CANCELLED)


def job(state: common_pb2.JobState.ValueType, nproc: int = 1, ranks: int = 1, reason: str = "") -> job_pb2.Job:
    spec = common_pb2.JobSpec(name="train", nnodes=1, nproc_per_node=nproc)
    statuses = [common_pb2.RankStatus(rank=rank) for rank in range(ranks)]
    return job_pb2.Job(job_id="j1", spec=spec, state=state, ranks=statuses, reason=reason)


def is_now(state: common_pb2.JobState.ValueType, **details: int) -> job_pb2.JobUpdate:
    return job_pb2.JobUpdate(job=job(state, **details))


def chunk(data: bytes, offset: int = 0, rank: int = 0, eof: bool = False) -> common_pb2.LogChunk:
    return common_pb2.LogChunk(rank=rank, data=data, offset=offset, eof=eof)


def never() -> float:
    raise AssertionError("nobody interrupted")


def follower(script: Script, terminal: Recorder, nproc: int = 1, stop: Callable[[], float] = never) -> Follower:
    return Follower(script, job(common_pb2.JOB_STATE_PENDING, nproc=nproc, ranks=0), terminal, stop)


def test_a_job_from_start_to_end() -> None:
    terminal = Recorder()
    script = Script([[is_now(RUNNING), is_now(SUCCEEDED)]], [[chunk(b"one\ntw"), chunk(b"o\nthree", 6, eof=True)]])
    assert follower(script, terminal).run().state == SUCCEEDED
    assert terminal.lines == ["one", "two", "three"]
    assert terminal.notes == ["running"]


def test_lines_of_several_ranks_carry_their_rank() -> None:
    terminal = Recorder()
    script = Script([[is_now(SUCCEEDED, nproc=2, ranks=2)]], [[chunk(b"a\n"), chunk(b"b\n", rank=1)]])
    follower(script, terminal, nproc=2).run()
    assert terminal.lines == ["[rank 0] a", "[rank 1] b"]


def test_output_that_can_not_be_read_any_more_is_told() -> None:
    terminal, told = Recorder(), Event()

    def note(text: str) -> None:
        terminal.notes.append(text)
        told.set()

    terminal.note = note  # type: ignore[method-assign]
    script = Script([[is_now(RUNNING), told, is_now(SUCCEEDED)]], [[chunk(b"one\ntw"), ForbiddenError("not any more")]])
    follower(script, terminal).run()
    assert terminal.lines == ["one", "tw"]
    assert "The output can't be read any more: not any more" in terminal.notes


@pytest.mark.parametrize("excused", [False, True])
def test_a_coordinator_that_is_away_for_a_while(excused: bool) -> None:
    """A coordinator that its scheduler ends is not waited for aloud."""
    terminal = Recorder()

    class Away(Script):
        def watch(self, job_id: str, *, on_away: Callable[[str], None] | None = None) -> Iterator[job_pb2.JobUpdate]:
            assert on_away is not None
            on_away("nobody answers")
            yield is_now(SUCCEEDED)

    pending = job(common_pb2.JOB_STATE_PENDING, ranks=0)
    assert Follower(Away([]), pending, terminal, lambda: 0.0, ALL_SHOWN, lambda: excused).run().state == SUCCEEDED
    assert terminal.notes == ([] if excused else ["waiting for the coordinator: nobody answers"])


def test_a_watch_that_ends_too_early() -> None:
    with pytest.raises(ServiceError, match="before it had ended"):
        follower(Script([[is_now(RUNNING)]]), Recorder()).run()


def test_what_will_not_get_better_is_not_tried_again() -> None:
    with pytest.raises(NotFoundError, match="no such job"):
        follower(Script([[NotFoundError("no such job")]]), Recorder()).run()


def test_a_service_that_died_ends_it() -> None:
    followed = follower(Script([[Event()]]), Recorder())
    followed.post(ServiceDied("The node daemon node-1 was killed by SIGKILL."))
    with pytest.raises(ServiceError, match="node-1 was killed"):
        followed.run()


def test_interrupt_asks_for_the_end_and_waits_for_it() -> None:
    script = Script([])

    def stop() -> float:
        script.cancel("j1")
        return 10.0

    script.watches = [[is_now(RUNNING), script.cancelled, is_now(CANCELLED)]]
    followed = follower(script, Recorder(), stop=stop)
    followed.post(Interrupted())
    assert followed.run().state == CANCELLED


def test_interrupt_does_not_wait_for_ever() -> None:
    followed = follower(Script([[is_now(RUNNING), Event()]]), Recorder(), stop=lambda: 0.05)
    followed.post(Interrupted())
    assert followed.run().state != CANCELLED


def test_detaching() -> None:
    def detach() -> float:
        raise Detached("the job goes on")

    followed = follower(Script([[Event()]]), Recorder(), stop=detach)
    followed.post(Interrupted())
    with pytest.raises(Detached):
        followed.run()


def test_logs_that_can_not_be_read_are_told() -> None:
    terminal = Recorder()
    script = Script([[is_now(SUCCEEDED)]], [[common_pb2.LogChunk(rank=0, error="the node is away", eof=True)]])
    follower(script, terminal).run()
    assert "The output of rank 0 can't be read: the node is away" in terminal.notes


def test_output_that_is_gone_is_told_where_it_is_missing() -> None:
    """In the middle of a line: it ends there."""
    terminal = Recorder()
    gap = common_pb2.LogChunk(rank=0, data=b"late\n", offset=3_000_000, missing=2_999_990)
    source = Script([[is_now(RUNNING), is_now(SUCCEEDED)]], [[chunk(b"early\ncut "), gap, chunk(b"last\n", 3_000_005)]])
    Follower(source, job(RUNNING), terminal, lambda: 0.0).run()
    assert terminal.lines == ["early", "cut ", "late", "last"]
    gaps = [note for note in terminal.notes if "missing" in note]
    assert len(gaps) == 1 and gaps[0].startswith("2.9 MiB of the output of rank 0 are missing here")
