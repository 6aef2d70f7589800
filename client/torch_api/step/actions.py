"""Actions for plan steps that communicate: they submit operations, and finish the step when these have arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from bagua.algorithms import AllReduce, Broadcast, Codec, Neighbours
from bagua.algorithms.plan import GRADIENT, HOST, LEADERS, Over
from bagua.algorithms.weights import fits
from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.transfer import DTYPES, ReduceOp
from bagua.torch_api.cuda.transcoding import CudaTranscoder
from bagua.torch_api.job.connection import AS_IT_IS, Connection, Encoding, Place, Request, request
from bagua.torch_api.step.bucket import Allocate, PlanBucket
from bagua.torch_api.step.execution import NO_ENGINE_RESIDUAL, Action, EngineResidual, Submit, Tickets, other_sides
from bagua.torch_api.step.transcoding import Transcoder
from bagua.torch_api.step.vote import Vote

NewTranscoder = Callable[[Codec, int], Transcoder | CudaTranscoder]


class Surroundings(Protocol):
    """The rank, as steps see it. Where its vote ``repeats`` operations they may be, until ``Action.commit``."""

    connection: Connection
    vote: Vote
    chunk_kib: int
    allocate: Allocate
    """Makes memory that can be communicated."""
    transcoder: NewTranscoder
    """Makes the encoder of this rank."""

    def communicator(self, over: Over) -> Members | None:
        """Returns those who take part now; None if this rank does not."""
        ...

    def new_residual(self, communicator: Members) -> int:
        """The number of a residual that nothing on this communicator has."""
        ...

    def one_host(self, communicator: Members) -> bool:
        """Returns True if all members are on this host."""
        ...


class OneOperation(Action):
    """One operation for one step, among members that may be others each time. ``carried``: elements of the tail that go
    along."""

    comm: int | None = None

    def __init__(self, around: Surroundings, bucket: PlanBucket, step: AllReduce | Broadcast, carried: int) -> None:
        self.around = around
        self.bucket = bucket
        self.step = step
        self.carried = carried
        self.source = step.reads[0]

    def count(self) -> int:
        return self.bucket.region(self.step.writes[0]).flat.numel() + self.carried

    @property
    def source_place(self) -> Place:
        """Place at which the operation reads."""
        return self.bucket.region(self.source).place

    def request(self, members: Members) -> Request:
        target = self.bucket.region(self.step.writes[0])
        connection = self.around.connection
        return request(
            connection.kinds["allreduce" if isinstance(self.step, AllReduce) else "broadcast"],
            comm=members.id,
            dtype=connection.dtypes[DTYPES[self.bucket.dtype]],
            count=self.count(),
            src=self.source_place,
            dst=target.place,
            label=self.bucket.label,
        )

    def begin(self) -> Tickets | None:
        members = self.around.communicator(self.step.over)
        return None if members is None else self.send(members)

    def send(self, members: Members) -> Tickets:
        """Submits for these members."""
        self.comm = members.id
        connection = self.around.connection
        submit = connection.submit if self.around.vote.waits else connection.submit_out_of_step
        return (submit(self.request(members)),)


class BroadcastAction(OneOperation):
    step: Broadcast

    def request(self, members: Members) -> Request:
        return {**super().request(members), "root": self.step.root}

    def send(self, members: Members) -> Tickets:
        """See ``OneOperation``. Raises ValueError for a root that is not there."""
        if not 0 <= self.step.root < members.nranks():
            raise ValueError(f"{self.step} among {members.nranks()} ranks: root must be below that. [BG307]")
        return super().send(members)


class AllReduceAction(OneOperation):
    """``AllReduce``. ``first``: it puts the tail where it begins its way."""

    step: AllReduce

    def __init__(
        self, around: Surroundings, bucket: PlanBucket, step: AllReduce, carried: int, first: bool = False
    ) -> None:
        super().__init__(around, bucket, step, carried)
        self.codec = fits(bucket, step.codec)
        self.encodings: dict[Members, Encoding] = {}
        self.used: Members | None = None  # in the last run
        self.followed = NO_ENGINE_RESIDUAL  # that of the other ranks
        # The bucket's start writes the tail behind GRADIENT alone.
        self.fetches_tail = first and self.source != GRADIENT

    def request(self, members: Members) -> Request:
        encoding = self.encoding(members)
        made = {**super().request(members), **encoding._asdict(), "op": ReduceOp[self.step.op]}
        if self.around.chunk_kib:
            made["chunk_kib"] = self.around.chunk_kib
        return made  # type: ignore[return-value]

    def encoding(self, members: Members) -> Encoding:
        """Returns how it crosses between hosts. The tail, which says which ranks have a gradient, must arrive as it is.

        Error feedback needs memory that lives as long as the bucket: it has a residual of its own on each communicator.
        """
        if self.codec is None:
            return AS_IT_IS
        if members not in self.encodings:
            repeats = self.codec.error_feedback and self.around.vote.repeats
            residual, sides = self.followed
            # A newcomer follows the number of the other ranks: a new one would not meet theirs.
            if not (residual and members.grows):
                residual = self.around.new_residual(members) if self.codec.error_feedback else 0
                sides = 1 if repeats else 0
            self.encodings[members] = Encoding(
                self.around.connection.codecs[self.codec.name],
                self.codec.density_units,
                residual=residual,
                residual_sides=sides,
                exact=self.carried,
            )
            if repeats:
                self.commit = self._turn
        return self.encodings[members]

    def residual(self) -> EngineResidual | None:
        # Not all ranks have this step, or each host has a residual of its own.
        if self.codec is None or not self.codec.error_feedback or self.step.over in (HOST, LEADERS):
            return None
        found = [one for members, one in self.encodings.items() if members.grows]
        return (found[0].residual, found[0].residual_sides) if found else NO_ENGINE_RESIDUAL

    def follow(self, residual: EngineResidual) -> None:
        self.followed = residual

    def in_engine(self) -> Mapping[Members, EngineResidual]:
        # A newcomer has not run yet: it makes the encoding of what it follows.
        if self.followed[0] and not self.encodings and (members := self.around.communicator(self.step.over)):
            self.encoding(members)
        return {
            members: (one.residual, one.residual_sides)
            for members, one in self.encodings.items()
            if one.residual and not members.ended
        }

    def number_among(self, members: Members) -> int:
        return self.encoding(members).residual

    def follow_among(self, members: Members, residual: EngineResidual) -> None:
        number, sides = residual
        self.encodings[members] = self.encoding(members)._replace(residual=number, residual_sides=sides)

    def _turn(self) -> None:
        """The next operation that counts reads the residuals that this one wrote."""
        if self.used is not None:
            last = self.encodings[self.used]
            self.encodings[self.used] = last._replace(residual_sides=other_sides(last.residual_sides))

    def send(self, members: Members) -> Tickets:
        bucket = self.bucket
        self.used = members
        if self.fetches_tail:
            # The step reads another slot, behind which no tail was written.
            bucket.region(self.source).tail.copy_(bucket.region(GRADIENT).tail)
        return super().send(members)

    def among(self, members: Members) -> Submit:
        """Returns the action for the same ranks each time."""
        return Submit(self.request(members), self.around.connection, members)


class EverywhereAction(AllReduceAction):
    """``AllReduce(everywhere=True)``: this rank's contribution passes through the codec before it is reduced, and so
    does the result where the engine does not encode it (on one host). All ranks compute the same there."""

    def __init__(self, around: Surroundings, bucket: PlanBucket, step: AllReduce, carried: int, first: bool) -> None:
        assert step.codec is not None
        count = bucket.region(step.src).flat.numel()
        self._transcoder = around.transcoder(step.codec, count)
        self._message = self._transcoder.new_message()
        self._encoded, self._place = around.allocate(count + carried, bucket.dtype)
        feedback = step.codec.error_feedback
        lost = [Residual(count, bucket.device, around.vote.repeats) if feedback else NO_RESIDUAL for _ in range(2)]
        self._lost, self._lost_of_result = lost
        self._encodes_result = False
        super().__init__(around, bucket, step, carried, first)
        self.fetches_tail = False  # done here
        self._tail_from = GRADIENT if first else step.src
        self.finish = self._finish
        if feedback and around.vote.repeats:
            self.commit = self._turn

    @property
    def source_place(self) -> Place:
        return self._place

    def send(self, communicator: Members) -> Tickets:
        bucket = self.bucket
        source = bucket.region(self.source).flat
        self._transcoder.encode(source, self._message, self._lost.begin(), self._encoded)
        if self.carried:
            self._encoded[source.numel() :] = bucket.region(self._tail_from).tail
        self._encodes_result = self.around.one_host(communicator)  # between hosts the engine has encoded the result
        return super().send(communicator)

    def _finish(self) -> None:
        if self._encodes_result:
            result = self.bucket.region(self.step.dst).flat
            self._transcoder.encode(result, self._message, self._lost_of_result.begin(), result)
            self._encodes_result = False

    def shared(self) -> Sequence[torch.Tensor]:
        """See ``Action``: what results have lost. What contributions have is each rank's own."""
        return self._lost_of_result.kept()

    def own(self) -> Sequence[torch.Tensor]:
        """See ``Action``: what contributions have lost."""
        return self._lost.kept()

    def _turn(self) -> None:
        super()._turn()
        self._lost.turn()
        self._lost_of_result.turn()


class Residual:
    """The loss of a rank's own encoding so far. ``repeats``: a run writes another copy than it reads, until it
    counts."""

    def __init__(self, count: int, device: torch.device, repeats: bool) -> None:
        self._sides = [torch.zeros(count, device=device) for _ in range(2 if repeats else 1)]

    def begin(self) -> torch.Tensor | None:
        """Returns the side that one encoding reads and writes."""
        if len(self._sides) > 1:
            self._sides[1].copy_(self._sides[0])  # a repeated run must read side 0 once more
        return self._sides[-1]

    def kept(self) -> Sequence[torch.Tensor]:
        """The side that the next encoding reads."""
        return self._sides[:1]

    def turn(self) -> None:
        """The last encoding counts."""
        self._sides.reverse()


class _NoResidual(Residual):
    """Residual of a codec without error feedback."""

    def __init__(self) -> None:
        self._sides = []

    def begin(self) -> None:
        """Returns None: there is none."""


NO_RESIDUAL = _NoResidual()


class NeighboursAction(Action):
    """``Neighbours``: messages are encoded once, sent to both sides and decoded by all who get them."""

    def __init__(self, around: Surroundings, bucket: PlanBucket, step: Neighbours) -> None:
        self._around = around
        self._bucket = bucket
        self._step = step
        self._ranks = 0  # members of the exchange that has begun; 0: none has
        self.finish = self._finish
        self._coding = None if fits(bucket, step.codec) is None else _NeighboursCoding(around, bucket, step)
        self.commit = None if self._coding is None else self._coding.turn

    def own(self) -> Sequence[torch.Tensor]:
        """Losses of messages."""
        return () if self._coding is None else self._coding.lost()

    def count(self) -> int:
        return self._bucket.region(self._step.src).flat.numel()

    def begin(self) -> Tickets | None:
        communicator = self._around.communicator(self._step.over)
        if communicator is None:
            return None
        step, region = self._step, self._bucket.region
        source, own = region(step.src), region(step.own)
        self._ranks, rank = communicator.nranks(), communicator.rank()
        connection = self._around.connection
        if self._coding is not None:
            places = self._coding.encode(source.flat, own.flat)
            dtype, count = connection.dtypes["uint8"], self._coding.count
        else:
            if own.flat is not source.flat:  # without a codec others get the source itself: ``own`` is what they get
                own.flat.copy_(source.flat)
            places = source.place, region(step.left).place, region(step.right).place
            dtype, count = connection.dtypes[DTYPES[self._bucket.dtype]], source.flat.numel()
        left, right = (rank - 1) % self._ranks, (rank + 1) % self._ranks
        mine, from_left, from_right = places
        sends = [(left, mine), (right, mine)]
        receipts = [(left, from_left), (right, from_right)]
        if self._ranks < 3:  # both neighbours are the same, or there is none
            sends, receipts = sends[: self._ranks - 1], receipts[: self._ranks - 1]
        common: dict[str, Any] = {"comm": communicator.id, "dtype": dtype, "count": count, "label": self._bucket.label}
        kinds, submit = connection.kinds, connection.submit
        return (
            *(submit(request(kinds["send"], root=peer, src=place, **common)) for peer, place in sends),
            *(submit(request(kinds["recv"], root=peer, dst=place, **common)) for peer, place in receipts),
        )

    def _finish(self) -> None:
        ranks, self._ranks = self._ranks, 0
        if not ranks:
            return
        left, right = (self._bucket.region(name).flat for name in (self._step.left, self._step.right))
        if ranks == 1:
            left.zero_()
            right.zero_()
            return
        if self._coding is not None:
            # With two ranks both neighbours are one, and one message comes.
            self._coding.decode(left, right if ranks > 2 else None)
        if ranks == 2:
            right.copy_(left)


class _NeighboursCoding:
    """Memory and codec of encoded ``Neighbours``."""

    def __init__(self, around: Surroundings, bucket: PlanBucket, step: Neighbours) -> None:
        assert step.codec is not None
        length = bucket.region(step.src).flat.numel()
        self._transcoder = around.transcoder(step.codec, length)
        feedback = step.codec.error_feedback
        self._lost = Residual(length, bucket.device, around.vote.repeats) if feedback else NO_RESIDUAL
        self.lost = self._lost.kept
        self.turn = self._lost.turn
        self.count = self._transcoder.message_bytes
        made = [around.allocate(self.count, torch.uint8) for _ in range(3)]
        self._mine, self._left, self._right = (memory for memory, _ in made)
        self._places = made[0][1], made[1][1], made[2][1]

    def encode(self, source: torch.Tensor, own: torch.Tensor) -> tuple[Place, Place, Place]:
        """Makes the message, and ``own`` of it. Returns where it lies, and where the neighbours' are to arrive."""
        self._transcoder.encode(source, self._mine, self._lost.begin(), own)
        return self._places

    def decode(self, left: torch.Tensor, right: torch.Tensor | None) -> None:
        """Decodes the neighbours' messages."""
        self._transcoder.decode(self._left, left)
        if right is not None:
            self._transcoder.decode(self._right, right)
