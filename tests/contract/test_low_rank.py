"""Arithmetic with thin matrices: every implementation against float64, in odd shapes (native/low_rank_test.cpp: at odd
addresses, nothing written beyond)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bagua.csrc
from bagua.algorithms.low_rank import TorchLowRank
from bagua.torch_api.step.low_rank import NativeLowRank, low_rank_for

IMPLEMENTATIONS = [TorchLowRank(), NativeLowRank()]
EPSILON = 2.0**-24

# Around the widths of vectors, pieces of rows and groups of rows.
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 300, 2047, 2048, 2049, 4100]))
quick = settings(max_examples=60, deadline=None)


def close(found, wanted, terms, magnitudes):
    """Whether ``found`` is ``wanted`` but for as many roundings as a sum of ``terms`` has."""
    return bool(((found.double() - wanted).abs() <= (terms + 4) * EPSILON * magnitudes).all())


@pytest.mark.parametrize("one", IMPLEMENTATIONS, ids=lambda one: type(one).__name__)
@quick
@given(rows=SIZES, columns=SIZES, rank=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_equals_float64(one, rows, columns, rank, seed):
    if rows * columns > 1 << 20:
        rows = 37
    torch.manual_seed(seed)
    memory, gradient, result = torch.randn(3, rows, columns)
    left, projected = torch.randn(2, rank, rows)
    right, back = torch.randn(2, rank, columns)
    kept = [tensor.clone() for tensor in (gradient, left, right)]
    m, g, p, q = (tensor.double() for tensor in (memory, gradient, left, right))

    one.project(memory, gradient, left, right, projected)
    wanted = m + g - p.t() @ q
    magnitudes = m.abs() + g.abs() + p.abs().t() @ q.abs()
    assert close(memory, wanted, rank + 2, magnitudes)
    exact = memory.double()
    assert close(projected, q @ exact.t(), columns, q.abs() @ exact.abs().t())

    one.back_project(memory, left, back)
    assert close(back, p @ exact, rows, p.abs() @ exact.abs())
    assert torch.equal(memory.double(), exact)

    one.product(left, right, result)
    assert close(result, p.t() @ q, rank, p.abs().t() @ q.abs())
    assert all(torch.equal(*pair) for pair in zip(kept, (gradient, left, right), strict=True))


@pytest.mark.parametrize("one", IMPLEMENTATIONS, ids=lambda one: type(one).__name__)
def test_what_is_not_finite_shows(one):
    memory, gradient = torch.randn(2, 20, 30)
    gradient[3, 4] = torch.inf
    projected = torch.randn(1, 20)
    one.project(memory, gradient, torch.randn(1, 20), torch.randn(1, 30), projected)
    assert projected.isfinite().logical_not().nonzero().tolist() == [[0, 3]]


def test_other_dtypes_go_by_torch():
    assert isinstance(low_rank_for(torch.zeros(1)), NativeLowRank)
    assert isinstance(low_rank_for(torch.zeros(1, dtype=torch.bfloat16)), TorchLowRank)
    assert isinstance(low_rank_for(torch.zeros(1, device="meta")), TorchLowRank)


def test_bfloat16_is_rounded_once():
    memory, gradient = torch.randn(6, 9), torch.randn(6, 9).bfloat16()
    left, right = torch.randn(2, 6).bfloat16(), torch.randn(2, 9)
    wanted = memory.double() + gradient.double()
    projected, result = torch.empty(2, 6, dtype=torch.bfloat16), torch.empty(6, 9, dtype=torch.bfloat16)
    one = TorchLowRank()
    one.project(memory, gradient, torch.zeros(2, 6), right, projected)
    assert torch.equal(memory, wanted.float())
    assert torch.allclose(projected.double(), right.double() @ wanted.t(), rtol=2**-8, atol=1e-5)
    one.product(left, right, result)
    assert torch.allclose(result.double(), left.double().t() @ right.double(), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory": bytearray(4 * 5 * 7 - 4)}, "memory has 136 bytes, needs 140"),
        ({"left": bytearray(4)}, "left has 4 bytes"),
        ({"projected": bytes(4 * 2 * 5)}, "(?i)read-only|not writable"),
        ({"right": memoryview(bytearray(4 * 2 * 7 + 1))[1:]}, "right is not aligned"),
    ],
)
def test_bad_buffers_are_refused(change, words):
    given = {
        "memory": bytearray(4 * 5 * 7),
        "gradient": bytearray(4 * 5 * 7),
        "left": bytearray(4 * 2 * 5),
        "right": bytearray(4 * 2 * 7),
        "projected": bytearray(4 * 2 * 5),
    }
    with pytest.raises((ValueError, BufferError), match=words):
        bagua.csrc.load().low_rank_project(5, 7, 2, **(given | change))
    with pytest.raises(ValueError, match="rank is 0"):
        bagua.csrc.load().low_rank_project(5, 7, 0, **given)
    with pytest.raises(ValueError, match="at most"):
        bagua.csrc.load().low_rank_project(1 << 40, 1 << 40, 2, **given)
