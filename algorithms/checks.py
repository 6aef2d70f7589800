"""Checks of arguments that several algorithms take: the value, or an error that names it."""

from __future__ import annotations

PEER_SELECTION_MODES = ("all", "shift_one")


def check_count(name: str, value: int, at_least: int) -> int:
    """``value``. Raises TypeError if it is no whole number, ValueError if it is too small."""
    if isinstance(value, bool) or not isinstance(value, int):  # True is a whole number for Python
        raise TypeError(f"{name} is {value!r}: pass a whole number. [BG302]")
    if value < at_least:
        raise ValueError(f"{name} is {value}: it must be at least {at_least}. [BG302]")
    return value


def check_share(name: str, value: float) -> float:
    """``value`` as a float. Raises ValueError unless 0 <= value < 1."""
    if not 0 <= value < 1:  # NaN fails the comparison, too
        raise ValueError(f"{name} is {value}: it must be at least 0 and below 1. [BG302]")
    return float(value)


def check_positive(name: str, value: float) -> float:
    """``value`` as a float. Raises ValueError unless it is above 0."""
    if not value > 0:
        raise ValueError(f"{name} is {value}: it must be above 0. [BG302]")
    return float(value)


def check_mode(value: str) -> str:
    """A ``peer_selection_mode``. Raises ValueError for one that there is not."""
    if value not in PEER_SELECTION_MODES:
        raise ValueError(f"peer_selection_mode is {value!r}: choose one of {', '.join(PEER_SELECTION_MODES)}. [BG302]")
    return value


def check_adam(betas: tuple[float, float], **at_least_0: float) -> None:
    """Raises ValueError for settings that an optimizer of Adam's kind can't have."""
    for name, value in at_least_0.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value!r}: it must be at least 0. [BG302]")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas is {betas!r}: both must be at least 0 and below 1. [BG302]")


def check_everywhere(everywhere: bool, codec: object, hierarchical: bool = False) -> bool:
    """``everywhere``. Raises ValueError where it contradicts the rest."""
    if everywhere and codec is None:
        raise ValueError("everywhere=True needs a codec: without one nothing is encoded anywhere. [BG303]")
    if everywhere and hierarchical:
        raise ValueError(
            "everywhere=True encodes between all ranks, and hierarchical=True averages inside a host as it is: pass "
            "hierarchical=False with it. [BG304]"
        )
    return everywhere
