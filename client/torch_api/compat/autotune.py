"""Names of the original's tuning service, which this version lacks."""

from __future__ import annotations

from typing import Any

NO_AUTOTUNING = "Autotuning is not in this version: remove the call. BAGUA_DEFAULT_BUCKET_SIZE sets buckets by hand."


def start_autotune_server(*_: Any, **__: Any) -> None:
    """The original's HTTP service for tuning. Raises NotImplementedError: this version does not tune itself."""
    raise NotImplementedError(NO_AUTOTUNING)


def get_hyperparameters_service_client(*_: Any, **__: Any) -> None:
    """The original's client of that service. Raises NotImplementedError: this version does not tune itself."""
    raise NotImplementedError(NO_AUTOTUNING)
