"""Names of algorithms, for programs that choose one by a setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """Registered algorithm: the function that makes it, and a line about it."""

    algorithm: Callable[..., Any]
    description: str


class AlgorithmRegistry:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, algorithm: Callable[..., Any], description: str | None = None) -> None:
        """Adds a subclass of ``Algorithm`` (or a function that returns one). Raises ValueError if the name is taken."""
        if name in self._entries:
            raise ValueError(f"An algorithm is already registered as {name!r}; choose another name. [BG301]")
        self._entries[name] = Entry(algorithm, description or "")

    def get(self, name: str) -> Callable[..., Any]:
        """The maker that was registered as ``name``. Raises KeyError that lists the known names."""
        if name not in self._entries:
            raise KeyError(
                f"No algorithm is registered as {name!r}. Known: {', '.join(self.available_algorithms())}. [BG301]"
            )
        return self._entries[name].algorithm

    def available_algorithms(self) -> list[str]:
        """Registered names, in alphabetical order."""
        return sorted(self._entries)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {self._entries[name].description}" for name in self.available_algorithms())


# The registry of the process.
GlobalAlgorithmRegistry = AlgorithmRegistry()
