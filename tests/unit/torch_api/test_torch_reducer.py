"""When buckets go, and the door of autograd that the library uses. Ranks that train are in habits."""

import pytest
import torch
from torch import nn

from bagua.algorithms import AllReduce, Plan
from bagua.torch_api.step.gradients import GradientBucket
from bagua.torch_api.step.training_step import TrainingStep
from bagua.torch_api.step.vote import Vote


class Run:
    """One bucket's plan at work on one rank: its result is its contribution."""

    started = False
    single = None  # no operation of the core

    def __init__(self, bucket, submitted):
        self.bucket, self.submitted = bucket, submitted

    def start(self):
        self.started = True
        self.submitted.append(self.bucket)

    def done(self):
        return False

    def advance(self, times):
        self.started = False
        times.append((0, 1, 2))
        return False

    def abandon(self):
        was, self.started = self.started, False
        return was

    rewind = abandon


def three_layers():
    """A model, the buckets that were submitted, and its buckets: one of each layer, last layer first."""
    layers, submitted, buckets = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), [], []
    for number in (2, 1, 0):
        parameters = [(f"{number}.{name}", parameter) for name, parameter in layers[number].named_parameters()]
        bucket = GradientBucket(str(number), parameters, lambda count, dtype: (torch.zeros(count, dtype=dtype), (1, 0)))
        bucket.set_plan(Plan((AllReduce(),)))
        bucket.execution = Run(bucket, submitted)
        buckets.append(bucket)
    return layers, submitted, buckets


def backward(step, layers, numbers=(2, 1, 0)):
    for number in numbers:
        for name, parameter in layers[number].named_parameters():
            parameter.grad = torch.ones_like(parameter)
            step.mark_ready(f"{number}.{name}", parameter)


class ElasticVoteOf(Vote):
    """A vote whose generation and members a test changes."""

    def __init__(self, changed):
        super().__init__()
        self.generation = 1
        self.renewal.changed = changed


@pytest.mark.parametrize(("entered", "changed", "early"), [(1, False, 2), (2, False, 0), (1, True, 0)])
def test_buckets_go_early_in_the_generation_of_their_pass_and_with_slots_of_its_members(entered, changed, early):
    """Another thread may enter one between the begin of a pass and its first gradient, or before the algorithm has
    followed the last change."""
    layers, submitted, buckets = three_layers()
    vote = ElasticVoteOf(changed)
    step = TrainingStep(buckets, vote=vote)
    step.begin_pass(vote.generation, 1.0)
    vote.generation = entered
    backward(step, layers)
    assert len(submitted) == early
    step.finish()
    assert submitted == buckets


def test_buckets_go_in_order_and_the_last_one_at_the_end():
    """Gradients of the middle layer, which come first, wait for those of the last one."""
    layers, submitted, buckets = three_layers()
    step, gone = TrainingStep(buckets), []
    for number in (1, 2, 0):
        backward(step, layers, [number])
        gone.append(len(submitted))
    assert gone == [0, 2, 2]
    step.finish()
    assert submitted == buckets
