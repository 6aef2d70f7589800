"""Functions for ``bagua.on_report`` that write reported values where the user keeps them.

    bagua.on_report(loggers.to_tensorboard(SummaryWriter("runs/first")))
    bagua.on_report(loggers.to_mlflow(mlflow))
    bagua.on_report(loggers.to_wandb(wandb.init(project="digits")))

Times of steps are written beside them, as "bagua/compute ms", "bagua/comm exposed ms" and "bagua/comm hidden ms".
"""

from __future__ import annotations

from typing import Any

from bagua.torch_api.job.reports import OnReport, Report

PREFIX = "bagua/"


def values(report: Report) -> dict[str, float]:
    """The program's metrics, and the times of the newest step under names that begin with "bagua/"."""
    # A program's own metric of the same name stands.
    return {**{PREFIX + name: value for name, value in report.times.items()}, **report.metrics}


def to_tensorboard(writer: Any) -> OnReport:
    """``writer``: a ``torch.utils.tensorboard.SummaryWriter``, or what has its ``add_scalar``."""

    def write(report: Report) -> None:
        for name, value in values(report).items():
            writer.add_scalar(name, value, report.step)

    return write


def to_mlflow(mlflow: Any) -> OnReport:
    """``mlflow``: the module, after ``mlflow.start_run()``."""

    def write(report: Report) -> None:
        mlflow.log_metrics(values(report), step=report.step)

    return write


def to_wandb(run: Any) -> OnReport:
    """``run``: what ``wandb.init()`` returned, or the module."""

    def write(report: Report) -> None:
        run.log(values(report), step=report.step)

    return write
