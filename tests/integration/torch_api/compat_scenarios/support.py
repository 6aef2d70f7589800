"""Helpers of all scenarios: a small model, batches, algorithms as users of the original wrote theirs, and a reference
of all ranks' models in one process."""

import copy

import torch
from torch import nn

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


def seeded(make=Net, seed=0):
    torch.manual_seed(seed)
    return make()


def batch(rank, step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


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


def start(algorithm, optimizer=None, **options):
    """A model under this algorithm, and its optimizer."""
    model = seeded(seed=bagua.get_rank())  # different on every rank: rank 0's counts
    made = (optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=RATE)))(model.parameters())
    return model.with_bagua([made], algorithm, **options), made


def train(model, optimizer, step):
    optimizer.zero_grad()
    loss(model, bagua.get_rank(), step).backward()
    optimizer.step()


def replicas():
    """All ranks' models at the start, in one process."""
    first = seeded()
    return [copy.deepcopy(first) for _ in range(bagua.get_world_size())]


def gradients(models, step):
    """Every rank's gradients of this step, by rank and parameter."""
    found = []
    for rank, model in enumerate(models):
        model.zero_grad()
        loss(model, rank, step).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return found


def weights(models):
    return [[parameter.detach().clone() for parameter in model.parameters()] for model in models]


def put(models, values):
    """``values``: by rank and parameter."""
    with torch.no_grad():
        for model, mine in zip(models, values, strict=True):
            for parameter, value in zip(model.parameters(), mine, strict=True):
                parameter.copy_(value)


def mean(rows):
    return [torch.stack(column).mean(0) for column in zip(*rows, strict=True)]


def stepped(rows, slopes):
    """Weights of all ranks after steps along these gradients."""
    return [
        [value - RATE * slope for value, slope in zip(mine, own, strict=True)]
        for mine, own in zip(rows, slopes, strict=True)
    ]


def check_equal(found, wanted, tolerance=1e-5):
    for (name, mine), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(
            mine.detach(), other.detach(), rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
