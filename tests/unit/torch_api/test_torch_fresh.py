"""Gradients where autograd left them: what a plan that reads FRESH sees, and what is not copied for it."""

from itertools import count

import torch
from torch import nn

from bagua.algorithms import AllReduce, Local, Plan
from bagua.algorithms.plan import FRESH, GRADIENT, RESULT
from bagua.torch_api.step.execution import NotReady
from bagua.torch_api.step.gradients import GradientBucket

NUMBERS = count(1)


def allocate(elements, dtype):
    return torch.zeros(elements, dtype=dtype), (next(NUMBERS), 0)


def nothing(_):
    """A step that is there for what it reads."""


class NothingToRun(NotReady):
    """An execution that runs no step: what matters here is before the first one."""

    def start(self):
        pass


def bucket_of(*tensors, reads=(FRESH,)):
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    bucket = GradientBucket("b", [(str(number), one) for number, one in enumerate(parameters)], allocate)
    bucket.add_slot("sent", 5)
    steps = (Local(nothing, reads=tuple(reads), writes=("sent",)), AllReduce(src="sent", dst="sent"))
    bucket.set_plan(Plan((*steps, Local(nothing, writes=(RESULT,)))))
    bucket.execution = NothingToRun("b")
    return bucket, parameters


def arrive(bucket):
    """As the reducer does it for every gradient, and for the bucket when it is full."""
    for slot in bucket.entries:
        if slot.parameter.grad is not None:
            slot.stage()
            slot.ready = True
    bucket.start()


def test_nothing_is_copied():
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


def test_what_is_accumulated_into_a_result_is_the_next_gradient():
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


def test_other_strides_and_dtypes_are_copied_into_those_of_the_parameter():
    bucket, (matrix, image) = bucket_of(
        torch.zeros(4, 5), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    )
    matrix.grad = torch.randn(5, 4).t()
    image.grad = torch.randn(2, 3, 4, 4)
    arrive(bucket)
    fresh = bucket.views(FRESH)
    assert [one.stride() for one in fresh] == [(5, 1), image.stride()]
    assert torch.equal(fresh[0], matrix.grad) and torch.equal(fresh[1], image.grad)
