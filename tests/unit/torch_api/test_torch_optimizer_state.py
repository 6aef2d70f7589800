"""State of optimizers on its way to other ranks, and into checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua.torch_api.train.optimizer_state import decode_optimizer, encode_optimizer, optimizer_paths


class Counting(torch.optim.SGD):
    """Keeps something for all parameters together under names, as torch's ``state_dict`` allows it."""

    def step(self, closure: Any = None) -> Any:
        self.state["calls"]["number"] = self.state["calls"].get("number", 0) + 1
        self.state["norms"].setdefault("last", torch.zeros(1)).add_(2)
        self.state["hooks"]["own"] = print  # no plain data
        return super().step(closure)


def make() -> tuple[torch.nn.Parameter, Counting]:
    parameter = torch.nn.Parameter(torch.ones(3))
    return parameter, Counting([parameter], lr=0.1, momentum=0.9)


def through(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> list[tuple[str, ...]]:
    """Takes the state from one to the other. Returns the names of the tensors."""
    given: list[torch.Tensor] = []
    document = encode_optimizer(optimizer, given)
    made: list[torch.Tensor] = []
    decode_optimizer(other, document, made)
    for target, source in zip(made, given, strict=True):
        target.copy_(source)
    names = optimizer_paths(optimizer, document, {})
    assert len(names) == len(given)
    return names


def test_state_under_names() -> None:
    parameter, optimizer = make()
    for _ in range(2):
        parameter.grad = torch.ones(3)
        optimizer.step()
    again, other = make()
    assert through(optimizer, other) == [("state", "parameter 0", "momentum_buffer"), ("named", "norms", "last")]
    assert other.state["calls"] == {"number": 2} and other.state["norms"]["last"].item() == 4
    assert torch.equal(other.state[again]["momentum_buffer"], optimizer.state[parameter]["momentum_buffer"])
    assert "own" not in other.state["hooks"]
    document = {key: one for key, one in encode_optimizer(make()[1], []).items() if key != "named"}
    decode_optimizer(other, document, [])  # of an earlier version


def test_learning_rates_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    optimizer, other = make()[1], make()[1]
    optimizer.param_groups[0] |= {
        "lr": numpy.float32(0.5),
        "momentum": numpy.float64(0.25),
        "dampening": numpy.int64(0),
    }
    through(optimizer, other)
    assert [other.param_groups[0][name] for name in ("lr", "momentum", "dampening")] == [0.5, 0.25, 0]
    assert type(other.param_groups[0]["lr"]) is float
