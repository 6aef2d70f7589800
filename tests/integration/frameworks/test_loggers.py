"""Values of ``bagua.report`` reach the loggers that a user has."""

import logging
import re
import time
import warnings
from unittest import mock

import pytest
import torch

import bagua.torch_api as bagua
from bagua import loggers
from bagua.torch_api.job.reports import LISTENERS, Report

DEADLINE_S = 60.0
REPORT = Report(7, 10, {"loss": 0.5}, "", {"compute ms": 3.0})


@pytest.fixture(autouse=True)
def no_listeners():
    with mock.patch.dict(LISTENERS, clear=True):
        yield


def test_functions_hear_numbers():
    heard = []
    bagua.on_report(heard.append)
    bagua.report(3, 10, {"loss": torch.tensor(0.25), "samples": 4}, "half way")
    assert heard == [Report(3, 10, {"loss": 0.25, "samples": 4.0}, "half way", {})]


def test_other_ranks_are_heard_where_it_is_wanted(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    first = []
    every = []
    bagua.on_report(first.append)
    bagua.on_report(every.append, all_ranks=True)
    bagua.report(1)
    assert (len(first), len(every)) == (0, 1)


def test_a_function_that_fails_is_not_called_again(caplog):
    calls = []

    @bagua.on_report
    def fails(report):
        calls.append(report.step)
        raise OSError("disk full")

    with caplog.at_level(logging.WARNING, "bagua"):
        bagua.report(1)
        bagua.report(2)
    assert calls == [1]
    assert "disk full" in caplog.text and "not called again" in caplog.text


def test_tensorboard(tmp_path):
    """Written with torch's own writer, read with TensorBoard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TensorBoard's own parts
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path)) as writer:
            loggers.to_tensorboard(writer)(REPORT)
        found = EventAccumulator(str(tmp_path)).Reload()
        assert sorted(found.Tags()["scalars"]) == ["bagua/compute ms", "loss"]
        (event,) = found.Scalars("loss")
    assert (event.step, event.value) == (7, 0.5)


def test_mlflow(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # SQLAlchemy 2.1 warns of a call that MLflow makes
        import mlflow

        mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
        with mlflow.start_run() as run:
            loggers.to_mlflow(mlflow)(REPORT)
        found = mlflow.get_run(run.info.run_id).data.metrics
    assert found == {"loss": 0.5, "bagua/compute ms": 3.0}


def test_wandb(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="test", mode="offline", dir=str(tmp_path))
    loggers.to_wandb(run)(REPORT)
    run.finish()
    (log,) = tmp_path.rglob("*.wandb")  # of a run offline; a process of wandb's own writes it
    deadline = time.monotonic() + DEADLINE_S
    while not {b"loss", b"bagua/compute ms"} <= set(re.findall(rb"loss|bagua/compute ms", log.read_bytes())):
        assert time.monotonic() < deadline
        time.sleep(0.05)
