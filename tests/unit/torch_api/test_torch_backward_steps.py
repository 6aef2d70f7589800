"""When parameters move inside backward: with results that are there at once, or never before the end."""

import pytest
import torch
from torch import nn

from bagua.algorithms import AllReduce, Plan
from bagua.base.errors import BaguaError
from bagua.torch_api.step.gradients import GradientBucket, GradientHook
from bagua.torch_api.train.backward_steps import BackwardSteps, SteppingInBackward


class Copy:
    """The exchange of one rank: its result is its contribution. ``quick``: it is there at once."""

    started = False
    single = None  # no operation of the core
    actions = (None,)

    def __init__(self, quick):
        self._quick = quick

    def start(self):
        self.started = True

    def done(self):
        return self._quick

    def advance(self, times):
        self.started = False
        times.append((0, 1, 2))
        return False

    def abandon(self):
        was, self.started = self.started, False
        return was

    rewind = abandon


def allocate(count, dtype):
    return torch.zeros(count, dtype=dtype), (1, 0)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])


class Trained:
    """Three layers, one bucket each, last layer first; ``seen``: before each gradient, which layers have moved."""

    def __init__(self, quick):
        self.layers = layers()
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.1, momentum=0.9)
        self.steps = BackwardSteps([self.optimizer])
        buckets = []
        for number in (2, 1, 0):
            buckets.append(GradientBucket(str(number), [(str(number), self.layers[number].weight)], allocate))
            buckets[-1].set_plan(Plan((AllReduce("AVG"),)))
            buckets[-1].execution = Copy(quick)
        self.waits = []
        self.reducer = SteppingInBackward(
            self.steps, buckets, on_finished=lambda times, begin, end: self.waits.append(len(times))
        )
        self.seen = []
        for number, layer in enumerate(self.layers):
            layer.weight.register_post_accumulate_grad_hook(
                GradientHook(lambda parameter, name=str(number): self.after_gradient(name, parameter))
            )

    def after_gradient(self, name, parameter):
        self.seen.append([n for n, layer in enumerate(self.layers) if not torch.equal(layer.weight, self.before[n])])
        self.reducer.mark_ready(name, parameter)

    def backward(self, step, loss=None):
        self.before = [layer.weight.detach().clone() for layer in self.layers]
        self.seen.clear()
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        (loss or (lambda x: self.layers(x).square().mean()))(inputs).backward()
        self.reducer.finish()


@pytest.mark.parametrize("quick", [True, False])
def test_parameters_move_while_others_still_get_gradients(quick):
    trained, plain = Trained(quick), layers()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        trained.optimizer.zero_grad()
        trained.backward(step)
        assert trained.seen == ([[], [2], [1, 2]] if quick and step else [[], [], []])
        trained.optimizer.step()
        optimizer.zero_grad()
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        plain(inputs).square().mean().backward()
        optimizer.step()
        for one, other in zip(trained.layers, plain, strict=True):
            assert torch.equal(one.weight, other.weight)
    assert trained.waits == [3] * 4


def test_a_value_that_backward_still_needs_is_noticed_by_autograd():
    """The last layer's weight is used where it gets no gradient, and needed after it has moved."""
    trained = Trained(quick=True)
    trained.backward(0)
    trained.optimizer.step()

    def loss(inputs):
        return trained.layers(trained.layers[0](inputs) @ trained.layers[2].weight.detach()).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained.backward(1, loss)


def test_changes_after_the_parameters_moved_are_told():
    trained = Trained(quick=True)
    trained.backward(0)
    trained.optimizer.step()
    trained.backward(1)
    nn.utils.clip_grad_norm_(trained.layers.parameters(), 0.1)
    with pytest.raises(BaguaError, match=r"gradients were changed .* Parameters have moved already"):
        trained.optimizer.step()
    assert [len(group["params"]) for group in trained.optimizer.param_groups] == [3]


def test_a_second_gradient_after_the_result_is_told():
    trained = Trained(quick=True)
    trained.backward(0)
    trained.optimizer.step()
    again = trained.layers[0].weight.register_post_accumulate_grad_hook(
        GradientHook(lambda _: trained.reducer.mark_ready("2", trained.layers[2].weight))
    )
    with pytest.raises(BaguaError, match="use_reentrant=False"):
        trained.backward(1)
    again.remove()
