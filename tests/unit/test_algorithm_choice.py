"""Algorithms as a text: what the command line and the environment say."""

from __future__ import annotations

import inspect

import pytest

from bagua.algorithms import Algorithm, GlobalAlgorithmRegistry
from bagua.base import algorithm_choice
from bagua.base.errors import ConfigError


def test_names_are_those_of_the_registry() -> None:
    assert list(algorithm_choice.NAMES) == GlobalAlgorithmRegistry.available_algorithms()


@pytest.mark.parametrize("name", GlobalAlgorithmRegistry.available_algorithms())
def test_every_algorithm_has_defaults(name: str) -> None:
    for parameter in inspect.signature(GlobalAlgorithmRegistry.get(name)).parameters.values():
        free = parameter.kind is parameter.VAR_KEYWORD or parameter.default is not parameter.empty
        assert free, f"--algorithm {name} can't give {parameter.name} a value"


def test_values() -> None:
    assert algorithm_choice.parse("bytegrad") == ("bytegrad", {})
    text = "x:a=1, b=0.5,c=True,d=none,e=minmax8,f=-3,g=1e-3,h="
    wanted = {"a": 1, "b": 0.5, "c": True, "d": None, "e": "minmax8", "f": -3, "g": 1e-3, "h": ""}
    assert algorithm_choice.parse(text) == ("x", wanted)


@pytest.mark.parametrize("text", ["", ":", "x:", ":a=1", "x:a", "x:a=1,,b=2", "x:a b=1", "x:a=1,a=2"])
def test_what_can_not_be_read(text: str) -> None:
    with pytest.raises(ConfigError):
        algorithm_choice.parse(text)


def test_unknown_names_are_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="async, bytegrad, "):
        algorithm_choice.check("bytegard:average=false")
    assert algorithm_choice.check(" async:warmup_steps=3 ") == "async:warmup_steps=3"


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(TypeError, match=r"bytegrad has no argument 'foo'\. Known: hierarchical, average\."):
        Algorithm.init("bytegrad", foo=1)
    with pytest.raises(TypeError, match="hierarchical is 'nope': it must be true or false"):
        Algorithm.init("bytegrad", hierarchical="nope")
    with pytest.raises(TypeError, match="synchronous is 'maybe'"):
        Algorithm.init("combine", synchronous="maybe", communication_interval=3)
    assert not Algorithm.init("bytegrad", hierarchical=0).hierarchical  # type: ignore[attr-defined]
