"""Checksums of parameters: what they see, what they don't, and whose replica counts as right."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bagua.base.errors import ConfigError
from bagua.base.replica_check import VARIABLE, CheckReplicas, read
from bagua.torch_api.train import replica_check
from bagua.torch_api.train.replica_check import checksum, describe, find_odd_ranks

NAN = math.nan


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one element": lambda w: w.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(0.1)),
    "all by the same": lambda w: w + 0.01,
    "a step whose columns add up to nothing": lambda w: w + (step := drawn(*w.shape, seed=1)) - step.mean(0),
    "a step that keeps the norm": lambda w: w.flip(0),
    "two rows change places": lambda w: w[[1, 0, *range(2, len(w))]],
    "the sign": lambda w: -w,
}


@pytest.mark.parametrize("shape", [(40, 30), (300, 400)])  # one part, and several
@pytest.mark.parametrize("change", CHANGES)
def test_a_checksum_sees_a_change_about_as_large_as_it_is(change: str, shape: tuple[int, int]) -> None:
    seen = []
    for seed in range(5):
        weight = drawn(*shape, seed=10 + seed)
        other = CHANGES[change](weight)
        seen.append(float((checksum(weight)[0] - checksum(other)[0]).abs() / (weight - other).norm()))
    assert 0.3 < max(seen) < 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.float8_e4m3fn])
def test_checksums_are_of_values_whatever_the_memory(dtype: torch.dtype) -> None:
    weight = (drawn(4, 6, 5, 3) * 20).to(dtype)
    wanted = checksum(weight)
    assert wanted.dtype == torch.float64 and wanted.isfinite().all()
    wide = weight.to(torch.complex128 if weight.is_complex() else torch.float64)
    torch.testing.assert_close(wanted[1], wide.abs().square().sum().sqrt())
    for other in (weight.to(memory_format=torch.channels_last), weight.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(checksum(other), wanted)


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda some: torch.optim.SGD(some, lr=0.01, momentum=0.9, weight_decay=1e-4),
    "Adam": lambda some: torch.optim.Adam(some, lr=1e-4, amsgrad=True),
}


def trained(name: str, moves_bits: bool, missed: int = -1, steps: int = 100) -> list[tuple[float, float, float]]:
    """(checksum, norm, number of the step) after each step. ``moves_bits``: each step's results become neighbouring
    numbers, or stay, at random."""
    one = drawn(2000).mul(0.02).requires_grad_()
    optimizer = OPTIMIZERS[name]([one])
    gradients, bits = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    found = []
    for step in range(steps):
        one.grad = torch.randn(2000, generator=gradients) * 0.01
        if step != missed:
            optimizer.step()
        if moves_bits:
            one.data.view(torch.int32).add_(torch.randint(-1, 2, (2000,), generator=bits, dtype=torch.int32))
        found.append((*checksum(one).tolist(), step + 1))
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_last_bits_are_allowed_to_add_up_and_a_missed_step_is_not(name: str) -> None:
    right = trained(name, moves_bits=False)
    eps = torch.finfo(torch.float32).eps

    def alarms(others: list[tuple[float, float, float]]) -> list[bool]:
        pairs = zip(right, others, strict=True)
        return [abs(a - b) > replica_check.ALLOWED * eps * step**0.5 * norm for (a, norm, step), (b, _, _) in pairs]

    assert not any(alarms(trained(name, moves_bits=True)))
    assert alarms(trained(name, moves_bits=True, missed=60))[60:] == [True] * 40


@pytest.mark.parametrize(
    ("sums", "odd"),
    [
        ([1.0, 1.0, 5.0], {2}),
        ([5.0, 1.0, 1.0], {0}),
        ([1.0, 5.0], {1}),
        ([1.0, 2.0, 3.0], {1, 2}),
        ([5.0, 5.0, 1.0, 1.0], {2, 3}),
        ([1.0, 1.05, 0.95, 9.0], {3}),
    ],
)
def test_right_is_what_most_ranks_have_and_else_the_first(sums: list[float], odd: set[int]) -> None:
    column = torch.tensor(sums, dtype=torch.float64)[:, None]
    allowed, norms = torch.tensor([0.1]), torch.tensor([2.0])
    (found,) = find_odd_ranks(["w"], column, allowed, norms, ranks=[10 + rank for rank in range(len(sums))])
    assert set(found.ranks) == {10 + rank for rank in odd} and found.names == ("w",)


def test_the_text_names_parameters_ranks_and_the_distance() -> None:
    sums = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0], [1.5, 1.2, 1.1, 1.1, 1.0], [1.0, 1.0, 1.0, 1.0, 1e300]])
    allowed, norms = torch.full((5,), 0.01), torch.full((5,), 2.0)
    found = find_odd_ranks(["a", "b", "c", "d", "e"], sums.double(), allowed, norms, ranks=[0, 1, 2])
    assert [(one.ranks, len(one.names)) for one in found] == [((1,), 4), ((2,), 1)]
    assert found[0].share == pytest.approx(0.25) and found[1].share == math.inf
    text = describe(found, exchange=3, parameters=7)
    assert all(word in text for word in ("rank 1 in a, b, c and 1 more", "4 of 7", "0.2", "rank 2 in e"))


def test_parameters_without_values_of_their_own_have_no_checksum() -> None:
    assert replica_check._adds_up(nn.Parameter(drawn(3)))
    for one in (drawn(0), drawn(3).to("meta"), drawn(3).to_sparse()):
        assert not replica_check._adds_up(one)


def test_the_setting_is_one_of_three_words() -> None:
    assert read({}) is CheckReplicas.warn and read({VARIABLE: ""}) is CheckReplicas.warn
    assert read({VARIABLE: "Error"}) is CheckReplicas.error
    with pytest.raises(ConfigError, match=rf"{VARIABLE}.*'yes'.*warn, error, off.*BG106"):
        read({VARIABLE: "yes"})
