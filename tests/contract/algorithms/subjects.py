"""Subjects of general.py and mistakes.py: an algorithm of the registry with optimizers that fit, or one of a user's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
    """

    name: str
    make: Callable[[], Any]
    replicas_equal: bool = True
    optimizers: Callable[[nn.Module], Optimizers] = sgd


def q_adam(model):
    """The optimizer of QAdam, which is soon beyond its warm-up."""
    return [QAdamOptimizer(model.parameters(), lr=1e-2, warmup_steps=3, betas=(0.9, 0.9))]


def one_bit_adam(model):
    return [OneBitAdamOptimizer(model.parameters(), lr=1e-2, warmup_steps=3, betas=(0.9, 0.9))]


def zero_one_adam(model):
    return [ZeroOneAdamOptimizer(model.parameters(), lr=1e-2, var_freeze_step=3, betas=(0.9, 0.9))]


ARGUMENTS = {
    "async": {"sync_interval_ms": 0},
    "no_loco": {"interval": 2},
    "local_sgd": {"interval": 2},
    "diloco": {"interval": 2},
    "streaming_diloco": {"interval": 4, "fragments": 2},
}
OPTIMIZERS = {"qadam": q_adam, "one_bit_adam": one_bit_adam, "zero_one_adam": zero_one_adam}
MAY_DIFFER = {*ARGUMENTS, "decentralized", "low_precision_decentralized", "zero_one_adam"}
"""How algorithms of the registry are checked, where it is not as ``gradient_allreduce``: replicas may differ, too."""


def subject_of(name):
    """The subject that a test's parameter names: a registered name, or MODULE:CLASS, "~" before it if replicas may
    differ."""
    if ":" in name:
        module, _, attribute = name.removeprefix("~").partition(":")
        made = getattr(importlib.import_module(module), attribute)
        return Subject(name, made, replicas_equal=not name.startswith("~"))
    make = partial(Algorithm.init, name, **ARGUMENTS.get(name, {}))
    return Subject(name, make, name not in MAY_DIFFER, OPTIMIZERS.get(name, sgd))


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
