"""Tells what a Trainer logs to ``bagua.report``: ``bagua run`` and ``bagua job show`` then display it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import bagua.torch_api as bagua

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback


def report_callback(base: type[Callback]) -> type[Callback]:
    """``BaguaReport`` over the Callback of one package of Lightning."""

    class BaguaReport(base):  # type: ignore[misc]
        """Reports step, number of steps, and the values of ``self.log`` after each training batch."""

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            total = trainer.estimated_stepping_batches
            finite = isinstance(total, int) or total < float("inf")
            bagua.report(trainer.global_step, int(total) if finite and total > 0 else 0, dict(trainer.callback_metrics))

    made: Any = BaguaReport
    made.__module__, made.__qualname__ = "bagua.lightning", "BaguaReport"
    return BaguaReport
