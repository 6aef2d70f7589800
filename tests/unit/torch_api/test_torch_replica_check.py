"""Checksums of parameters: what they see, what they don't, and whose replica counts as right."""

import pytest
import torch

from bagua.torch_api.train import replica_check
from bagua.torch_api.train.replica_check import checksum, find_odd_ranks


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CHANGES = {
    "one element": lambda w: w.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(0.1)),
    "all by the same": lambda w: w + 0.01,
    "a step whose columns add up to nothing": lambda w: w + (step := drawn(*w.shape, seed=1)) - step.mean(0),
    "a step that keeps the norm": lambda w: w.flip(0),
    "two rows change places": lambda w: w[[1, 0, *range(2, len(w))]],
    "the sign": lambda w: -w,
}


@pytest.mark.parametrize("shape", [(40, 30), (300, 400)])  # one part, and several
@pytest.mark.parametrize("change", CHANGES)
def test_a_checksum_sees_a_change_about_as_large_as_it_is(change, shape):
    seen = []
    for seed in range(5):
        weight = drawn(*shape, seed=10 + seed)
        other = CHANGES[change](weight)
        seen.append(float((checksum(weight)[0] - checksum(other)[0]).abs() / (weight - other).norm()))
    assert 0.3 < max(seen) < 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.float8_e4m3fn])
def test_checksums_are_of_values_whatever_the_memory(dtype):
    weight = (drawn(4, 6, 5, 3) * 20).to(dtype)
    wanted = checksum(weight)
    assert wanted.dtype == torch.float64 and wanted.isfinite().all()
    wide = weight.to(torch.complex128 if weight.is_complex() else torch.float64)
    torch.testing.assert_close(wanted[1], wide.abs().square().sum().sqrt())
    for other in (weight.to(memory_format=torch.channels_last), weight.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(checksum(other), wanted)


OPTIMIZERS = {
    "SGD": lambda some: torch.optim.SGD(some, lr=0.01, momentum=0.9, weight_decay=1e-4),
    "Adam": lambda some: torch.optim.Adam(some, lr=1e-4, amsgrad=True),
}


def trained(name, moves_bits, missed=-1, steps=100):
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
def test_last_bits_are_allowed_to_add_up_and_a_missed_step_is_not(name):
    right = trained(name, moves_bits=False)
    eps = torch.finfo(torch.float32).eps

    def alarms(others):
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
def test_right_is_what_most_ranks_have_and_else_the_first(sums, odd):
    column = torch.tensor(sums, dtype=torch.float64)[:, None]
    allowed, norms = torch.tensor([0.1]), torch.tensor([2.0])
    (found,) = find_odd_ranks(["w"], column, allowed, norms, ranks=[10 + rank for rank in range(len(sums))])
    assert set(found.ranks) == {10 + rank for rank in odd} and found.names == ("w",)
