"""Interface of what changes settings of a model between two steps. ``bagua.torch_api.tune`` is one."""

from __future__ import annotations

from typing import Any, Protocol

from bagua.torch_api.job.connection import Record


class Tuner(Protocol):
    """Tuner of one model."""

    def also(self, inner: Record) -> Record:
        """``inner``, which gets the times of each pass, and then this tuner."""
        ...

    def between_steps(self) -> None:
        """Changes settings, if it is time. Called before each forward pass in training, outside of ``no_sync``."""
        ...

    def tell_newcomers(self) -> dict[str, Any]:
        """State that ranks take over which join an elastic job."""
        ...

    def follow_as_newcomer(self, told: dict[str, Any]) -> None:
        """Goes on as the others do, which told this. Called on such a rank."""
        ...

    def close(self) -> None:
        """The model is unwrapped."""
        ...
