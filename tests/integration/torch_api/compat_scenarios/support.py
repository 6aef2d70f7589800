"""Helpers of all scenarios: a small model, and algorithms as users of the original wrote theirs. The reference is one
of our own algorithms, which the contract suite compares with plain torch."""

import torch
from torch import nn
from training_scenarios.support import batch, seeded

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket

SCENARIOS = {}
RATE = 0.1


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


class Net(nn.Module):
    """A parameter of the root, and layers with several sizes of parameters."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))
        self.first = nn.Linear(10, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x * self.scale)))


def net(seed=0):
    return seeded(Net, seed)


def loss(model, rank, step):
    return model(batch(rank, step, 5, 10)).square().mean()


class Reified(Algorithm):
    """``implementation(process_group, *arguments)`` for each model."""

    def __init__(self, implementation, *arguments):
        self.implementation = implementation
        self.arguments = arguments

    def reify(self, process_group):
        return self.implementation(process_group, *self.arguments)


class OfWeights(AlgorithmImpl):
    """Exchanges weights, in one bucket unless ``one_bucket`` says no; backward exchanges nothing."""

    one_bucket = True

    def init_tensors(self, bagua_ddp):
        self.tensors = [
            parameter.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name)
            for name, parameter in reversed(bagua_ddp.bagua_build_params())
        ]
        return self.tensors

    def tensors_to_buckets(self, tensors, do_flatten):
        if not self.one_bucket:
            return super().tensors_to_buckets(tensors, do_flatten)
        return [BaguaBucket([tensor for bucket in tensors for tensor in bucket], flatten=do_flatten, name="0")]

    def init_backward_hook(self, bagua_ddp):
        return lambda parameter_name, parameter: None


def start(algorithm, rate=RATE, **options):
    """A model under this algorithm, and its optimizer."""
    model = net(bagua.get_rank())  # different on every rank: rank 0's counts
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return model.with_bagua([optimizer], algorithm, **options), optimizer


def train(model, optimizer, step):
    optimizer.zero_grad()
    loss(model, bagua.get_rank(), step).backward()
    optimizer.step()
