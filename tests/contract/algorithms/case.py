"""A case: an algorithm with settings of its own, what one process of plain torch gets instead, and what must hold.

A file of this folder exports ``CASES``, a list of ``Case``; the harness (test_algorithms.py) runs each of them on real
ranks of real engines in every world of ``WORLDS`` that the case applies to, and compares the parameters of every rank
after every step with ``Case.reference``. For example:

    def reference(sim: Simulation) -> Iterator[None]:
        for step in range(sim.steps):
            sim.backward(step)
            sim.set_gradients([sim.mean(sim.gradients())] * sim.n)
            sim.optimize()
            yield

    CASES = [Case("gradient_allreduce", GradientAllReduceAlgorithm, reference)]

What a case names must be at the top of its module: ranks import it by name.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rig.ranks.placing import on_host, placed
from torch import Tensor, nn

import bagua.torch_api as bagua

Loss = Callable[[nn.Module, int, int], Tensor]
"""(model, rank, step) -> the loss on that rank's batch of that step."""


@dataclass(frozen=True)
class World:
    """Replicas of every host: ranks, or islands of ranks that hold one together."""

    name: str
    hosts: tuple[tuple[int, ...], ...]
    island: int = 1

    @property
    def n(self):
        """Number of replicas."""
        return sum(len(replicas) for replicas in self.hosts)

    def ranks_of(self, replicas):
        """The ranks that hold these."""
        return [one * self.island + place for one in replicas for place in range(self.island)]


WORLDS = {
    world.name: world
    for world in (
        World("1 rank", ((0,),)),
        World("2 ranks", ((0, 1),)),
        World("4 ranks", ((0, 1, 2, 3),)),
        World("2 hosts x 1", ((0,), (1,))),
        World("2 hosts x 2", ((0, 1), (2, 3))),
        World("2 hosts, 1 and 2", ((0,), (1, 2))),
        World("2 islands x 2", ((0,), (1,)), island=2),
    )
}
ISLANDS = "2 islands x 2"
EVERY_WORLD = tuple(name for name in WORLDS if name != ISLANDS)
EVEN_WORLDS = tuple(name for name in EVERY_WORLD if WORLDS[name].n % 2 == 0)
TWO_HOSTS = tuple(name for name in EVERY_WORLD if len(WORLDS[name].hosts) == 2)
SEVERAL_RANKS = tuple(name for name in EVERY_WORLD if WORLDS[name].n > 1)


# Models and losses


def mlp():
    """Three layers, 1244 parameters."""
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 4))


def batch(rank, step, *shape):
    """Normal, other numbers for every rank and step."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + rank))


def square(model, rank, step):
    """A loss for ``mlp``."""
    loss = (model(batch(rank, step, 6, 10)) - 1).square().mean()
    return loss


def volume_model():
    """1 MiB of float32 in four parameters: (512, 256), (512), (256, 512), (256)."""
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))


def volume_loss(model, rank, step):
    """A loss for ``volume_model``."""
    loss = (model(batch(rank, step, 4, 256)) - 1).square().mean()
    return loss


def sgd(model):
    """With momentum and weight decay."""
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)]


def plain_sgd(model):
    """Without state."""
    return [torch.optim.SGD(model.parameters(), lr=0.05)]


def adam(model):
    """Adam at the rate of small networks."""
    return [torch.optim.Adam(model.parameters(), lr=1e-2)]


def seeded(make, seed=0):
    """The same parameters for the same seed."""
    torch.manual_seed(seed)
    return placed(make())


def replica(make):
    """A model that is another one on each island, or rank, and divided among the ranks of an island."""
    model = seeded(make, seed=bagua.get_island())
    if bagua.get_island_size() == 1:
        return model
    from torch.distributed.device_mesh import init_device_mesh  # not in ranks without shards: it takes a second
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (bagua.get_island_size(),))
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer is not model and all(uses[one] == 1 for one in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params={one for one in model.parameters() if one.dim() == 0})


def whole(parameter):
    """The parameter, put together from the ranks of its island, all of which call it."""
    found = parameter.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def flat(model):
    """A copy of all parameters in the order of their registration, float64 [elements], on the CPU."""
    return on_host(torch.cat([whole(parameter).flatten().double() for parameter in model.parameters()]))


def nbytes(model):
    """Of all parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


# The reference


class Simulation:
    """All ranks of a world in one process: a replica and optimizers for each, which begin with rank 0's parameters.

    ``state`` is for whatever the reference wants to keep. Vectors are flat, in the order of registration, in the dtype
    of the parameters.
    """

    def __init__(self, case, world):
        self.world = world
        self.n = world.n
        self.steps = case.steps
        self.models = [seeded(case.model) for _ in range(world.n)]
        self.optimizers = [case.optimizers(model) for model in self.models]
        self.state = {}
        self._loss = case.loss
        self._members_changed = False

    def change_members(self, hosts):
        """From now on these ranks train; whoever calls this has given all of them models and optimizers."""
        self.world = World(self.world.name, tuple(map(tuple, hosts)))
        self.n = self.world.n
        self._members_changed = True

    def members_changed(self):
        """Whether there are others than when this was asked last: what is under way then is taken anew, or dropped."""
        changed, self._members_changed = self._members_changed, False
        return changed

    def begin_anew(self):
        """All take the parameters and optimizers of the first rank."""
        self.set_parameters([self.parameters()[0]] * self.n)
        for optimizers in self.optimizers[1:]:
            for mine, first in zip(optimizers, self.optimizers[0], strict=True):
                mine.load_state_dict(copy.deepcopy(first.state_dict()))

    def backward(self, step, passes=()):
        """Every replica computes the gradient of its own batch; with ``passes``, the sum over these steps' batches."""
        for rank, model in enumerate(self.models):
            model.zero_grad(set_to_none=True)
            for number in passes or (step,):
                self._loss(model, rank, number).backward()

    def optimize(self):
        """Every replica's optimizers take a step."""
        for optimizers in self.optimizers:
            for optimizer in optimizers:
                optimizer.step()

    def gradients(self):
        """A copy of each rank's gradient; zeros where there is none."""
        return [
            torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).detach().flatten() for p in m.parameters()])
            for m in self.models
        ]

    def set_gradients(self, values):
        """Replaces each rank's gradient; parameters that no rank has a gradient for keep none."""
        names = {name for m in self.models for name, p in m.named_parameters() if p.grad is not None}
        for model, value in zip(self.models, values, strict=True):
            for (name, parameter), part in zip(model.named_parameters(), self._parts(model, value), strict=True):
                parameter.grad = part.clone() if name in names else None

    def parameters(self):
        """A copy of each rank's parameters."""
        return [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in self.models]

    @torch.no_grad()
    def set_parameters(self, values):
        """Replaces each rank's parameters."""
        for model, value in zip(self.models, values, strict=True):
            for parameter, part in zip(model.parameters(), self._parts(model, value), strict=True):
                parameter.copy_(part)

    @staticmethod
    def _parts(model, value):
        parts = value.split([parameter.numel() for parameter in model.parameters()])
        return [part.view_as(parameter) for part, parameter in zip(parts, model.parameters(), strict=True)]

    def sum(self, values):
        """As the engine adds: inside every host in the order of ranks, then over hosts."""
        hosts = [sum_in_order([values[rank] for rank in ranks]) for ranks in self.world.hosts]
        return sum_in_order(hosts)

    def mean(self, values):
        """The same divided by the number of ranks."""
        return self.sum(values) / len(values)


def sum_in_order(values):
    """((a + b) + c) + ..."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


Reference = Callable[[Simulation], Iterator[None]]
"""Trains the replicas of the simulation; yields after each step."""


def nothing(*_):
    """A check that there is nothing to check."""


@dataclass(frozen=True)
class Case:
    """One algorithm with one setting.

    Args:
        name: Unique over all files: the name of the algorithm first.
        algorithm: Makes it; called once per rank and world. None: the algorithm has no reference.
        reference: See ``Simulation``.
        optimizers: Makes the optimizers of a model, in ranks and in the reference.
        model, loss: Likewise. Models are seeded.
        steps: How many are trained and compared.
        tolerance: The largest allowed |parameter - reference| after a step, as a number or a function of (world, step);
            steps count from 0. 0.0: bit-equal.
        flip: How far a parameter moves if a codec takes the next value, as sums in another order make it do: allowed
            after a loss of ranks.
        worlds: Names of ``WORLDS`` that it applies to.
        options: More arguments of ``with_bagua``.
        bucket_bytes: Sets BAGUA_DEFAULT_BUCKET_SIZE for this case; None: one bucket.
        train: What a rank does in a step: (model, optimizers, loss, rank, step). None: one pass, one optimizer step.
        replicas_equal: Whether all ranks must hold the same bits after a step: True, False or a function of the step.
        check: Called in every rank after every step with (wrapped model, step): invariants, also by collective calls.
        bytes_sent: (world, model) -> bytes that host 0 sends per step, on the average of a whole number of ``period``
            steps; None: not measured. Measured on two hosts with ``volume_model``; right if within ``slack`` (a share:
            headers, scales of blocks) of the formula, and 2 KiB per step.
        period: Steps after which what is sent repeats.
        warm_up: Steps before that which do not count.
    """

    name: str
    algorithm: Callable[[], Any]
    reference: Reference
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = sgd
    model: Callable[[], nn.Module] = mlp
    loss: Loss = square
    steps: int = 6
    tolerance: float | Callable[[World, int], float] = 0.0
    flip: float = 0.0
    worlds: Sequence[str] = EVERY_WORLD
    options: dict[str, Any] = field(default_factory=dict)
    bucket_bytes: int | None = None
    train: Callable[[nn.Module, list[torch.optim.Optimizer], Loss, int, int], None] | None = None
    replicas_equal: bool | Callable[[int], bool] = True
    check: Callable[[nn.Module, int], None] = nothing
    bytes_sent: Callable[[World, nn.Module], float] | None = None
    period: int = 1
    warm_up: int = 2
    slack: float = 0.05

    def allowed(self, world, step):
        """The tolerance after a step."""
        return self.tolerance if isinstance(self.tolerance, float | int) else self.tolerance(world, step)

    def must_be_equal(self, step):
        """Whether replicas must hold the same bits after a step."""
        return self.replicas_equal if isinstance(self.replicas_equal, bool) else self.replicas_equal(step)
