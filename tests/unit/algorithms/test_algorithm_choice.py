"""Algorithms as a text: what the command line and the environment say."""

import inspect

import pytest

from bagua.algorithms import GlobalAlgorithmRegistry, codec
from bagua.base import algorithm_choice
from bagua.base.errors import ConfigError


def test_names_are_those_of_the_registry():
    assert list(algorithm_choice.NAMES) == GlobalAlgorithmRegistry.available_algorithms()
    assert algorithm_choice.CODECS == codec.NAMES


@pytest.mark.parametrize("name", algorithm_choice.NAMES)
def test_parameters_are_those_of_the_algorithm(name):
    parameters = inspect.signature(GlobalAlgorithmRegistry.get(name)).parameters.values()
    told = {one.name: one.annotation for one in parameters if one.kind is not one.VAR_KEYWORD}
    wanted = {
        key: "codec" if kind == "Codec | str | None" else kind for key, kind in told.items() if "Optimizer" not in kind
    }
    assert algorithm_choice.PARAMETERS[name] == wanted
    takes_more = any(one.kind is one.VAR_KEYWORD for one in parameters)
    assert (name in algorithm_choice.OPEN) == takes_more


def test_values():
    assert algorithm_choice.parse("bytegrad") == ("bytegrad", {})
    text = "x:a=1, b=0.5,c=True,d=none,e=minmax8,f=-3,g=1e-3,h="
    wanted = {"a": 1, "b": 0.5, "c": True, "d": None, "e": "minmax8", "f": -3, "g": 1e-3, "h": ""}
    assert algorithm_choice.parse(text) == ("x", wanted)


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
def test_what_an_algorithm_does_not_know(text):
    with pytest.raises(ConfigError, match=WRONG[text]):
        algorithm_choice.check(text)
