"""Chooses the algorithm of a model: the program's, else the one that ``bagua run --algorithm`` names."""

from __future__ import annotations

import logging
import os

from bagua.algorithms import Algorithm, AlgorithmImpl, Codec, GradientAllReduceAlgorithm
from bagua.algorithms.base import ProcessGroup
from bagua.base.algorithm_choice import VARIABLE, parse
from bagua.base.errors import ConfigError
from bagua.torch_api.train.recorder import recording

LOG = logging.getLogger("bagua")


def choose(given: Algorithm | None, speaks: bool) -> Algorithm:
    """``given``; if it is None, the algorithm of environment variable BAGUA_ALGORITHM; without it, gradient all-reduce.
    While a step profile is recorded, it is gradient all-reduce.

    ``speaks``: whether this rank logs that the variable was not used. Raises TypeError for other objects,
    ConfigError for a variable that can't be used.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if recording():
        return GradientAllReduceAlgorithm()
    if given is None:
        return named(text) if text else GradientAllReduceAlgorithm()
    if not isinstance(given, Algorithm):
        what = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
        raise TypeError(f"algorithm is {what}: pass an object such as GradientAllReduceAlgorithm(). [BG302]")
    if text and speaks:
        LOG.warning("%s=%s is not used: the program chooses %s.", VARIABLE, text, type(given).__name__)
    return given


def reify(chosen: Algorithm, process_group: ProcessGroup) -> AlgorithmImpl:
    """The algorithm at work among these ranks. Raises TypeError where ``chosen`` returns another object."""
    reified = chosen.reify(process_group)
    if not isinstance(reified, AlgorithmImpl):
        raise TypeError(
            f"{type(chosen).__name__}.reify returned a {type(reified).__name__}: return an AlgorithmImpl. [BG306]"
        )
    return reified


def describe_algorithm(chosen: Algorithm) -> str:
    """The text that ranks compare: the class, and the settings of classes of this library. Others may differ from rank
    to rank in their attributes."""
    # A class of the program's may have anything in its attributes.
    if not type(chosen).__module__.startswith("bagua.algorithms"):
        return type(chosen).__name__
    plain = (bool, int, float, str, Codec, type(None))
    settings = (f"{name}={value!r}" for name, value in sorted(vars(chosen).items()) if isinstance(value, plain))
    return f"{type(chosen).__name__}({', '.join(settings)})"


def named(text: str) -> Algorithm:
    """The algorithm of these words, as BAGUA_ALGORITHM has them. Raises ConfigError."""
    try:
        name, arguments = parse(text)
        return Algorithm.init(name, **arguments)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"Environment variable {VARIABLE} is {text!r}: {error.args[0]}") from error
