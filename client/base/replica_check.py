"""The setting of the comparison of replicas, which ``bagua run --check-replicas`` sets and ranks read."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from bagua.base.errors import ConfigError

VARIABLE = "BAGUA_CHECK_REPLICAS"


class CheckReplicas(StrEnum):
    """The answer to replicas that differ: a warning, the end of the job, or none, because nobody compares them."""

    warn = "warn"
    error = "error"
    off = "off"


def parse(text: str, name: str) -> CheckReplicas:
    """The setting of this word. Raises ConfigError, which says that ``name`` has another one."""
    try:
        return CheckReplicas(text.strip().lower())
    except ValueError:
        raise ConfigError(f"{name} is {text!r}: it must be one of {', '.join(CheckReplicas)}. [BG106]") from None


def read(environment: Mapping[str, str]) -> CheckReplicas:
    """The setting of these variables; ``warn`` if they have none. Raises ConfigError."""
    return parse(environment.get(VARIABLE) or CheckReplicas.warn, f"Environment variable {VARIABLE}")
