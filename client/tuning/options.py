"""Settings of autotuning: arguments of ``with_bagua``, and environment variables, which have the original's names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua.base.algorithm_choice import CODECS
from bagua.base.errors import ConfigError
from bagua.tuning.decision import Limits

VARIABLE = "BAGUA_AUTOTUNE"
NO_CODEC = "none"
_OFF = ("", "0", "false", "no", "off")
_NUMBERS = ("bucket_kib", "chunk_kib")


@dataclass(frozen=True)
class TuneOptions:
    """``limits``: see ``Decider``. ``given``: values that the user lists, by the setting's name. ``logs``: each
    candidate is told on standard error, and not changes alone."""

    limits: Limits
    given: Mapping[str, tuple[str, ...]]
    logs: bool


def wanted(autotune: bool | None, tune: Mapping[str, Sequence[object]] | None) -> TuneOptions | None:
    """Returns the options; None: nothing is tuned. ``autotune`` None: as BAGUA_AUTOTUNE says. Raises ConfigError for
    what can't be.
    """
    given = _checked(tune or {})
    if not (_flag(VARIABLE) if autotune is None else autotune):
        if tune is not None and autotune is not None:  # where the variable decides, a script may have tune all the time
            raise ConfigError("with_bagua got tune=..., and autotune=False: pass autotune=True with it. [BG309]")
        return None
    limits = Limits(
        int(_number("BAGUA_AUTOTUNE_MAX_SAMPLES", Limits.samples, 1)),
        _number("BAGUA_AUTOTUNE_WARMUP_TIME_S", Limits.warm_up_s, 0),
        _number("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", Limits.confidence_s, 0),
    )
    return TuneOptions(limits, given, _flag("BAGUA_IS_OUTPUT_AUTOTUNE_LOG"))


def _flag(name: str) -> bool:
    """True if the variable is set, and not to "0", "false", "no" or "off"."""
    return os.environ.get(name, "").strip().lower() not in _OFF


def _number(name: str, default: float, least: float) -> float:
    text = os.environ.get(name, "").strip()
    try:
        found = float(text) if text else float(default)
    except ValueError:
        raise ConfigError(f"Environment variable {name} is {text!r}: it must be a number. [BG106]") from None
    if not least <= found < float("inf"):
        raise ConfigError(f"Environment variable {name} is {text}: it must be at least {least:g}. [BG106]")
    return found


def _checked(tune: Mapping[str, Sequence[object]]) -> dict[str, tuple[str, ...]]:
    found = {}
    for name, values in tune.items():
        if name not in (*_NUMBERS, "codec"):
            raise ConfigError(
                f"tune has {name!r}, which can't be tuned: choose among {', '.join(_NUMBERS)}, codec. [BG309]"
            )
        if isinstance(values, str) or not values:  # a text is a sequence, too: of its letters
            raise ConfigError(f"tune[{name!r}] is {values!r}: pass a list of values, with at least one. [BG309]")
        found[name] = tuple(_value(name, one) for one in values)
    return found


def _value(name: str, value: object) -> str:
    if name == "codec":
        if value is None or value == NO_CODEC:
            return NO_CODEC
        if not isinstance(value, str):
            raise ConfigError(f"tune['codec'] has {value!r}: write names of codecs, or None. [BG309]")
        if value not in CODECS:
            known = ", ".join(CODECS)
            raise ConfigError(f"tune['codec'] has {value!r}: There is no codec {value!r}. Known: {known}. [BG303]")
        return value
    most = 1 << 20 if name == "bucket_kib" else 16 << 10
    # True is a whole number for Python.
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"tune[{name!r}] has {value!r}: it must be a whole number from 1 to {most}. [BG309]")
    return str(value)
