"""The whole table of combinations: each cell trains, or is refused with the reason."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    Codec,
    DecentralizedAlgorithm,
    GradientAllReduceAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    combine,
)
from bagua.algorithms.codec import NAMES

STEPS = 4
CELLS = list(itertools.product((True, False), (True, False), NAMES, (False, True), ("", "ring")))


def is_refused(synchronous: bool, centralised: bool, codec: str, everywhere: bool, mode: str) -> bool:
    """Combinations that make no sense are refused."""
    if mode == "ring" and (centralised or not synchronous):
        return True
    return everywhere and codec == "none"


def codec_of(name: str) -> Codec | str:
    """A small model needs more than a hundredth."""
    return Codec("topk", density=0.2, error_feedback=True) if name == "topk" else name


def cell(synchronous: bool, centralised: bool, codec: str, everywhere: bool, mode: str) -> Algorithm:
    """The algorithm of a cell, made by its registered name."""
    options: dict[str, Any] = {"peer_selection_mode": mode} if mode else {}
    if not synchronous:
        options["sync_interval_ms"] = 0
    made = Algorithm.init(
        "combine",
        synchronous=synchronous,
        centralised=centralised,
        codec=codec_of(codec),
        everywhere=everywhere,
        **options,
    )
    assert isinstance(made, Algorithm)
    return made


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The losses of a few steps on one batch for each rank."""
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(bagua.get_rank()))
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.item())
    return found


def rank_train_all() -> dict[str, list[float]]:
    """One model after the other; the same one is wrapped again and again."""
    bagua.init_process_group()
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    found = {}
    for values in CELLS:
        if is_refused(*values):
            continue
        torch.manual_seed(0)
        for layer in (model[0], model[2]):
            layer.reset_parameters()  # type: ignore[operator, union-attr]
        model.with_bagua([optimizer], cell(*values))  # type: ignore[operator]
        found[str(values)] = train(model, optimizer)
    return found


@pytest.mark.parametrize("hosts", [[[0], [1]], pytest.param([[0, 1], [2, 3]], marks=pytest.mark.full)], ids=str)
def test_every_cell_trains(ranks: Any, hosts: list[list[int]]) -> None:
    started = ranks.start(rank_train_all, hosts=hosts)
    ranks.wait(240.0)
    results = [rank.result() for rank in started]
    assert len(results[0]) == sum(not is_refused(*values) for values in CELLS)
    for name in results[0]:
        means = torch.tensor([result[name] for result in results]).mean(0)
        assert means[-1] < means[0], f"{name}: the loss went from {means[0]:.3f} to {means[-1]:.3f}"


@pytest.mark.parametrize("values", [values for values in CELLS if is_refused(*values)], ids=str)
def test_what_makes_no_sense_is_refused_with_the_reason(values: Any) -> None:
    with pytest.raises(ValueError, match="makes no sense"):
        cell(*values)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, GradientAllReduceAlgorithm),
        ({"centralised": False}, DecentralizedAlgorithm),
        ({"centralised": False, "peer_selection_mode": "ring"}, LowPrecisionDecentralizedAlgorithm),
        ({"synchronous": False}, AsyncModelAverageAlgorithm),
        ({"synchronous": False, "centralised": False, "warmup_steps": 3}, AsyncModelAverageAlgorithm),
    ],
)
def test_what_is_made(options: dict[str, Any], kind: type[Algorithm]) -> None:
    assert type(combine(**options)) is kind


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"codec": "zip"}, ValueError, "no codec 'zip'"),
        ({"sync_interval_ms": 3}, TypeError, "sync_interval_ms"),
        ({"codec": "fp16", "everywhere": True, "hierarchical": True}, ValueError, "hierarchical=True makes no sense"),
        ({"centralised": False, "peer_selection_mode": "all"}, ValueError, "centralised=True"),
        ({"synchronous": False, "peer_selection_mode": "shift_one"}, ValueError, "Pass centralised=False"),
        ({"peer_selection_mode": "shift_one"}, ValueError, "Pass centralised=False"),
        (
            {"centralised": False, "peer_selection_mode": "ring", "codec": "int4", "hierarchical": False},
            ValueError,
            "everywhere=True",
        ),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        combine(**options)


def rank_mistakes() -> None:
    """An odd number of ranks can't be paired, and QAdam needs its optimizer: every rank hears of it, and goes on."""
    bagua.init_process_group()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for algorithm, words in (
        (DecentralizedAlgorithm(hierarchical=False, peer_selection_mode="shift_one"), "an odd number can't be paired"),
        (AsyncModelAverageAlgorithm("shift_one"), "an odd number can't be paired"),
        (QAdamAlgorithm(), "needs one QAdamOptimizer"),
        (QAdamAlgorithm(QAdamOptimizer(model.parameters())), "pass both the same"),
    ):
        with pytest.raises(ValueError, match=words):
            model.with_bagua([optimizer], algorithm)  # type: ignore[operator]
    with pytest.raises(ValueError, match="no optimizer of the model holds"):
        model.with_bagua([], LowPrecisionDecentralizedAlgorithm())  # type: ignore[operator]
    bagua.barrier()


def test_mistakes_are_told_to_every_rank(ranks: Any) -> None:
    ranks.run(rank_mistakes, 3)


def test_qadam_of_another_optimizer() -> None:
    optimizer: Any = torch.optim.SGD([torch.zeros(1)])
    with pytest.raises(TypeError, match="pass a QAdamOptimizer"):
        QAdamAlgorithm(optimizer)
