"""Records some steps on rank 0, and computes from them the cut into buckets that should be best."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from bagua.torch_api.join.connection import Times
from bagua.torch_api.join.session import Session
from bagua.torch_api.train.recorder import StepRecorder, Wrapped
from bagua.tuning.network import Network
from bagua.tuning.partition import best_cuts
from bagua.tuning.profile import StepProfile

STEPS = 5


class Observed(Wrapped, Protocol):
    """The wrapped model, as the observer uses it."""


class Observer:
    """Observer of one model, from its making to ``close``. Its hooks run beside the model's own."""

    def __init__(self, model: Observed, session: Session) -> None:
        self._recorder = StepRecorder(model, session, len(session.membership.hosts), STEPS, warm_up=1)
        self._handles: list[Any] = list(self._recorder.watch(model.module))
        note = self._recorder.noting(_nothing)
        for name, parameter in model.bagua_build_params():
            hook = functools.partial(note, name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self.finished = self._recorder.also(_no_record)

    def partition(self, arrival: Sequence[str], network: Network, hosts: int) -> list[dict[str, str]]:
        """The cut with the least exposed communication in the model of ``bagua.tuning``, as a setting; none if no step
        was recorded, or if it is no cut of gradients in the order of ``arrival``."""
        if not self._recorder.done:
            return []
        profile = in_order(self._recorder.profile(), arrival)
        cuts = best_cuts(profile, network, hosts=hosts)
        if [name for names in cuts for name in names] != list(arrival):
            return []
        return [{"cuts": ",".join(str(len(names)) for names in cuts)}]

    def close(self) -> None:
        """Ends the recording."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.finished = _no_record


def in_order(profile: StepProfile, arrival: Sequence[str]) -> StepProfile:
    """The same with parameters in this order: none is ready before those that come before it in a bucket's turn."""
    place = {name: number for number, name in enumerate(arrival)}
    ordered = sorted(profile.parameters, key=lambda one: place.get(one.name, len(place)))
    ready = itertools.accumulate((one.ready_ns for one in ordered), max)
    parameters = tuple(dataclasses.replace(one, ready_ns=at) for one, at in zip(ordered, ready, strict=True))
    return dataclasses.replace(profile, parameters=parameters)


def _nothing(_: str, __: torch.nn.Parameter) -> None:
    """The model's own hook does the rest."""


def _no_record(_: Sequence[Times], __: Any, ___: Any) -> None:
    """The model's own record does the rest."""
