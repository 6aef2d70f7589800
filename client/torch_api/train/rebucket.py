"""Cuts a model's buckets anew between two steps. Each element keeps its state.

State is slots and error feedback; it moves by parameter. What lies in the rank's memory is copied
here; residuals of the engine are moved there, by one operation on each communicator (``ResidualMove`` in
csrc/core/channel/layout.h). Slots that are not as long as the parameters hold nothing from step to step.

In an elastic job this is a unit: residuals stay under their old numbers until all ranks have the new buckets. If
members change before, the old buckets come back, and it is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from bagua.torch_api.comm.members import Members
from bagua.torch_api.job.connection import Regrouped, request
from bagua.torch_api.step.bucket import PlanBucket
from bagua.torch_api.step.execution import Action, EngineResidual
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.train.bucket_layout import ModelBuckets

Cuts = Sequence[Sequence[str]]
"""Names of parameters, bucket by bucket, in their order."""

SIDE_READ = {0: 0, 1: 0, 2: 1}  # by ``residual_sides``


class _Part(NamedTuple):
    """Elements of one parameter in some vector."""

    action: Action
    members: Members
    residual: EngineResidual
    begin: int
    length: int


def _spans(bucket: PlanBucket) -> list[tuple[str, int, int]]:
    """(name, first element, elements) of each parameter."""
    found, begin = [], 0
    for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
        found.append((name, begin, tensor.numel()))
        begin += tensor.numel()
    return found


class BucketState:
    """Copy of all that the buckets of a model keep from step to step, by parameter. The copy is complete: buckets may
    go."""

    def __init__(self, buckets: Sequence[PlanBucket]) -> None:
        self._slots: dict[str, dict[str, torch.Tensor]] = {}
        self._lost: dict[tuple[int, int], dict[str, torch.Tensor]] = {}  # by action, and residual of the rank's own
        self._engine: dict[int, dict[str, list[_Part]]] = {}  # by action
        for bucket in buckets:
            self._take(bucket)

    def _take(self, bucket: PlanBucket) -> None:
        spans = _spans(bucket)
        for name in bucket.kept_slots:
            flat = bucket.slot(name)
            kept = self._slots.setdefault(name, {})
            # A clone: the bucket's memory goes back before it is filled again.
            kept.update((one, flat[begin : begin + length].clone()) for one, begin, length in spans)
        for index, action in enumerate(bucket.execution.actions):
            for number, lost in enumerate([*action.own(), *action.shared()]):
                held = self._lost.setdefault((index, number), {})
                held.update((one, lost[begin : begin + length].clone()) for one, begin, length in spans)
            by_name = self._engine.setdefault(index, {})
            for members, residual in action.in_engine().items():
                for one, begin, length in spans:
                    by_name.setdefault(one, []).append(_Part(action, members, residual, begin, length))

    def put(self, buckets: Sequence[PlanBucket]) -> Mapping[Members, list[int]]:
        """Fills these buckets, of the same parameters. Returns rows of ``ResidualMove``, by communicator."""
        moves: dict[Members, list[int]] = {}
        for bucket in buckets:
            spans = _spans(bucket)
            for name in bucket.kept_slots:
                flat, kept = bucket.slot(name), self._slots.get(name, {})
                for one, begin, length in spans:
                    if one in kept:
                        flat[begin : begin + length] = kept[one]
            for index, action in enumerate(bucket.execution.actions):
                for number, lost in enumerate([*action.own(), *action.shared()]):
                    held = self._lost.get((index, number), {})
                    for one, begin, length in spans:
                        if one in held:
                            lost[begin : begin + length] = held[one]
                for one, begin, _ in spans:
                    for part in self._engine.get(index, {}).get(one, ()):
                        to = action.number_among(part.members)
                        number, sides = part.residual
                        if not to:  # another codec, which keeps none
                            continue
                        row = (to, action.count(), begin, number, part.begin, SIDE_READ[sides], part.length)
                        moves.setdefault(part.members, []).extend(row)
        return moves

    def put_back(self, buckets: Sequence[PlanBucket]) -> None:
        """Fills the buckets as they were cut before: the engine still has their residuals, under their numbers."""
        for bucket in buckets:
            for index, action in enumerate(bucket.execution.actions):
                # All parameters of a bucket have the bucket's residual.
                for part in self._engine.get(index, {}).get(bucket.names[0], ()):
                    action.follow_among(part.members, part.residual)
        self.put(buckets)

    def old_numbers(self) -> Mapping[Members, list[int]]:
        """Rows of ``ResidualMove`` that give back what has been moved."""
        found: dict[Members, dict[int, None]] = {}
        for by_name in self._engine.values():
            for parts in by_name.values():
                for part in parts:
                    found.setdefault(part.members, {})[part.residual[0]] = None
        return {  # ``to`` 0: residual ``from`` goes
            members: [word for one in numbers for word in (0, 0, 0, one, 0, 0, 0)] for members, numbers in found.items()
        }


def move_residuals(runner: Runner, moves: Mapping[Members, list[int]]) -> None:
    """Lets this host's engine carry them out, and waits."""
    connection = runner.connection
    tickets, tables = [], []
    for members, words in moves.items():
        memory, place = runner.allocate(len(words), torch.int64)
        memory.copy_(torch.tensor(words, dtype=torch.int64, device="cpu"))
        tables.append(memory)  # the table must live until the operation is over
        kind, dtype = connection.kinds["move_residuals"], connection.dtypes["int64"]
        operation = request(kind, comm=members.id, dtype=dtype, count=len(words), src=place, label="new cuts")
        operation["fenced"] = True  # fenced: after all that was submitted before it
        tickets.append(connection.submit(operation))
    for ticket in tickets:
        connection.wait(ticket)


def recut(
    runner: Runner, layout: ModelBuckets, cuts: Cuts, follow: Callable[[], object], used: Callable[[], None]
) -> None:
    """Cuts the buckets anew. All ranks call it between the same two steps, while nothing is under way. ``follow``: has
    slots follow a change of members. ``used``: the model takes its new buckets."""
    before: tuple[list[list[str]], BucketState] | None = None
    unit = runner.vote.unit()
    while True:
        with unit:
            if unit.repeated:
                runner.vote.begin_again()
                if before is not None:
                    layout.cut(before[0])
                    before[1].put_back(layout.buckets)
                    used()
                    before = None
            if not unit.settled:
                follow()
                before = layout.cuts, BucketState(layout.buckets)  # complete before buckets go
                layout.cut(cuts)
                move_residuals(runner, before[1].put(layout.buckets))
                used()
            unit.vote()
            assert before is not None
            with suppress(Regrouped):  # the next generation has begun: they stay until the communicator ends
                move_residuals(runner, before[1].old_numbers())
            return
