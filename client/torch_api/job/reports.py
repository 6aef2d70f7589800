"""Functions of the program that hear what it tells ``bagua.report``: for TensorBoard, MLflow and the like."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

LOG = logging.getLogger("bagua")


@dataclass(frozen=True)
class Report:
    """One call of ``bagua.report``. ``metrics``: the program's values. ``times``: of the newest training step, in ms:
    computation, exposed and hidden communication; empty where there was none."""

    step: int
    total: int
    metrics: Mapping[str, float]
    message: str
    times: Mapping[str, float]


OnReport = Callable[[Report], object]


LISTENERS: dict[OnReport, bool] = {}
"""Functions of this process, and whether each hears reports of all ranks."""


def notify(report: Report, rank: int) -> None:
    """Calls the listeners. One that raises is logged, and not called again: a report never fails the training."""
    for function, all_ranks in list(LISTENERS.items()):
        if rank != 0 and not all_ranks:
            continue
        try:
            function(report)
        except Exception:
            LISTENERS.pop(function, None)
            LOG.warning("A function of bagua.on_report failed, and is not called again.", exc_info=True)


def on_report(function: OnReport, *, all_ranks: bool = False) -> OnReport:
    """``function(report)`` is called by each ``bagua.report`` of rank 0, or of every rank (``all_ranks``), in the
    thread that reports. ``report``: a ``Report``. One that raises is logged and not called again.

    Returns ``function``, so that it may be used as a decorator. ``bagua.loggers`` has some for well-known loggers.
    """
    LISTENERS[function] = all_ranks
    return function


def as_number(value: float | torch.Tensor) -> float:
    """A metric as reports carry it. Raises TypeError or ValueError for what is no number."""
    # Detached: float() warns of tensors that need gradients.
    return float(value.detach() if isinstance(value, torch.Tensor) else value)
