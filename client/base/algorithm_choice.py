"""An algorithm as a text, ``NAME[:key=value,...]``: what ``bagua run --algorithm`` takes and what BAGUA_ALGORITHM says.

The command line checks such a text without torch, so names and parameters stand here; a test compares them with the
registry.
"""

from __future__ import annotations

from typing import Any

from bagua.base.errors import ConfigError

VARIABLE = "BAGUA_ALGORITHM"

CODECS = ("none", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "minmax8", "int4", "int2", "onebit", "topk")

# Parameters of algorithms by their type: a name has one type, whichever algorithm takes it.
_OF_TYPE = {
    "bool": "average centralised everywhere hierarchical scaled synchronous",
    "codec": "codec warmup_codec",
    "float": "consensus density min_compression_rate mixing outer_lr outer_momentum",
    "int": "communication_interval fragments interval overlap rank seed start_after sync_interval_ms warmup_steps",
    "str": "peer_selection_mode",
}
_TYPES = {name: kind for kind, names in _OF_TYPE.items() for name in names.split()}
# Algorithms that come with the library, and what they can be given as a text. A program may register others; those it
# names itself.
_TAKES = {
    "async": "peer_selection_mode sync_interval_ms warmup_steps codec everywhere warmup_codec",
    "bytegrad": "hierarchical average",
    "combine": "synchronous centralised codec everywhere",
    "decentralized": "hierarchical peer_selection_mode communication_interval codec everywhere",
    "diloco": "interval outer_lr outer_momentum warmup_steps codec warmup_codec",
    "gradient_allreduce": "hierarchical average codec everywhere",
    "local_sgd": "interval warmup_steps codec warmup_codec",
    "low_precision_decentralized": "hierarchical communication_interval codec",
    "no_loco": "interval outer_lr outer_momentum consensus hierarchical seed warmup_steps codec warmup_codec",
    "one_bit_adam": "codec everywhere",
    "power_sgd": "rank start_after min_compression_rate seed warmup_codec",
    "qadam": "hierarchical codec scaled",
    "streaming_diloco": "interval fragments overlap mixing outer_lr outer_momentum warmup_steps codec warmup_codec",
    "top_k": "density warmup_steps everywhere warmup_codec",
    "zero_one_adam": "codec",
}
PARAMETERS = {name: {key: _TYPES[key] for key in keys.split()} for name, keys in _TAKES.items()}

NAMES = tuple(PARAMETERS)
OPEN = ("combine",)  # Take more parameters: those of the algorithm that they choose

_MUST_BE = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a word"}
_WORDS = {"true": True, "false": False, "none": None}


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """``"bytegrad:average=false"`` -> ``("bytegrad", {"average": False})``. Values are whole numbers, numbers, true,
    false, none, or texts. Raises ConfigError for what can't be read; the name may be any."""
    name, colon, rest = text.strip().partition(":")
    if not name or (colon and not rest):
        raise ConfigError(f"{text!r} names no algorithm: write NAME or NAME:key=value,key=value. [BG302]")
    arguments: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key.isidentifier():
            raise ConfigError(f"{part!r} in {text!r} is no setting: write NAME:key=value,key=value. [BG302]")
        if key in arguments:
            raise ConfigError(f"{text!r} sets {key} twice. [BG302]")
        arguments[key] = _value(value)
    return name, arguments


def check(text: str) -> str:
    """The text, if it can be read, names an algorithm of the library and gives it what it knows. Raises ConfigError
    that lists names or parameters. What values mean together is left to the algorithm."""
    name, arguments = parse(text)
    if name not in PARAMETERS:
        raise ConfigError(f"There is no algorithm {name!r}. Known: {', '.join(NAMES)}. [BG301]")
    known = PARAMETERS[name]
    for key, value in arguments.items():
        if key in known:
            _check_value(key, value, known[key])
        elif name not in OPEN:
            raise ConfigError(f"Algorithm {name} has no parameter {key!r}. Known: {', '.join(known)}. [BG301]")
    return text.strip()


def _check_value(key: str, value: Any, kind: str) -> None:
    if kind == "codec":
        if value is not None and value not in CODECS:
            raise ConfigError(f"{key} is {value!r}: it must be one of {', '.join(CODECS)}. [BG303]")
        return
    # True is a whole number for Python.
    number = not isinstance(value, bool) and isinstance(value, int | float if kind == "float" else int)
    fits = {"bool": value in (True, False), "str": isinstance(value, str)}.get(kind, number)
    if not fits:
        raise ConfigError(f"{key} is {value!r}: it must be {_MUST_BE[kind]}. [BG302]")


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):  # int first: float takes whole numbers, too
        try:
            return kind(text)
        except ValueError:
            continue
    return text
