"""Random sequences of all that NCCL may do with some connections, against a model: a queue of messages for each."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from netrig import abi
from netrig.fake import Comm, FakeNccl, Request, wait

SIZES = st.one_of(
    st.integers(0, 200), st.sampled_from([4096, 32_768, 32_769, 65_536, 131_072]), st.integers(0, 600_000)
)


def content(size: int, number: int) -> bytes:
    return random.Random(number).randbytes(size)


@dataclass
class Pipe:
    """One connection, and what a correct plugin would have done with it."""

    sender: Comm
    receiver: Comm
    sizes: list[int] = field(default_factory=list)
    sends: deque[tuple[int, Request]] = field(default_factory=deque)
    receives: deque[tuple[int, Request]] = field(default_factory=deque)
    posted: int = 0

    def check(self, index: int, request: Request) -> None:
        assert request.memory and request.size == self.sizes[index]
        assert request.memory.view[: request.size] == content(request.size, index)
        request.memory.check_guards()


class Sequences(RuleBasedStateMachine):
    """The plugin is started once, by the test that runs this."""

    nccl: FakeNccl

    def __init__(self) -> None:
        super().__init__()
        self.pipes = [Pipe(*self.nccl.pair())]

    def pick(self, number: int) -> Pipe:
        return self.pipes[number % len(self.pipes)]

    @precondition(lambda self: len(self.pipes) < 4)
    @rule()
    def connect(self) -> None:
        self.pipes.append(Pipe(*self.nccl.pair()))

    @rule(number=st.integers(0, 3), size=SIZES)
    def isend(self, number: int, size: int) -> None:
        pipe = self.pick(number)
        if len(pipe.sends) == abi.MOST_REQUESTS:
            return
        index = len(pipe.sizes)
        request = pipe.sender.isend(pipe.sender.memory(content(size, index), offset=index % 3))
        if request:
            pipe.sizes.append(size)
            pipe.sends.append((index, request))

    @rule(number=st.integers(0, 3), more=st.integers(0, 1000))
    def irecv(self, number: int, more: int) -> None:
        pipe = self.pick(number)
        if len(pipe.receives) == abi.MOST_REQUESTS:
            return
        # A message that was not sent yet may be of any size: room for the largest.
        size = pipe.sizes[pipe.posted] if pipe.posted < len(pipe.sizes) else 600_000
        request = pipe.receiver.irecv(pipe.receiver.memory(size + more))
        if request:
            pipe.receives.append((pipe.posted, request))
            pipe.posted += 1

    @rule(number=st.integers(0, 3), sends=st.booleans(), which=st.integers(0, 31), times=st.integers(1, 30))
    def test_one(self, number: int, sends: bool, which: int, times: int) -> None:
        pipe = self.pick(number)
        queue = pipe.sends if sends else pipe.receives
        for _ in range(times):
            if not queue:
                return
            index, request = queue[which % len(queue)]
            if not request.test():
                continue
            queue.remove((index, request))
            assert request.size == pipe.sizes[index]
            if not sends:
                pipe.check(index, request)

    @precondition(lambda self: len(self.pipes) > 1)
    @rule(number=st.integers(0, 3), sender_first=st.booleans())
    def close(self, number: int, sender_first: bool) -> None:
        """With whatever is under way."""
        pipe = self.pipes.pop(number % len(self.pipes))
        for comm in (pipe.sender, pipe.receiver) if sender_first else (pipe.receiver, pipe.sender):
            comm.close()

    @invariant()
    def not_more_received_than_sent(self) -> None:
        for pipe in self.pipes:
            assert pipe.posted - len(pipe.receives) <= len(pipe.sizes)

    def teardown(self) -> None:
        """Everything that has a partner completes."""
        for pipe in self.pipes:
            while pipe.posted < len(pipe.sizes) and len(pipe.receives) < abi.MOST_REQUESTS:
                self.irecv(self.pipes.index(pipe), 0)
            if len(pipe.sizes) <= pipe.posted:
                matched = [entry for entry in pipe.receives if entry[0] < len(pipe.sizes)]
                wait(*(request for _, request in [*pipe.sends, *matched]))
                for index, request in matched:
                    pipe.check(index, request)
            pipe.sender.close()
            pipe.receiver.close()


def test_random_sequences(nccl: FakeNccl) -> None:
    class Machine(Sequences):
        pass

    Machine.nccl = nccl
    Machine.TestCase.settings = settings(
        max_examples=40,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    Machine.TestCase().runTest()
