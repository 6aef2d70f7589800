"""Algorithms as a text: what the command line and the environment say."""

from __future__ import annotations

import inspect

import pytest

from bagua.algorithms import Algorithm, GlobalAlgorithmRegistry, codec
from bagua.base import algorithm_choice
from bagua.base.errors import ConfigError


def test_names_are_those_of_the_registry() -> None:
    assert list(algorithm_choice.NAMES) == GlobalAlgorithmRegistry.available_algorithms()
    assert algorithm_choice.CODECS == codec.NAMES


@pytest.mark.parametrize("name", algorithm_choice.NAMES)
def test_parameters_are_those_of_the_algorithm(name: str) -> None:
    """But for optimizers, which no text can give."""
    parameters = inspect.signature(GlobalAlgorithmRegistry.get(name)).parameters.values()
    told = {one.name: one.annotation for one in parameters if one.kind is not one.VAR_KEYWORD}
    wanted = {
        key: "codec" if kind == "Codec | str | None" else kind for key, kind in told.items() if "Optimizer" not in kind
    }
    assert algorithm_choice.PARAMETERS[name] == wanted
    takes_more = any(one.kind is one.VAR_KEYWORD for one in parameters)
    assert (name in algorithm_choice.OPEN) == takes_more


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


WRONG = {
    "bytegrad:foo=1": r"Algorithm bytegrad has no parameter 'foo'\. Known: hierarchical, average\.",
    "qadam:q_adam_optimizer=1": "Known: hierarchical, codec, scaled",
    "bytegrad:average=2": "average is 2: it must be true or false",
    "local_sgd:interval=x": "interval is 'x': it must be a whole number",
    "local_sgd:interval=1.5": "a whole number",
    "diloco:outer_lr=true": "outer_lr is True: it must be a number",
    "async:peer_selection_mode=3": "it must be a word",
    "combine:codec=minmax9": "codec is 'minmax9': it must be one of none, fp16",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_an_algorithm_does_not_know(text: str) -> None:
    with pytest.raises(ConfigError, match=WRONG[text]):
        algorithm_choice.check(text)


@pytest.mark.parametrize("text", ["combine:sync_interval_ms=5,codec=none", "diloco:outer_lr=1", "bytegrad:average=0"])
def test_what_an_algorithm_knows(text: str) -> None:
    assert algorithm_choice.check(text) == text


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(TypeError, match=r"bytegrad has no argument 'foo'\. Known: hierarchical, average\."):
        Algorithm.init("bytegrad", foo=1)
    with pytest.raises(TypeError, match="hierarchical is 'nope': it must be true or false"):
        Algorithm.init("bytegrad", hierarchical="nope")
    with pytest.raises(TypeError, match="synchronous is 'maybe'"):
        Algorithm.init("combine", synchronous="maybe", communication_interval=3)
    assert not Algorithm.init("bytegrad", hierarchical=0).hierarchical  # type: ignore[attr-defined]
