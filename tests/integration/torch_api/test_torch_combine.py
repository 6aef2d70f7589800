"""The whole table of combinations: each cell trains, or is refused with the reason."""

import itertools

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

CELLS = list(itertools.product((True, False), (True, False), NAMES, (False, True), ("", "ring")))


SOME = [values for values in CELLS if values[3] == (values[2] != "none")]
"""Those that differ between ranks that are alone on their hosts."""


def is_refused(synchronous, centralised, codec, everywhere, mode):
    """Combinations that make no sense are refused."""
    if mode == "ring" and (centralised or not synchronous):
        return True
    return everywhere and codec == "none"


def cell(synchronous, centralised, codec, everywhere, mode):
    """The algorithm of a cell, made by its registered name. A small model needs more than a hundredth."""
    options = {"peer_selection_mode": mode} if mode else {}
    if not synchronous:
        options["sync_interval_ms"] = 0
    options["codec"] = Codec("topk", density=0.2, error_feedback=True) if codec == "topk" else codec
    options |= {"synchronous": synchronous, "centralised": centralised, "everywhere": everywhere}
    return Algorithm.init("combine", **options)


def rank_train_all(cells):
    """Losses of a few steps on one batch for each rank. The same model is wrapped again and again."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(bagua.get_rank()))
    found = {}
    for values in cells:
        torch.manual_seed(0)
        for layer in (model[0], model[2]):
            layer.reset_parameters()
        model.with_bagua([optimizer], cell(*values))
        losses = found[str(values)] = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.bagua_ddp.close()
    return found


@pytest.mark.parametrize(
    ("hosts", "cells"),
    [([[0], [1]], SOME), pytest.param([[0, 1], [2, 3]], CELLS, marks=pytest.mark.full)],
    ids=["hosts of one", "hosts of two"],
)
def test_every_cell_trains(pools, hosts, cells):
    trained = [values for values in cells if not is_refused(*values)]
    results = pools(*hosts).run(rank_train_all, 240.0, cells=trained)
    for name in results[0]:
        means = torch.tensor([result[name] for result in results]).mean(0)
        assert means[-1] < means[0], f"{name}: the loss went from {means[0]:.3f} to {means[-1]:.3f}"
    assert len(results[0]) == len(trained)
    for values in CELLS:
        if is_refused(*values):
            with pytest.raises(ValueError, match="makes no sense"):
                cell(*values)


def test_what_is_made():
    decentralised, ring = {"centralised": False}, {"centralised": False, "peer_selection_mode": "ring"}
    for options, kind in (
        ({}, GradientAllReduceAlgorithm),
        (decentralised, DecentralizedAlgorithm),
        (ring, LowPrecisionDecentralizedAlgorithm),
        ({"synchronous": False}, AsyncModelAverageAlgorithm),
        ({"synchronous": False, **decentralised, "warmup_steps": 3}, AsyncModelAverageAlgorithm),
    ):
        assert type(combine(**options)) is kind
    for options, error, words in (
        ({"codec": "zip"}, ValueError, "no codec 'zip'"),
        ({"sync_interval_ms": 3}, TypeError, "sync_interval_ms"),
        ({"codec": "fp16", "everywhere": True, "hierarchical": True}, ValueError, "hierarchical=True makes no sense"),
        ({**decentralised, "peer_selection_mode": "all"}, ValueError, "centralised=True"),
        ({"synchronous": False, "peer_selection_mode": "shift_one"}, ValueError, "Pass centralised=False"),
        ({"peer_selection_mode": "shift_one"}, ValueError, "Pass centralised=False"),
        ({**ring, "codec": "int4", "hierarchical": False}, ValueError, "everywhere=True"),
    ):
        with pytest.raises(error, match=words):
            combine(**options)
    with pytest.raises(TypeError, match="pass a QAdamOptimizer"):
        QAdamAlgorithm(torch.optim.SGD([torch.zeros(1)]))


def rank_mistakes():
    """An odd number of ranks can't be paired, and QAdam needs its optimizer: every rank hears of it, and goes on."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for algorithm, words in (
        (DecentralizedAlgorithm(hierarchical=False, peer_selection_mode="shift_one"), "an odd number can't be paired"),
        (AsyncModelAverageAlgorithm("shift_one"), "an odd number can't be paired"),
        (QAdamAlgorithm(), "needs one QAdamOptimizer"),
        (QAdamAlgorithm(QAdamOptimizer(model.parameters())), "pass both the same"),
    ):
        with pytest.raises(ValueError, match=words):
            model.with_bagua([optimizer], algorithm)
    with pytest.raises(ValueError, match="no optimizer of the model holds"):
        model.with_bagua([], LowPrecisionDecentralizedAlgorithm())
    bagua.barrier()


def test_mistakes_are_told_to_every_rank(pools):
    pools([0, 1, 2]).run(rank_mistakes)
