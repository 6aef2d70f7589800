"""Steps optimizers inside backward: parameters of a bucket move as soon as its result is there, while others travel.

A step of the optimizer then is one call of its own code for each bucket. ``optimizer.step()`` steps parameters that are
in no bucket, and checks that nothing has happened in between which the parts did not see. Until a step has passed these
checks once, nothing is stepped early: a program that does not fit is told so before anything is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from bagua.base.errors import BaguaError, ConfigError
from bagua.torch_api.job.connection import Times
from bagua.torch_api.step.gradients import GradientBucket
from bagua.torch_api.step.module_hook import beside_graphs
from bagua.torch_api.step.phases import WAIT, phase
from bagua.torch_api.step.training_step import TrainingStep
from bagua.torch_api.train.optimizer_code import Exchange, first_behind, home_of_step, own_code

ADVICE = "Wrap the model without step_in_backward=True."


class BackwardSteps:
    """Steps inside backward of all optimizers of one wrapped model."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises ConfigError for optimizers that can't be stepped in parts."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ConfigError(
                    "step_in_backward=True can't be used with LBFGS: one step of it needs all gradients, several "
                    f"times. {ADVICE} [BG605]"
                )
        self._parts = [_Part(optimizer) for optimizer in optimizers]

    @property
    def early(self) -> bool:
        """True if parameters move inside backward: an ordinary step has been checked."""
        return all(part.checked for part in self._parts)

    def begin(self) -> None:
        """Checks, before the first result of a pass, that the last one's step was made. Raises BaguaError if the last
        pass's step has not been made."""
        if any(part.seen for part in self._parts):
            for part in self._parts:
                part.forget()
            raise BaguaError(
                "A second backward pass was exchanged before optimizer.step(), which step_in_backward=True can't undo: "
                "use no_sync() for all passes of a step but the last, and call optimizer.step() after each backward. A "
                f"GradScaler that skips steps does not fit either. {ADVICE} [BG605]"
            )

    def take(self, bucket: GradientBucket) -> None:
        """``.grad`` of the bucket's parameters is the result: they move now, if they may."""
        early = self.early
        for part in self._parts:
            part.take(bucket.tensors, early)

    def close(self) -> None:
        """``optimizer.step()`` is the optimizer's own again."""
        for part in self._parts:
            part.close()


class _Part:
    """One optimizer. ``seen``: parameters whose result has been there since the last step, with the gradient and its
    version."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.checked = False
        self.seen: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._optimizer = optimizer
        self._name = type(optimizer).__name__
        self._exchange = Exchange(optimizer)
        self._moved = False  # those in seen have made their step
        self._values: dict[torch.Tensor, torch.Tensor] = {}  # of gradients: GradScaler changes them without a version
        self._settings: Any = None
        self._groups: dict[torch.Tensor, int] = {}
        self._kept: list[tuple[int, int]] = []  # lists of parameters for which that holds
        self._trial: _Trial | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            first_behind(optimizer, self._after_step),
        ]
        # ``fuse_optimizer`` steps plainly then.
        optimizer._bagua_steps_in_backward = True  # type: ignore[attr-defined]

    def close(self) -> None:
        self.forget()
        for handle in self._handles:
            handle.remove()
        self._optimizer._bagua_steps_in_backward = False  # type: ignore[attr-defined]

    def take(self, parameters: Sequence[torch.Tensor], early: bool) -> None:
        if not self.seen:  # the first bucket of a pass decides for all
            self._moved = early
            self._settings = _settings(self._optimizer)
            self._look_at_groups()
        mine = [one for one in parameters if one in self._groups and one.grad is not None]
        if self._moved and mine:
            self._step(mine)
        for one in mine:
            assert one.grad is not None
            self.seen[one] = one.grad, one.grad._version
            if not self._moved:
                self._values[one] = one.grad.detach().clone()  # GradScaler changes values without a version

    def _look_at_groups(self) -> None:
        """Finds each parameter's group again, if groups have changed."""
        lists = [group["params"] for group in self._optimizer.param_groups]
        kept = [(id(some), len(some)) for some in lists]
        if kept != self._kept:
            self._kept = kept
            self._groups = {one: number for number, some in enumerate(lists) for one in some}

    def _step(self, parameters: Sequence[torch.Tensor]) -> None:
        """The optimizer's own code, over these parameters alone."""
        lists: list[list[torch.Tensor]] = [[] for _ in self._optimizer.param_groups]
        for one in parameters:
            lists[self._groups[one]].append(one)
        self._exchange.put(lists, {})
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [group for group in groups if group["params"]]
        try:
            own_code(self._optimizer)(self._optimizer)
        finally:
            self._optimizer.param_groups = groups
            self._exchange.take_back()

    @beside_graphs
    def _before_step(self, _: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._exchange.take_back()  # the step before may have ended by an exception
        if not self.seen:
            return
        if any(one is not None for one in (*arguments[1:], *named.values())):  # the first argument is the optimizer
            self._refuse("optimizer.step() got a closure, which computes gradients anew")
        for one, (gradient, version) in self.seen.items():
            if one.grad is not gradient or gradient._version != version or self._changed(one):
                self._refuse(
                    "gradients were changed between backward and optimizer.step() (clipping, GradScaler, zero_grad, or "
                    "a change of your own)"
                )
        if _settings(self._optimizer) != self._settings:
            self._refuse(
                "settings of its groups (learning rate or others) were changed between backward and optimizer.step(): "
                "step schedulers after it"
            )
        if self._moved:
            rest = [[one for one in group["params"] if one not in self.seen] for group in self._optimizer.param_groups]
            self._exchange.put(rest, {})
        elif not home_of_step(self._optimizer).startswith("torch.optim"):  # torch's own treat each element by itself
            # Half of them: a norm over all would be another one.
            self._trial = _Trial(self._optimizer, list(self.seen)[: max(1, len(self.seen) // 2)], self._groups)

    def _changed(self, parameter: torch.Tensor) -> bool:
        before = self._values.get(parameter)
        return before is not None and not _equal(before, parameter.grad)

    @beside_graphs
    def _after_step(self, *_: Any) -> None:
        if not self.seen:
            return
        moved, trial = self._moved, self._trial
        self.forget()
        self._trial = None
        if moved:
            return
        if _settings(self._optimizer) != self._settings:
            self._refuse("its step changes settings of its groups, and would do so once for each bucket")
        if trial is not None and not trial.agrees(self._step_copies):
            self._refuse("parameters that it steps alone get other values than with all")
        self.checked = True

    def _step_copies(self, copies: dict[torch.Tensor, int], states: dict[torch.Tensor, Any]) -> None:
        groups, self._groups = self._groups, copies
        self._optimizer.state.update(states)
        try:
            self._step(list(copies))
        finally:
            self._groups = groups
            for one in states:
                self._optimizer.state.pop(one, None)

    def forget(self) -> None:
        """The last pass is over, and parameters are in the optimizer's groups."""
        self._exchange.take_back()
        self.seen.clear()
        self._values.clear()

    def _refuse(self, why: str) -> None:
        self.forget()
        late = " Parameters have moved already." if self._moved else " Nothing was stepped early yet."
        raise BaguaError(f"step_in_backward=True can't be used with this {self._name}: {why}.{late} {ADVICE} [BG605]")


class _Trial:
    """Copies of some parameters as they are before a step. Stepped alone they must get what all get together: no norm
    over all, no counter of calls."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        groups: dict[torch.Tensor, int],
    ) -> None:
        self._originals = list(parameters)
        self._optimizer = optimizer
        self._numbers = _numbers(optimizer)
        self._copies: dict[torch.Tensor, int] = {}
        self._states: dict[torch.Tensor, Any] = {}
        for one in parameters:
            twin = one.detach().clone().requires_grad_()
            assert one.grad is not None
            twin.grad = one.grad.detach().clone()
            self._copies[twin] = groups[one]
            if one in optimizer.state:
                self._states[twin] = copy.deepcopy(optimizer.state[one])

    def agrees(self, step: Any) -> bool:
        if _numbers(self._optimizer) != self._numbers:
            return False
        step(self._copies, {twin: self._states.get(twin, {}) for twin in self._copies})
        return all(_equal(twin, one) for twin, one in zip(self._copies, self._originals, strict=True))


def _equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Values, where NaN is NaN."""
    assert other is not None
    with torch.no_grad():
        return bool(((one == other) | ((one != one) & (other != other))).all())


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Counters of the optimizer's own."""
    return {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the settings of all groups, comparable."""
    return [
        {
            # The version tells of a change in place: ``lr`` may be a tensor.
            name: (id(value), value._version) if isinstance(value, torch.Tensor) else copy.copy(value)
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


class SteppingInBackward(TrainingStep):
    """Shows the result of a bucket, and has its parameters stepped, as soon as it is there: in backward, while later
    buckets fill and travel; and at the end of the pass one after the other. Only plans with one step that communicates
    end early: the others go on in the order that all ranks share."""

    def __init__(self, steps: BackwardSteps, buckets: Sequence[GradientBucket], **settings: Any) -> None:
        self._steps = steps
        self._shown = 0  # buckets of this pass
        self._together = False  # this pass ends for all buckets at once
        self._times: list[Times] = []
        super().__init__(buckets, **settings)

    def use(self, buckets: Sequence[GradientBucket]) -> None:
        super().use(buckets)
        self._single = all(len(bucket.execution.actions) == 1 for bucket in self.buckets)

    @property
    def _may_end_early(self) -> bool:
        return self._steps.early and self._single and self._rearrange is None and not self._together

    def mark_ready(self, name: str, parameter: torch.Tensor) -> None:
        """See ``TrainingStep``. Results that have come meanwhile take effect."""
        entry = self._entries.get(name)
        if self._shown and entry is not None and self.buckets.index(entry.bucket) < self._shown:
            self.buckets[-1].second_run = True
            return
        super().mark_ready(name, parameter)
        if self._started > self._shown and self._may_end_early:
            with torch.no_grad():
                while self._shown < self._started and self.buckets[self._shown].done():
                    self._show_next()

    def _show_next(self) -> None:
        bucket = self.buckets[self._shown]
        while bucket.execution.advance(self._times):
            pass
        if bucket is self.buckets[-1] and bucket.wants_second_run():
            self._refuse_late(again=False)
        if not self._shown:
            self._steps.begin()
        bucket.show_results()
        self._shown += 1
        self._steps.take(bucket)

    def finish(self) -> None:
        if not self.touched:
            return
        if not self._may_end_early:
            self._together = True
            try:
                super().finish()
            finally:
                self._together = False
            self._steps.begin()
            for bucket in self.buckets:
                self._steps.take(bucket)
            return
        self._start_rest()
        begin = self._clock()
        with phase(WAIT):
            while self._shown < len(self.buckets):
                self._show_next()
        times, self._times = self._times, []
        end = self._clock()
        self._begin_anew()
        if self._on_finished is not None:
            self._on_finished(times, begin, end)

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._shown = 0
        self._times = []
