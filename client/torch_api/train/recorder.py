"""Records some training steps of the program as a step profile: for ``bagua advise``, and for the tuner.

Nothing of it runs unless environment variable BAGUA_PROFILE_FILE names a file. Then the first model that is wrapped
exchanges gradients as they are, whatever its algorithm, and rank 0 writes the profile after BAGUA_PROFILE_STEPS steps.
With BAGUA_PROFILE_END=1 the program ends then, in its next forward pass.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bagua.algorithms.power_sgd import matrix_shape
from bagua.base.errors import ConfigError
from bagua.torch_api.job.connection import Record, Times
from bagua.torch_api.job.environment import read_int
from bagua.torch_api.job.session import Session
from bagua.torch_api.job.statistics import union_length
from bagua.torch_api.step.module_hook import ModuleHook, beside_graphs, tensors_in
from bagua.torch_api.train.wrapped import Wrapped
from bagua.tuning.profile import REFERENCE, BucketCost, Gradient, StepProfile

LOG = logging.getLogger("bagua")

FILE, STEPS, END = "BAGUA_PROFILE_FILE", "BAGUA_PROFILE_STEPS", "BAGUA_PROFILE_END"
DEFAULT_STEPS = 20
WARM_UP = 5
"""Steps before the first that counts: buckets are made again in one of them, and memory is touched first."""

LARGE_BYTES = 1 << 20


def recording() -> bool:
    """Returns True if a profile is wanted of this program."""
    return bool(os.environ.get(FILE))


class _Taken:
    """``taken``: a model of this session is recorded. The first one is, and no other."""

    def __init__(self, session: Session) -> None:
        self.taken = False


def recorder_of(model: Wrapped, session: Session, hosts: int) -> StepRecorder | None:
    """Raises ConfigError for a model that can't be recorded, or settings that can't be."""
    if not recording():
        return None
    kept = session.keep(_Taken)
    if kept.taken:
        LOG.warning("%s: the step profile is that of the first wrapped model; others count as its computation.", FILE)
        return None
    if session.elastic:
        raise ConfigError(f"{FILE}: a step profile can't be recorded in an elastic job; leave --elastic out. [BG614]")
    if any(parameter.is_cuda for _, parameter in model.bagua_build_params()):
        raise ConfigError(
            f"{FILE}: a step profile can't be recorded of a model on a GPU yet, where nobody waits. [BG614]"
        )
    kept.taken = True
    recorder = StepRecorder(model, session, hosts, read_int(STEPS, DEFAULT_STEPS), Path(os.environ[FILE]))
    session.close_first(recorder.close)
    return recorder


class StepRecorder:
    """Hooks beside the model's own. Every rank has one, so that all end after the same step; rank 0 keeps figures.

    Times in ns of CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        model: Wrapped,
        session: Session,
        hosts: int,
        wanted: int = DEFAULT_STEPS,
        path: Path | None = None,
        warm_up: int = WARM_UP,
    ) -> None:
        """``wanted``: steps that count, after ``warm_up`` others. ``path``: rank 0 writes the profile there."""
        self._model = model
        self._hosts = hosts
        membership = session.membership
        self._ranks, self._island_size = len(membership.local_ranks), membership.island_size
        self._writes = membership.rank == 0
        self._path = path
        self._wanted, self._warm_up = wanted, warm_up
        self._ends = path is not None and bool(read_int(END, 0))
        if self._wanted < 1:
            raise ConfigError(f"Environment variable {STEPS} is {self._wanted}: it must be at least 1. [BG106]")
        self._seen = 0
        self._forward = self._backward = self._last_end = 0
        self._came: dict[str, int] = {}
        self._arrivals: dict[str, list[int]] = {}
        self._spans: list[tuple[int, int, int]] = []  # forward, backward, rest
        self._costs: list[list[BucketCost]] = []

    @property
    def done(self) -> bool:
        """True if all steps have been recorded."""
        return self._seen >= self._warm_up + self._wanted

    def watch(self, module: torch.nn.Module) -> list[Any]:
        """Hooks on the forward pass. Returns what removes them."""
        return [
            module.register_forward_pre_hook(ModuleHook(module, self._before_forward)),
            module.register_forward_hook(ModuleHook(module, self._after_forward)),
        ]

    def noting(self, on_gradient: Callable[[str, torch.nn.Parameter], None]) -> Callable[..., None]:
        """``on_gradient``, and the moment when it is called."""

        @beside_graphs
        def note(name: str, parameter: torch.nn.Parameter) -> None:
            self._came[name] = time.monotonic_ns()
            on_gradient(name, parameter)

        return note

    def also(self, record: Record) -> Record:
        """``record``, which gets the times of a pass, and then this recorder."""

        def both(times: Sequence[Times], begin: Any, end: Any) -> None:
            record(times, begin, end)
            self._finished(times, begin, end)

        return both

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        if self.done and self._ends:
            # All ranks come here after the same step.
            print(f"bagua advise: {self._wanted} steps were recorded; the script ends here.", flush=True)
            raise SystemExit(0)
        if module.training:
            self._forward = time.monotonic_ns()
            self._backward = 0

    def _after_forward(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not self.done:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    @beside_graphs
    def _begin_backward(self, _: torch.Tensor) -> None:
        if not self._backward:
            self._backward = time.monotonic_ns()

    def _finished(self, times: Sequence[Times], begin: int, end: int) -> None:
        came, self._came = self._came, {}
        before, self._last_end = self._last_end, end
        if self.done or not self._backward:
            return
        self._seen += 1
        if self._seen <= self._warm_up:
            return
        if self._writes:
            self._spans.append((self._backward - self._forward, begin - self._backward, self._forward - before))
            for name, at in came.items():
                self._arrivals.setdefault(name, []).append(max(0, at - self._backward))
            self._costs.append(self._costs_of(times, begin, end))
            if self.done and self._path is not None:
                self.profile().save(self._path)

    def _costs_of(self, times: Sequence[Times], begin: int, end: int) -> list[BucketCost]:
        buckets = self._model.bagua_buckets
        if len(times) != len(buckets):
            return []  # the pass was reduced again
        return [
            BucketCost(bucket.elements * bucket.dtype.itemsize, total / 1e9, exposed / 1e9)
            for bucket, (_, started, done) in zip(buckets, times, strict=True)
            for total, exposed in (union_length([(started, done)], begin, end),)
        ]

    def profile(self) -> StepProfile:
        """Medians of the steps recorded so far. Raises ConfigError if no gradient came in them."""
        medians = {name: round(statistics.median(values)) for name, values in self._arrivals.items()}
        parameters = dict(self._model.bagua_build_params())
        found = [
            Gradient(name, str(one.dtype).removeprefix("torch."), one.numel(), medians[name], matrix_shape(one)[0])
            for name, one in parameters.items()
            if name in medians
        ]
        found.sort(key=lambda one: one.ready_ns)
        forward, backward, rest = (max(0, round(statistics.median(one))) for one in zip(*self._spans, strict=True))
        buckets = _medians(self._costs)
        # Small buckets measure latency.
        speeds = [cost.bytes / cost.wire_s for cost in buckets if cost.bytes >= LARGE_BYTES and cost.wire_s > 0]
        # Between hosts the speed is that of the network.
        inside = self._hosts == 1 and self._ranks > self._island_size
        reduce = statistics.median(speeds) if speeds and inside else REFERENCE.reduce
        return StepProfile(
            tuple(found),
            forward,
            backward,
            rest,
            hosts=self._hosts,
            ranks_per_host=self._ranks,
            cores=len(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
            steps=len(self._spans),
            buckets=buckets,
            speeds=dataclasses.replace(REFERENCE, reduce=reduce),
            island_size=self._island_size,
        )

    def close(self) -> None:
        """Says so where no profile was written."""
        if self._writes and not self.done:
            LOG.warning(
                "No step profile was written to %s: the program ended after %d training steps, and %d are needed.",
                self._path,
                self._seen,
                self._warm_up + self._wanted,
            )


def _medians(steps: Sequence[Sequence[BucketCost]]) -> tuple[BucketCost, ...]:
    """Returns medians by bucket, over the steps whose buckets are those of the last."""
    sizes = [cost.bytes for cost in steps[-1]] if steps else []  # buckets are made again after the first pass
    alike = [costs for costs in steps if [cost.bytes for cost in costs] == sizes]
    return tuple(
        BucketCost(
            size,
            statistics.median(costs[number].wire_s for costs in alike),
            statistics.median(costs[number].exposed_s for costs in alike),
        )
        for number, size in enumerate(sizes)
    )
