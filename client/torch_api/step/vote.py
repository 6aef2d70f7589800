"""Votes: how an exchange among a model's ranks comes to count. Where members stay it counts at once; in an elastic job
on all ranks or on none (``comm/commit``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Protocol, TypeVar

from bagua.torch_api.comm.commit.flags import Flags
from bagua.torch_api.comm.commit.retry import Unit, units
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.communicators import communicators
from bagua.torch_api.comm.members import Members
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.job.connection import Regrouped, Times
from bagua.torch_api.job.session import Session
from bagua.torch_api.step.bucket import PlanBucket
from bagua.torch_api.step.execution import Execution, SendFlags, Submit, Work, join_all

T = TypeVar("T")


class Renewal(Protocol):
    """A model that follows changes of its members."""

    def follow(self) -> bool:
        """Algorithm and slots follow, where members have changed. False: the model is to begin anew instead of the next
        exchange of weights."""
        ...

    def begin_anew(self) -> None:
        """Gives all ranks one state, and makes their buckets again."""
        ...

    def settle(self) -> None:
        """A unit of the model counts."""
        ...

    changed: bool
    """Members have changed since the algorithm and slots followed."""


class Stays:
    """The renewal of a model that follows no change, and of buckets without a model."""

    changed = False

    def follow(self) -> bool:
        return True

    def begin_anew(self) -> None:
        """Does nothing: it goes on as it is."""

    def settle(self) -> None:
        """Does nothing: nothing waits for it."""


class AtOnce(nullcontext[None]):
    """The unit of a job whose members stay: each exchange counts at once."""

    repeated = settled = False

    def vote(self) -> None:
        """Returns at once: all members are there."""


AT_ONCE = AtOnce()


class Vote:
    """The vote of a job whose members stay: each exchange counts at once.

    ``repeats``: an exchange is done again when members were lost. ``waits``: ranks are in step where they exchange
    weights; otherwise an exchange is dropped when members are lost, and none waits for the others to commit it.
    """

    repeats = False
    waits = True
    generation = 0
    """The newest one in which operations may be submitted."""
    weight = 1.0
    """Product of all factors by which the weight of this rank's batches has changed."""

    def __init__(self) -> None:
        self.renewal: Renewal = Stays()

    def unit(self, steps: bool = False) -> Unit | AtOnce:
        """The next exchange of all ranks of the model; see ``Unit``. ``steps``: it is a training step."""
        return AT_ONCE

    def begin_again(self) -> None:
        """Before a repeat: communicators of the model's own are given from the first on."""

    def together(
        self,
        attempt: Callable[[], T],
        again: Work | None = None,
        show: Callable[[T], object] | None = None,
        steps: bool = False,
    ) -> T:
        """Runs ``attempt``, which makes no change that counts, as a unit; returns what it returned. ``again`` is called
        before it runs once more, ``show`` when it counts. ``steps``: it is a training step."""
        unit = self.unit(steps)
        while True:
            with unit:
                if unit.repeated:
                    self.begin_again()
                    if again is not None:
                        again()
                if not unit.settled:
                    found = attempt()
                unit.vote()
                if show is not None:
                    show(found)
                return found

    send_flags: SendFlags | None = None
    """See ``join_all``."""

    def attach(self, buckets: Sequence[PlanBucket]) -> Flags | None:
        """The last of these, submitted before a unit begins, takes the vote's flags along where that saves a way to the
        daemon and back. Returns them if so: start it, and ask them whether they were ``sent_along``."""
        return None

    def join(self, buckets: Sequence[PlanBucket]) -> list[Times]:
        """Waits for those of the buckets that have been started, and runs the rest of their plans, in an order that is
        the same on all ranks. Returns the times of the operations."""
        return join_all(buckets)

    def may_begin(self) -> bool:
        """Returns True if an exchange of weights may begin before it is joined."""
        return True


class ModelRanks(Protocol):
    """The ranks of a model, and the communicators that they have made."""

    @property
    def voters(self) -> Communicator: ...

    def give_own_again(self) -> None:
        """Communicators of the model's own are given once more."""
        ...


class ElasticVote(Vote):
    """The vote of an elastic job: all ranks tell each other that they have whole results."""

    repeats = True

    def __init__(self, session: Session, group: ModelRanks) -> None:
        super().__init__()
        self._session = session
        self._connection = session.connection
        self._group = group
        self._units = units(session)
        self._communicators = communicators(session)
        self._checked: tuple[Communicator | None, list[Execution]] = None, []
        self._single = False  # each of these has one operation, on this communicator

    @property
    def generation(self) -> int:  # type: ignore[override]
        return self._connection.settled

    @property
    def weight(self) -> float:  # type: ignore[override]
        return self._session.weights.changes

    def unit(self, steps: bool = False) -> Unit:
        return Unit(self._units, self._group.voters.id, self._members, True, steps, self._communicators)

    def _members(self) -> Communicator:
        return self._group.voters

    def begin_again(self) -> None:
        self._group.give_own_again()

    def attach(self, buckets: Sequence[PlanBucket]) -> Flags | None:
        flags = self._units.flags
        if flags.inside or self._units.some_were_out_of_step:
            return None
        everyone, executions = self._group.voters, []
        for bucket in buckets:
            executions.append(bucket.execution)
        if self._checked != (everyone, executions):  # asked once for the same buckets, not in each step
            self._checked = everyone, executions
            self._single = all(_only_among(everyone, execution.single) for execution in executions)
        return flags if self._single and flags.attach(everyone, executions[-1]) else None

    def send_flags(self, running: Sequence[Execution]) -> Flags | None:
        """Returns the flags that are under way. Sends them if all that a unit communicates is submitted, and they go in
        the same order: that saves a way to the daemon and back."""
        flags, everyone = self._units.flags, self._group.voters
        if flags.sent is not None:
            return flags
        if not all(execution.is_all_in(everyone.id) for execution in running):
            return None
        return flags.send_early(everyone)

    def join(self, buckets: Sequence[PlanBucket]) -> list[Times]:
        begun = [bucket for bucket in buckets if bucket.execution.started]
        if buckets and not begun:  # none at all: other positions of an island have some, and vote
            return []
        if not self.waits:
            return self._join_alone(begun)

        def conclude(_: list[Times]) -> None:
            for bucket in begun:
                bucket.execution.conclude()
            self.renewal.settle()

        return self.together(lambda: self._exchange(begun), lambda: _rewind(begun), conclude, steps=True)

    def _exchange(self, begun: Sequence[PlanBucket]) -> list[Times]:
        if any(bucket.execution.lost for bucket in begun):  # a loss came before the join
            _rewind(begun)
        if not self.renewal.follow():
            _rewind(begun)  # the exchange is left out: all ranks have one state after it
            self.renewal.begin_anew()
            return []
        for bucket in begun:
            if not bucket.execution.started:
                bucket.start()
        return join_all(begun, self.send_flags)

    def _join_alone(self, begun: Sequence[PlanBucket]) -> list[Times]:
        """Joins where ranks are not in step, and drops what a loss has cut off."""
        generation = self._session.connection.settled
        times: list[Times] = []
        try:
            if not any(bucket.execution.lost for bucket in begun):
                times = join_all(begun)
                devices(self._session).await_results()  # on a device ``wait`` returns before results are there
            elif any(bucket.execution.ended for bucket in begun):
                raise Regrouped("An exchange could not begin.")
        except Regrouped:
            self._units.recover(generation)
        for bucket in begun:
            if not bucket.execution.lost:  # out of step: what arrived before the loss counts
                bucket.execution.conclude()
            bucket.execution.rewind()
        return times

    def may_begin(self) -> bool:
        """Returns False in a new generation until a unit was exchanged there: members may be at different moments of
        their step, and would begin in different orders."""
        if self._units.inside:
            return True
        return self.renewal.follow() and (not self.waits or self._units.exchanged_in(self._group.voters.id))


def _only_among(members: Members, single: Submit | None) -> bool:
    return single is not None and single.members is members


def _rewind(buckets: Sequence[PlanBucket]) -> None:
    for bucket in buckets:
        bucket.execution.rewind()
