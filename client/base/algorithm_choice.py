"""An algorithm as a text, ``NAME[:key=value,...]``: what ``bagua run --algorithm`` takes and what BAGUA_ALGORITHM says.

The command line checks such a text without torch, so the names stand here; a test compares them with the registry.
"""

from __future__ import annotations

from typing import Any

from bagua.base.errors import ConfigError

VARIABLE = "BAGUA_ALGORITHM"

NAMES = (
    "async",
    "bytegrad",
    "combine",
    "decentralized",
    "diloco",
    "gradient_allreduce",
    "local_sgd",
    "low_precision_decentralized",
    "no_loco",
    "one_bit_adam",
    "power_sgd",
    "qadam",
    "streaming_diloco",
    "top_k",
    "zero_one_adam",
)
"""Algorithms that come with the library. A program may register others; those it names itself."""

_WORDS = {"true": True, "false": False, "none": None}


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """``"bytegrad:average=false"`` -> ``("bytegrad", {"average": False})``. Values are whole numbers, numbers, true,
    false, none, or texts. Raises ConfigError for what can't be read; the name may be any."""
    name, colon, rest = text.strip().partition(":")
    if not name or (colon and not rest):
        raise ConfigError(f"{text!r} names no algorithm: write NAME or NAME:key=value,key=value.")
    arguments: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key.isidentifier():
            raise ConfigError(f"{part!r} in {text!r} is no setting: write NAME:key=value,key=value.")
        if key in arguments:
            raise ConfigError(f"{text!r} sets {key} twice.")
        arguments[key] = _value(value)
    return name, arguments


def check(text: str) -> str:
    """The text, if it can be read and names an algorithm of the library. Raises ConfigError that lists the names."""
    name, _ = parse(text)
    if name not in NAMES:
        raise ConfigError(f"There is no algorithm {name!r}. Known: {', '.join(NAMES)}.")
    return text.strip()


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
