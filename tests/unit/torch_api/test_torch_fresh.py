"""Gradients where autograd left them: what a plan that reads FRESH sees, and what is not copied for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
import torch
from torch import nn

from bagua.algorithms import AllReduce, Local, Plan
from bagua.algorithms.plan import FRESH, GRADIENT, RESULT
from bagua.torch_api.cuda.port import PORT
from bagua.torch_api.job.connection import Place
from bagua.torch_api.step.execution import NotReady
from bagua.torch_api.step.gradients import GradientBucket

NUMBERS = count(1)


def allocate(elements: int, dtype: torch.dtype) -> tuple[torch.Tensor, Place]:
    return torch.zeros(elements, dtype=dtype), (next(NUMBERS), 0)


def nothing(_: object) -> None:
    """A step that is there for what it reads."""


class NothingToRun(NotReady):
    """An execution that runs no step: what matters here is before the first one."""

    def start(self) -> None:
        pass


def bucket_of(*tensors: torch.Tensor, reads: Sequence[str] = (FRESH,)) -> tuple[GradientBucket, list[nn.Parameter]]:
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    bucket = GradientBucket("b", [(str(number), one) for number, one in enumerate(parameters)], allocate)
    bucket.add_slot("sent", 5)
    steps = (Local(nothing, reads=tuple(reads), writes=("sent",)), AllReduce(src="sent", dst="sent"))
    bucket.set_plan(Plan((*steps, Local(nothing, writes=(RESULT,)))))
    bucket.execution = NothingToRun("b")
    return bucket, parameters


def arrive(bucket: GradientBucket) -> None:
    """As the reducer does it for every gradient, and for the bucket when it is full."""
    for slot in bucket.entries:
        if slot.parameter.grad is not None:
            slot.stage()
            slot.ready = True
    bucket.start()


def test_nothing_is_copied() -> None:
    bucket, (matrix, vector) = bucket_of(torch.zeros(4, 5), torch.zeros(3))
    matrix.grad, vector.grad = torch.randn(4, 5), torch.randn(3)
    before = [matrix.grad, vector.grad]
    arrive(bucket)
    assert [tensor.data_ptr() for tensor in bucket.views(FRESH)] == [tensor.data_ptr() for tensor in before]
    assert matrix.grad is before[0] and not bucket.slot(GRADIENT).any()
    assert bucket.region(GRADIENT).tail.tolist() == [1, 1, 0]
    bucket.slot(RESULT).fill_(7)
    bucket.show_results()
    assert matrix.grad is before[0] and bool((matrix.grad == 7).all()) and bool((vector.grad == 7).all())


def test_what_is_accumulated_into_a_result_is_the_next_gradient() -> None:
    bucket, (vector,) = bucket_of(torch.zeros(3))
    vector.grad = torch.ones(3)
    arrive(bucket)
    bucket.slot(RESULT).fill_(2)
    bucket.show_results()
    assert vector.grad is not None
    vector.grad += 1
    arrive(bucket)
    assert bucket.views(FRESH)[0].tolist() == [3, 3, 3]
    bucket.slot(RESULT).fill_(9)
    assert bucket.views(FRESH)[0].tolist() == [3, 3, 3], "gradients are the program's own"


def test_a_plan_that_reads_both_has_both() -> None:
    bucket, (vector,) = bucket_of(torch.zeros(70000), reads=(FRESH, GRADIENT))
    vector.grad = torch.ones(70000)
    arrive(bucket)
    assert bool((bucket.slot(GRADIENT) == 1).all()) and bool((bucket.views(FRESH)[0] == 1).all())


def test_on_a_device_all_are_copied_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PORT.cuda, "holds", lambda tensor: True)
    bucket, (large, small) = bucket_of(torch.zeros(70000), torch.zeros(3), reads=(GRADIENT,))
    assert not any(entry.alone for entry in bucket.entries)
    large.grad, small.grad = torch.ones(70000), torch.ones(3)
    calls: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: (calls.append(len(to)), copy(to, of)))
    bucket.start()
    assert calls == [3], "two gradients and the tail"
    assert bool((bucket.slot(GRADIENT) == 1).all())


def test_other_strides_and_dtypes_are_copied_into_those_of_the_parameter() -> None:
    bucket, (matrix, image) = bucket_of(
        torch.zeros(4, 5), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    )
    matrix.grad = torch.randn(5, 4).t()
    image.grad = torch.randn(2, 3, 4, 4)
    arrive(bucket)
    fresh = bucket.views(FRESH)
    assert [one.stride() for one in fresh] == [(5, 1), image.stride()]
    assert torch.equal(fresh[0], matrix.grad) and torch.equal(fresh[1], image.grad)


def test_a_parameter_without_gradient_gives_zeros() -> None:
    bucket, (_, vector) = bucket_of(torch.zeros(4, 5), torch.zeros(3))
    bucket.slot(GRADIENT).fill_(5)  # of an earlier step
    vector.grad = torch.ones(3)
    arrive(bucket)
    assert bucket.absent == [0] and not bucket.views(FRESH)[0].any()
    assert bucket.region(GRADIENT).tail.tolist() == [0, 1, 0]


def test_a_sparse_gradient_is_refused_with_its_name() -> None:
    bucket, (matrix,) = bucket_of(torch.zeros(4, 5))
    matrix.grad = torch.randn(4, 5).to_sparse()
    arrive(bucket)
    with pytest.raises(NotImplementedError, match="Parameter 0 got a sparse gradient"):
        bucket.views(FRESH)


def test_it_is_no_slot() -> None:
    bucket, _ = bucket_of(torch.zeros(3))
    with pytest.raises(ValueError, match="does not lie in one piece: use views"):
        bucket.slot(FRESH)
    with pytest.raises(ValueError, match="has a slot 'fresh' already"):
        bucket.add_slot(FRESH)
