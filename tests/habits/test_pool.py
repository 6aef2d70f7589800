"""Ranks that stay (rig/ranks/pool.py): one function after the other, and others after one that ended badly."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from rig.ranks.pool import Pool

import bagua.torch_api as bagua


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool([[0, 1]])
    yield made
    made.close()


def rank_adds(number: int) -> tuple[int, int, float]:
    tensor = torch.full((1,), float(number))
    bagua.allreduce_inplace(tensor)
    return os.getpid(), bagua.get_rank(), tensor.item()


def rank_changes_settings() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")


def rank_settings() -> tuple[bool, torch.dtype, float]:
    with pytest.raises(UserWarning):
        warnings.warn("counts as an error", stacklevel=1)
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.rand(1).item()


def test_functions_run_in_the_same_ranks(pool: Pool) -> None:
    first, second = (pool.run(rank_adds, number=number) for number in (1, 2))
    assert [one[0] for one in first] == [one[0] for one in second] and len({one[0] for one in first}) == 2
    assert [one[1:] for one in first + second] == [(0, 2.0), (1, 2.0), (0, 4.0), (1, 4.0)]


def test_a_function_finds_the_process_as_the_one_before_it(pool: Pool) -> None:
    before = pool.run(rank_settings)
    pool.run(rank_changes_settings)
    assert pool.run(rank_settings) == before


def rank_ends(how: str) -> None:
    """Rank 1, while rank 0 waits for it."""
    if bagua.get_rank() == 1:
        if how == "raise":
            raise ValueError("a bug of this rank")
        if how == "exit":
            sys.exit(3)
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "return":
            print("rank 1 was here")
            return
    bagua.barrier()


ENDS = {"raise": "a bug of this rank", "exit": "SystemExit: 3", "kill": "exit code -9", "return": "did not return"}


@pytest.mark.parametrize("how", ENDS)
def test_a_function_that_ends_badly_costs_these_ranks_alone(pool: Pool, how: str) -> None:
    """The failure names the function, the one before it, and what each rank said."""
    pool.run(rank_adds, number=5)
    starts = pool.starts
    with pytest.raises(pytest.fail.Exception) as failure:
        pool.run(rank_ends, how=how, hang_s=1.0 if how == "return" else 30.0)
    text = str(failure.value)
    assert f"rank_ends({how})" in text and "rank_adds(5)\n" in text and ENDS[how] in text
    assert pool.run(rank_adds, number=3)[0][2] == 6.0
    assert pool.starts == starts + 1
