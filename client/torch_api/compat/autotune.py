"""Names of the original's tuning service: here the coordinator searches, and no program starts anything."""

from __future__ import annotations

from typing import Any

NO_SERVICE = "No job has a tuning service of its own: remove the call. Use bagua run --autotune, where you want it."


def start_autotune_server(*_: Any, **__: Any) -> None:
    """The original's HTTP service for tuning. Raises NotImplementedError: the coordinator tunes jobs."""
    raise NotImplementedError(f"{NO_SERVICE} [BG412]")


def get_hyperparameters_service_client(*_: Any, **__: Any) -> None:
    """The original's client of that service. Raises NotImplementedError: the coordinator tunes jobs."""
    raise NotImplementedError(f"{NO_SERVICE} [BG412]")
