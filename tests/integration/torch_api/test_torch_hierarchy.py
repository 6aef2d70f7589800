"""Training where hosts have different numbers of ranks: every rank weighs the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

LAYOUTS = {"3 + 1": [[0, 1, 2], [3]], "1 + 2 + 1": [[0], [1, 2], [3]], "mixed": [[0, 3], [1], [2]]}
SIZE = 40_000  # of the weight: more than a host sends at once


def rank_trains(steps: int) -> dict[str, Any]:
    """Steps of a model whose gradient is its input; the gradient and the weight after each."""
    import bagua.torch_api as bagua
    from bagua.torch_api.algorithms import gradient_allreduce

    bagua.init_process_group()
    model = torch.nn.Linear(SIZE, 1, bias=True)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model = model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())
    gradients = []
    for step in range(steps):
        optimizer.zero_grad()
        model(rank_input(bagua.get_rank(), step)).sum().backward()
        optimizer.step()
        assert model.weight.grad is not None
        gradients.append(model.weight.grad.detach().clone().flatten())
    found = {"gradients": gradients, "weight": model.weight.detach().clone().flatten()}
    bagua.destroy_process_group()
    return found


def rank_input(rank: int, step: int) -> torch.Tensor:
    """Whole numbers: means of four are exact."""
    return ((torch.arange(SIZE, dtype=torch.float32) % 97) * (rank + 1) ** 2 + step).unsqueeze(0)


@pytest.mark.parametrize(
    "layout", ["3 + 1", *(pytest.param(n, marks=pytest.mark.full) for n in LAYOUTS if n != "3 + 1")]
)
def test_unequal_hosts_are_weighted_by_ranks(ranks: Any, layout: str) -> None:
    steps = 3
    results = ranks.run(rank_trains, hosts=LAYOUTS[layout], steps=steps)
    means = [torch.stack([rank_input(rank, step)[0] for rank in range(4)]).mean(dim=0) for step in range(steps)]
    for result in results:
        for gradient, mean in zip(result["gradients"], means, strict=True):
            assert torch.equal(gradient, mean)
        assert torch.equal(result["weight"], -torch.stack(means).sum(dim=0))
