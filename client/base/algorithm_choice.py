"""An algorithm as a text, ``NAME[:key=value,...]``: what ``bagua run --algorithm`` takes and what BAGUA_ALGORITHM says.

The command line checks such a text without torch, so names and parameters stand here; a test compares them with the
registry.
"""

from __future__ import annotations

from typing import Any

from bagua.base.errors import ConfigError

VARIABLE = "BAGUA_ALGORITHM"

CODECS = ("none", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "minmax8", "int4", "onebit", "topk")

# Algorithms that come with the library, and what they can be given as a text: parameters and their types. A program may
# register others; those it names itself.
PARAMETERS: dict[str, dict[str, str]] = {
    "async": {
        "peer_selection_mode": "str",
        "sync_interval_ms": "int",
        "warmup_steps": "int",
        "codec": "codec",
        "everywhere": "bool",
        "warmup_codec": "codec",
    },
    "bytegrad": {"hierarchical": "bool", "average": "bool"},
    "combine": {"synchronous": "bool", "centralised": "bool", "codec": "codec", "everywhere": "bool"},
    "decentralized": {
        "hierarchical": "bool",
        "peer_selection_mode": "str",
        "communication_interval": "int",
        "codec": "codec",
        "everywhere": "bool",
    },
    "diloco": {
        "interval": "int",
        "outer_lr": "float",
        "outer_momentum": "float",
        "warmup_steps": "int",
        "codec": "codec",
        "warmup_codec": "codec",
    },
    "gradient_allreduce": {"hierarchical": "bool", "average": "bool", "codec": "codec", "everywhere": "bool"},
    "local_sgd": {"interval": "int", "warmup_steps": "int", "codec": "codec", "warmup_codec": "codec"},
    "low_precision_decentralized": {"hierarchical": "bool", "communication_interval": "int", "codec": "codec"},
    "no_loco": {
        "interval": "int",
        "outer_lr": "float",
        "outer_momentum": "float",
        "consensus": "float",
        "hierarchical": "bool",
        "seed": "int",
        "warmup_steps": "int",
        "codec": "codec",
        "warmup_codec": "codec",
    },
    "one_bit_adam": {"codec": "codec", "everywhere": "bool"},
    "power_sgd": {
        "rank": "int",
        "start_after": "int",
        "min_compression_rate": "float",
        "seed": "int",
        "warmup_codec": "codec",
    },
    "qadam": {"hierarchical": "bool", "codec": "codec", "scaled": "bool"},
    "streaming_diloco": {
        "interval": "int",
        "fragments": "int",
        "overlap": "int",
        "mixing": "float",
        "outer_lr": "float",
        "outer_momentum": "float",
        "warmup_steps": "int",
        "codec": "codec",
        "warmup_codec": "codec",
    },
    "top_k": {"density": "float", "warmup_steps": "int", "everywhere": "bool", "warmup_codec": "codec"},
    "zero_one_adam": {"codec": "codec"},
}

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
    number = not isinstance(value, bool) and isinstance(value, int | float if kind == "float" else int)
    fits = {"bool": value in (True, False), "str": isinstance(value, str)}.get(kind, number)
    if not fits:
        raise ConfigError(f"{key} is {value!r}: it must be {_MUST_BE[kind]}. [BG302]")


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
