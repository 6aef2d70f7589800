"""Tells ``bagua.report`` what a Trainer of transformers logs."""

from __future__ import annotations

import functools
from typing import Any

import bagua.torch_api as bagua


@functools.cache
def report_callback() -> type[Any]:
    """``BaguaReport``, over the TrainerCallback of transformers."""
    from transformers import TrainerCallback

    class BaguaReport(TrainerCallback):  # type: ignore[misc]
        """Callback for ``Trainer(callbacks=[BaguaReport()])``. ``bagua run`` and ``bagua job show`` then display step,
        number of steps and what the Trainer logs.
        """

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
            bagua.report(state.global_step, state.max_steps, numbers)

    BaguaReport.__module__, BaguaReport.__qualname__ = "bagua.accelerate", "BaguaReport"
    return BaguaReport
