"""Subjects of general.py and mistakes.py: an algorithm of the registry with optimizers that fit, or one of a user's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from contract.algorithms.case import sgd
from torch import nn

from bagua.algorithms import Algorithm, GlobalAlgorithmRegistry
from bagua.algorithms.one_bit_adam import OneBitAdamOptimizer
from bagua.algorithms.q_adam import QAdamOptimizer
from bagua.algorithms.zero_one_adam import ZeroOneAdamOptimizer
from bagua.base.errors import BaguaError

Optimizers = list[torch.optim.Optimizer]
CLEAR = (BaguaError, ValueError, TypeError, NotImplementedError)
"""Exceptions that a user may get for a wrong argument."""


@dataclass(frozen=True)
class Subject:
    """An algorithm under check.

    ``replicas_equal``: whether a step ends with the same bits on all ranks. ``optimizers``: makes those that it needs.
    ``even``: it refuses an odd number of ranks (or of hosts).
    """

    name: str
    make: Callable[[], Any]
    replicas_equal: bool = True
    optimizers: Callable[[nn.Module], Optimizers] = sgd
    even: bool = False


def q_adam(model):
    """The optimizer of QAdam, which is soon beyond its warm-up."""
    return [QAdamOptimizer(model.parameters(), lr=1e-2, warmup_steps=3, betas=(0.9, 0.9))]


def one_bit_adam(model):
    return [OneBitAdamOptimizer(model.parameters(), lr=1e-2, warmup_steps=3, betas=(0.9, 0.9))]


def zero_one_adam(model):
    return [ZeroOneAdamOptimizer(model.parameters(), lr=1e-2, var_freeze_step=3, betas=(0.9, 0.9))]


@dataclass(frozen=True)
class Registered:
    """How an algorithm of the registry is checked, where it is not as ``gradient_allreduce``."""

    arguments: dict[str, Any] = field(default_factory=dict)
    replicas_equal: bool = True
    optimizers: Callable[[nn.Module], Optimizers] = sgd
    even: bool = False


REGISTERED = {
    "async": Registered({"sync_interval_ms": 0}, replicas_equal=False),
    "decentralized": Registered(replicas_equal=False),
    "low_precision_decentralized": Registered(replicas_equal=False),
    "qadam": Registered(optimizers=q_adam),
    "no_loco": Registered({"interval": 2}, replicas_equal=False),
    "local_sgd": Registered({"interval": 2}, replicas_equal=False),
    "diloco": Registered({"interval": 2}, replicas_equal=False),
    "streaming_diloco": Registered({"interval": 4, "fragments": 2}, replicas_equal=False),
    "one_bit_adam": Registered(optimizers=one_bit_adam),
    "zero_one_adam": Registered(replicas_equal=False, optimizers=zero_one_adam),
}


def subject_of(name):
    """The subject that a test's parameter names: a registered name, or MODULE:CLASS, "~" before it if replicas may
    differ."""
    if ":" in name:
        module, _, attribute = name.removeprefix("~").partition(":")
        made = getattr(importlib.import_module(module), attribute)
        return Subject(name, made, replicas_equal=not name.startswith("~"))
    how = REGISTERED.get(name, Registered())
    make = lambda: Algorithm.init(name, **how.arguments)  # noqa: E731
    return Subject(name, make, how.replicas_equal, how.optimizers, how.even)


def problem_with(name):
    """Why the algorithm that --algorithm names can't be checked; empty if it can."""
    if ":" not in name:
        known = name in GlobalAlgorithmRegistry.available_algorithms()
        return "" if known else f"--algorithm {name}: write MODULE:CLASS, or a registered name."
    try:
        made = subject_of(name).make()
    except Exception as error:
        return (
            f"--algorithm {name} can't be made: {type(error).__name__}: {error}. The module must be importable from "
            "this folder, and the class must need no arguments."
        )
    return "" if isinstance(made, Algorithm) else f"--algorithm {name} is a {type(made).__name__}, no Algorithm."


def registered_names():
    """Of all algorithms that come with the library; "combine" makes the others."""
    return [name for name in GlobalAlgorithmRegistry.available_algorithms() if name != "combine"]
