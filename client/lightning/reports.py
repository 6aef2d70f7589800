"""Tells what a Trainer logs to ``bagua.report``: ``bagua run`` and ``bagua job show`` then display it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import bagua.torch_api as bagua

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback


def report_callback(base: type[Callback]) -> type[Callback]:
    """``BaguaReport`` over the Callback of one package of Lightning."""

    class BaguaReport(base):  # type: ignore[misc]
        """Reports step, number of steps, and the values of ``self.log`` after training batches.

        Args:
            every: Optimizer steps between two reports. Values on a GPU are waited for.
        """

        def __init__(self, every: int = 1) -> None:
            if every < 1:
                raise ValueError(f"every is {every}: it must be at least 1. [BG612]")
            super().__init__()
            self._every = every
            self._total = 0

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            """Notes the number of steps; 0 if nobody knows it."""
            total = trainer.estimated_stepping_batches
            self._total = int(total) if 0 < total < math.inf else 0  # inf or -1: nobody knows

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step % self._every == 0:
                bagua.report(trainer.global_step, self._total, dict(trainer.callback_metrics))

    return BaguaReport
