"""Renews a wrapped model of an elastic job when its members have changed."""

from __future__ import annotations

import threading
from typing import Any

from bagua.algorithms.plan import GRADIENT, WEIGHT
from bagua.torch_api.comm.commit.retry import units
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.train.wrapped import Wrapped


class ModelRenewal:
    """Tells the algorithm that members have changed, and has the model begin anew where the algorithm asks for it.

    The model begins anew instead of the next exchange of weights, which is the same one on all ranks, or in the forward
    pass after the next exchange of gradients. Without ``--elastic`` members never change; then only the algorithm's own
    resets come here.
    """

    def __init__(self, model: Wrapped, runner: Runner) -> None:
        """``runner`` asks it before an exchange of weights, and tells it which units are committed."""
        self._model = model
        self._runner = runner
        self._session = runner.session
        self._ranks = 0  # as many as there were when the algorithm was told last
        self.changed = False  # members have, since then
        self._anew = False  # the algorithm wants it
        self.due = False  # in the next forward pass the model begins anew
        self._resets = True  # that happens now, or the model is being wrapped
        self.thread = threading.get_ident()  # see ``OutOfStep``
        self.begin_anew = model.begin_anew
        runner.vote.renewal = self
        if self._session.elastic:
            self._session.renew_with(self)

    def begin(self) -> None:
        """The model has been wrapped, or has begun anew: its plans are those of the present members."""
        self._ranks = self._runner.everyone.nranks()
        self._runner.vote.waits = self._model.exchanged == GRADIENT or self._model.bagua_algorithm.waits
        if self._session.elastic:
            units(self._session).note(self, in_step=self._runner.vote.waits)

    def settle_wrap(self) -> None:
        """The model counts as wrapped, on all ranks: from now on it begins anew by itself."""
        self._resets = False

    def end(self) -> None:
        """Stops watching for changes of members."""
        if self._session.elastic:
            units(self._session).forget(self)

    def renew(self) -> None:
        """The members of the job have changed."""
        self.changed = True

    def follow(self) -> bool:
        """Tells the algorithm, once, if members have changed. False if the model begins anew."""
        if self.changed:
            before, now = self._ranks, self._runner.everyone.nranks()
            for bucket in self._model.bagua_buckets:
                bucket.follow_members(before, now)
            self.changed, self._ranks = False, now
            # Asked in any case: it is to hear of each change.
            self._anew = not self._model.bagua_algorithm.follow_members(self._model) or self._anew
            self.due = self._anew and not self._runner.vote.waits
        return not self._anew

    def settle(self) -> None:
        """A unit of this model has been committed."""
        # A second pass of the same step leaves it due: it is done in the forward pass.
        self.due = self._anew and self._model.exchanged == GRADIENT and not self._resets
        self._anew = self.due

    def begin_anew_together(self) -> bool:
        """See ``OutOfStep``. A unit that is under way does it when it is repeated."""
        if self._resets or not self.changed:
            return False
        self.follow()
        if self.due:
            self.reset_together()
        return True

    def reset_together(self) -> None:
        """The model begins anew on all ranks, as one unit.

        The kind of the exchange before is asked now: it may be another one when this is repeated."""
        with_optimizers = self._model.exchanged == WEIGHT
        self._resets = True
        try:
            self._runner.vote.together(lambda: self._model.begin_anew(with_optimizers), show=lambda _: self.settle())
        finally:
            self._resets = False
        if not self._runner.vote.waits:
            while self.begin_anew_together():  # another member had committed it in the generation before
                pass

    def go_back(self, ranks: int, anew: bool) -> None:
        """State is that of a checkpoint of so many ranks: if there are others now, that is a change of members. Where
        ranks are not in step they begin with one state, as after such a change. ``anew``: so do all."""
        now = self._runner.everyone.nranks()
        self.changed, self._ranks = False, now
        if ranks != now and not anew:
            for bucket in self._model.bagua_buckets:
                bucket.follow_members(ranks, now)
            anew = not self._model.bagua_algorithm.follow_members(self._model)
        if anew or not self._runner.vote.waits:
            self.reset_together()

    def tell_newcomers(self) -> dict[str, Any]:
        """Returns how far it is, as plain data."""
        return {"ranks": self._ranks, "begins": [self._anew, self.due]}

    def follow_as_newcomer(self, told: dict[str, Any]) -> None:
        """Goes on as far as another rank is, which told this."""
        self._ranks = told["ranks"]
        self._anew, self.due = told["begins"]
