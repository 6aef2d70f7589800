"""Models and ways of sharding them, between islands: each trains as one process does with all batches."""

import contextlib
import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.func import functional_call
from training_scenarios.support import whole_parameters

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.base.islands import VARIABLE
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.job.session import current

STEPS, BATCH = 5, 4


class Net(nn.Module):
    """Two branches behind a norm, of which a batch may use one; a tied layer; a scalar; a layer that nobody uses."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 12)
        self.norm = nn.LayerNorm(12)
        self.branches = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.tied = nn.Linear(12, 12, bias=False)
        self.tied.weight = self.branches[0].weight
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(12, 1)  # one row: most ranks have none of it

    def forward(self, inputs, branches=(0, 1)):
        hidden = self.norm(torch.tanh(self.first(inputs)))
        for branch in branches:
            hidden = torch.tanh(self.branches[branch](hidden)) + hidden
        return self.last(self.tied(hidden) * self.scale)

    def outputs(self, inputs, branches):
        return self.forward(inputs, branches)


class Layers(nn.Module):
    """Layers that tensor parallelism divides, and a norm, on sequences."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, inputs, branches=()):
        return torch.tanh(self.head(self.norm(self.down(torch.tanh(self.up(inputs))))))


def shard_net(model, mesh, ignored=(), **options):
    left_out = {model.scale, *(one for name in ignored for one in model.get_submodule(name).parameters())}
    for layer in (model.first, model.last):
        if not left_out.intersection(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, ignored_params=left_out, **options)


def tensor_parallel(model, mesh, sequences=False):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequences:  # whose gradients are sums that are still to be made
        plan = {
            "up": ColwiseParallel(input_layouts=Replicate()),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    parallelize_module(model, mesh, plan)


def loss_of(model, inputs, branches=(0, 1)):
    return (model(inputs, branches) - 1).square().mean()


def inputs_of(reader, step, make):
    random = torch.Generator().manual_seed(1000 * step + reader)
    return torch.randn(BATCH, *((7,) if make is Net else (2, 8)), generator=random, dtype=torch.float64)


def size():
    return bagua.get_island_size()


def one_mesh():
    return init_device_mesh("cpu", (size(),))


def two_meshes():
    return init_device_mesh("cpu", (2, size() // 2), mesh_dim_names=("outer", "inner"))


def plain(model):
    shard_net(model, one_mesh())


def frozen(model):
    model.first.requires_grad_(False)
    shard_net(model, one_mesh())


def kept(model):
    shard_net(model, one_mesh(), reshard_after_forward=False)


def ignored(model):
    shard_net(model, one_mesh(), ["branches.1", "last"])


def half_precision(model):
    shard_net(model, one_mesh(), mp_policy=MixedPrecisionPolicy(torch.float32, torch.float64))


def offloaded(model):
    shard_net(model, one_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))


def hybrid(model):
    shard_net(model, two_meshes())


def inner_alone(model):
    shard_net(model, two_meshes()["inner"])


def cast_outputs(model):
    """FSDP hooks outputs before it casts them."""
    policy = MixedPrecisionPolicy(output_dtype=torch.float32)
    fully_shard(model, mesh=one_mesh(), ignored_params={model.scale}, mp_policy=policy)


def layers_alone(model):
    """The root is no unit. FSDP reduces the first one at the end of a pass, since its inputs have no gradient."""
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=one_mesh())


def one_unit(model):
    """Without whole parameters, beside which torch's GradScaler refuses parts."""
    fully_shard(model, mesh=one_mesh())


def tensors_alone(model):
    tensor_parallel(model, one_mesh())


def sequences(model):
    tensor_parallel(model, one_mesh(), sequences=True)


def both(model):
    mesh = two_meshes()
    tensor_parallel(model, mesh["inner"])
    fully_shard(model, mesh=mesh["outer"])


FSDP = (plain, frozen, kept, ignored, half_precision, offloaded, hybrid, inner_alone, cast_outputs, layers_alone)
WAYS = {one.__name__: one for one in (*FSDP, one_unit, tensors_alone, sequences, both)}
LAYERED = ("one_unit", "tensors_alone", "sequences", "both")


def readers(way):
    """(Readers of batches, this rank's): ranks of tensor parallelism read the same."""
    same = {"tensors_alone": size(), "sequences": size(), "both": size() // 2}.get(way, 1)
    return bagua.get_world_size() // same, bagua.get_rank() // same


USED = {
    "both": lambda reader: (0, 1),
    "by island": lambda reader: (reader // size() % 2,),
    "one island": lambda reader: (0, 1) if reader < size() else (0,),
    "one rank": lambda reader: (0, 1) if reader == 0 else (0,),
}
"""Branches that a reader uses."""


def weight_of(reader, part, weighed):
    return 1.0 + 0.5 * ((reader // size() + part) % 2) if weighed else 1.0


def in_one_process(reference, way, branches, step, count, parts, weighed):
    """The gradients of the batches of all readers."""
    for reader, part in itertools.product(range(count), range(parts)):
        inputs, parameters = inputs_of(reader, step + 50 * part, type(reference)), dict(reference.named_parameters())
        if way == "half_precision":
            inputs, parameters = inputs.float(), {name: one.float() for name, one in parameters.items()}
        found = functional_call(reference, parameters, (inputs, USED[branches](reader)))
        found = found.float() if way == "cast_outputs" else found
        ((found - 1).square().mean() * weight_of(reader, part, weighed) / count).backward()


def rank_trains_as_one(way, branches="both", scaler=False, weighed=False, keeps=False, method=False):
    """The largest difference between this rank's parameters and those of one process with all batches. ``weighed``:
    batches weigh differently on islands, and in the two passes of a step. ``keeps``: there are two, and parameters stay
    whole between them. ``method``: one of the model is called."""
    torch.manual_seed(3)
    model = (Layers if way in LAYERED else Net)().double()
    reference = copy.deepcopy(model)
    WAYS[way](model)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        other.requires_grad_(mine.requires_grad)
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-2) for one in (model, reference)]
    if weighed:
        model.with_bagua([optimizers[0]], GradientAllReduceAlgorithm()).bagua_ddp.close()  # and it weighs nothing more
    model.with_bagua([optimizers[0]], GradientAllReduceAlgorithm())
    scale = torch.amp.GradScaler("cpu", init_scale=64.0) if scaler else None
    (count, mine), parts = readers(way), 2 if weighed or keeps else 1
    if method:
        register_fsdp_forward_method(model, "outputs")
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        in_one_process(reference, way, branches, step, count, parts, weighed)
        for part in range(parts):
            if parts > 1:
                current().weigh_batch(weight_of(mine, part, weighed))
                model.set_requires_gradient_sync(part == 1)
            if keeps:
                model.set_reshard_after_backward(part == 1)
            loss = loss_of(
                model.outputs if method else model,
                inputs_of(mine, step + 50 * part, type(reference)),
                USED[branches](mine),
            )
            with model.bagua_ddp.no_sync() if part < parts - 1 else contextlib.nullcontext():
                (loss if scale is None else scale.scale(loss * (math.inf if step == 2 and mine == 0 else 1))).backward()
        if scale is None:
            optimizers[0].step()
        else:
            scale.step(optimizers[0])
            scale.update()
        if scale is None or step != 2:  # a gradient that is infinite on one rank leaves the step out on all
            optimizers[1].step()
    assert method or model.bagua_ddp.bagua_train_step_counter == STEPS * parts, "each pass is one step"
    found = zip(whole_parameters(model), reference.parameters(), strict=True)
    error = max((one - other).abs().max().item() for one, other in found)
    model.bagua_ddp.close()
    current().weigh_batch(1.0)
    return error


def island_of(pools, ranks, of=2):
    return pools(list(range(ranks)), environment={VARIABLE: str(of)})


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("plain", {}),
        ("plain", {"branches": "by island"}),
        ("plain", {"branches": "one island"}),
        ("one_unit", {"scaler": True}),
        ("plain", {"weighed": True}),
        ("plain", {"weighed": True, "method": True}),
        ("plain", {"keeps": True}),
        ("frozen", {}),
        ("kept", {}),
        ("ignored", {"branches": "one rank"}),
        ("half_precision", {}),
        ("offloaded", {}),
        ("inner_alone", {}),
        ("cast_outputs", {}),
        ("layers_alone", {}),
        ("tensors_alone", {}),
        ("sequences", {}),
    ],
    ids=str,
)
def test_trains_as_one_process(pools, way, options):
    found = island_of(pools, 4).run(rank_trains_as_one, way=way, **options)
    assert max(found) < 1e-9, found


@pytest.mark.parametrize(("way", "keeps"), [("hybrid", False), ("inner_alone", False), ("both", False), ("both", True)])
def test_meshes_of_two_dimensions(pools, way, keeps):
    found = island_of(pools, 8, 4).run(rank_trains_as_one, way=way, keeps=keeps)
    assert max(found) < 1e-9, found


def rank_begins_alike(way):
    """All parameters as this rank has them, with other random numbers on each rank."""
    torch.manual_seed(bagua.get_rank())
    model = Net().double()
    WAYS[way](model)
    model.with_bagua([torch.optim.SGD(model.parameters(), lr=0.1)], GradientAllReduceAlgorithm())
    found = whole_parameters(model)
    model.bagua_ddp.close()
    return found


@pytest.mark.parametrize("way", ["hybrid", "inner_alone"])
def test_copies_inside_an_island_begin_alike(pools, way):
    first, *others = island_of(pools, 8, 4).run(rank_begins_alike, way=way)
    assert all(torch.equal(mine, one) for other in others for mine, one in zip(first, other, strict=True))


def rank_thaws(ignored):
    """The words of the error at the first pass after a layer was thawed."""
    model = Net().double()
    model.first.requires_grad_(False)
    shard_net(model, one_mesh(), ignored)
    model.with_bagua([torch.optim.SGD(model.parameters(), lr=0.1)], GradientAllReduceAlgorithm())
    try:
        inputs = inputs_of(0, 0, Net)
        loss_of(model, inputs).backward()
        model.first.requires_grad_(True)
        loss_of(model, inputs).backward()
    except BaguaError as error:
        return str(error)
    finally:
        model.bagua_ddp.close()
    return ""


@pytest.mark.parametrize("ignored", [[], ["first"]], ids=["a part", "a whole one"])
def test_a_layer_that_is_thawed_is_refused(pools, ignored):
    found = island_of(pools, 4).run(rank_thaws, ignored=ignored)
    assert len(set(found)) == 1 and "Parameter first.weight is trained now" in found[0], found


def rank_sends_few_bits():
    """Returns this rank's copies of the parameters that tensor parallelism copies."""
    torch.manual_seed(3)
    model = Layers()
    tensor_parallel(model, one_mesh(), sequences=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm(codec="int4"))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, inputs_of(bagua.get_island(), step, Layers).float()).backward()
        optimizer.step()
    model.bagua_ddp.close()
    copied = [one for one in model.parameters() if all(isinstance(kind, Replicate) for kind in one.placements)]
    assert copied
    return [one.to_local().detach().clone() for one in copied]


def test_few_bits_of_what_tensor_parallelism_copies_are_the_same_on_all_ranks(pools):
    """A bucket with a part beside them would be another one on each rank of the island."""
    first, *others = pools([0, 1], [2, 3], environment={VARIABLE: "2"}).run(rank_sends_few_bits)
    assert all(torch.equal(mine, one) for other in others for mine, one in zip(first, other, strict=True))
