"""``bagua.fsdp.compress``: FSDP2 over backend "bagua" between hosts, beside FSDP2 over Gloo in the same program."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from rig.torch_parts import fully_shard
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import bagua.torch_api as bagua
from bagua import fsdp
from bagua.algorithms.codec import Codec
from bagua.base.errors import ConfigError

HAS_SEAMS = hasattr(getattr(torch.distributed.fsdp, "FSDPModule", None), "set_custom_reduce_scatter")
pytestmark = pytest.mark.skipif(fully_shard is None or not HAS_SEAMS, reason="FSDP2 of this torch takes no collectives")
TWO_HOSTS, TWO_BY_TWO, THREE_HOSTS = [[0], [1]], [[0, 1], [2, 3]], [[0], [1], [2]]
WIDTH = 48


def begin(folder):
    import bagua.c10d  # noqa: F401 - before torch 2.5 nothing else would register it

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("bagua", init_method=f"file://{folder}/store", rank=rank, world_size=size)


def network(dtype=torch.float32):
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, 67), nn.Tanh(), nn.Linear(67, 31), nn.Tanh(), nn.Linear(31, 7)]
    return nn.Sequential(*layers).to(dtype)


def shard(model, group=None, mesh=None, **options):
    mesh = mesh or DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss_of(model, step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    inputs = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64).to(next(model.parameters()).dtype)
    return (model(inputs) - inputs[:, :7].sin()).square().mean()


def train(model, optimizer, steps, first=0):
    """Losses of this rank."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)


def whole(model):
    return [one.full_tensor().detach().clone() for one in model.parameters()]


def used(model):
    """Parameters that this rank computes with, in a forward pass."""
    found = []

    def note(layer, *_):
        found.extend(one.detach().clone() for one in layer.parameters())

    hooks = [layer.register_forward_pre_hook(note) for layer in model if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        loss_of(model, 0)
    for hook in hooks:
        hook.remove()
    model.reshard()
    return found


def check_alike(tensors):
    """All ranks have the same bits."""
    for one in tensors:
        found = [torch.empty_like(one) for _ in range(dist.get_world_size())]
        dist.all_gather(found, one)
        assert all(torch.equal(found[0], other) for other in found)


def equal(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def away(some, others):
    """Relative distance between two lists of tensors."""
    some, others = (torch.cat([one.flatten() for one in tensors]) for tensors in (some, others))
    return float((some - others).norm() / others.norm())


def check_learns(pieces=0, **arguments):
    """Trains with few bits and over Gloo, from the same weights."""
    gloo, ours = dist.new_group(backend="gloo"), network()
    theirs, start = shard(copy.deepcopy(ours), gloo), [one.detach().clone() for one in ours.parameters()]
    fsdp.PIECE = pieces or fsdp.PIECE
    fsdp.compress(shard(ours), **arguments)
    if arguments.get("gather", "int4") == "int4":
        assert equal(used(ours), start)  # weights travel whole first
    losses, expected = train(ours, sgd(ours), 30), train(theirs, sgd(theirs), 30)
    check_alike(used(ours))
    assert 0 < away(used(ours), whole(ours)) < (0.01 if arguments.get("reduce", "int4") else 0.15)  # 4 bits of weights
    assert losses[-1] < 0.5 * losses[0]
    check_close(losses, expected)


def check_close(losses, expected):
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.05, atol=0.01)


CASES = (
    {},
    {"rotate": True, "pieces": 256},  # several pieces, the last of them short
    {"gather": "minmax8", "reduce": "minmax8"},  # neither holds anything
    {"gather": Codec("int4", error_feedback=False), "reduce": None},
)


def rank_learns(folder):
    begin(folder)
    for arguments in CASES:
        print(f"case {arguments}", flush=True)
        check_learns(**arguments)


@pytest.mark.parametrize(
    "hosts",
    [pytest.param(TWO_HOSTS, marks=pytest.mark.full), TWO_BY_TWO, pytest.param(THREE_HOSTS, marks=pytest.mark.full)],
    ids=["2 x 1", "2 x 2", "3 x 1"],
)
def test_ranks_stay_alike_and_learn_as_over_gloo(ranks, tmp_path, hosts):
    ranks.run(rank_learns, hosts=hosts, folder=str(tmp_path))


def check_off():
    """Without codecs, and inside a host, results have the bits that they have over Gloo."""
    ours, theirs = network(), shard(network(), dist.new_group(backend="gloo"))
    fsdp.compress(shard(ours), gather=None, reduce=None)
    assert train(ours, sgd(ours), 5) == train(theirs, sgd(theirs), 5)
    assert equal(whole(ours), whole(theirs))


class Fixed(nn.Module):
    """Its gradient is the same in every pass, with one element of 200 much larger than the others."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 400))
        random = torch.Generator().manual_seed(dist.get_rank())
        self.gradient = torch.randn(2, 400, generator=random)
        self.gradient[:, ::200] *= 20

    def forward(self):
        return (self.weight * self.gradient).sum()


def error_after(steps, **arguments):
    """Error of the sum of gradients over so many steps, and what the messages of one step can lose of an element."""
    model = Fixed()
    fsdp.compress(fully_shard(model, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu")), None, **arguments)
    exact, largest = model.gradient.clone(), model.gradient.abs().max()
    dist.all_reduce(exact, dist.ReduceOp.AVG)
    dist.all_reduce(largest, dist.ReduceOp.AVG)
    for _ in range(steps):
        model().backward()  # gradients add up
    return (model.weight.grad.full_tensor() - steps * exact).abs(), float(largest) / 7


def check_feedback():
    """The next messages carry what one has lost: the error of the sum stays that of one message. Without feedback it
    grows with the steps. A rotation makes it smaller where few elements are large."""
    once, most = error_after(1)
    assert 0 < error_after(10)[0].max() < most
    assert error_after(10, reduce=Codec("int4", error_feedback=False))[0].max() > most
    turned, _ = error_after(1, rotate=True)
    assert 0 < turned.norm() < 0.8 * once.norm()
    assert error_after(10, rotate=True)[0].max() < most


def check_unchanged():
    """Gathers of weights that nobody has changed send nothing; of a frozen unit none does."""
    model = network()
    for one in model[0].parameters():
        one.requires_grad_(False)
    state = fsdp.compress(shard(model))
    train(model, sgd(model), 3)
    before = {name: copy.deepcopy(held) for name, held in state.state_dict().items()}
    assert set(before["0"]) == {"gather"}
    # The second exchange of a difference would leave less of it.
    loss_of(model, 9).backward()
    with torch.no_grad():
        loss_of(model, 9)
    used_before = used(model)
    loss_of(model, 9).backward()
    assert equal(used(model), used_before)
    assert torch.equal(state.state_dict()["0"]["gather"]["weights"], before["0"]["gather"]["weights"])


def check_replaced():
    """Weights that are loaded travel whole; so do those after NaN. Training goes on when that was under
    ``inference_mode``."""
    model = network()
    fsdp.compress(shard(model))
    train(model, sgd(model), 3)
    for value in (None, float("nan"), None):
        with torch.no_grad():
            for one, first in zip(model.parameters(), network().parameters(), strict=True):
                rows = (3 * first).chunk(dist.get_world_size())
                mine = rows[dist.get_rank()] if dist.get_rank() < len(rows) else first[:0]
                one.to_local().copy_(mine if value is None else torch.full_like(mine, value))
        with torch.inference_mode():
            found = used(model)
        if value is None:
            assert equal(found, [3 * one.detach() for one in network().parameters()])
    train(model, sgd(model), 3)
    check_alike(used(model))


def check_resumed():
    """With its state training goes on with the same bits; without it nearly so."""
    model = network()
    optimizer, state = sgd(model := shard(model)), fsdp.compress(model)
    train(model, optimizer, 10)
    saved, then = copy.deepcopy((model.state_dict(), optimizer.state_dict(), state.state_dict())), whole(model)
    train(model, optimizer, 5, first=10)
    for keeps in (True, False):
        other = shard(network())
        its, restored = sgd(other), fsdp.compress(other)
        other.load_state_dict(saved[0])
        its.load_state_dict(saved[1])
        if keeps:
            restored.load_state_dict(saved[2])
        train(other, its, 5, first=10)
        assert equal(whole(other), whole(model)) == keeps
        assert away(whole(other), whole(model)) < 0.5 * away(then, whole(model))
    with pytest.raises(ConfigError, match=r"one of units \['another'\], and this model has"):
        restored.load_state_dict({"another": {}})


def check_options():
    """Other dtypes, and ways to shard, each beside the same without few bits."""
    half = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    cases = [{"reshard_after_forward": False}, {"mp_policy": half}, {"dtype": torch.float64}, {"default": True}]
    if dist.get_world_size() == 4:
        cases.append({"reshard_after_forward": 2})
        # Each of two replicas has a rank on each host.
        cases.append({"mesh": DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicas", "shards"))})
    for options in cases:
        print(f"case {options}", flush=True)
        dtype = options.pop("dtype", torch.float32)
        torch.set_default_dtype(torch.float64 if options.pop("default", False) else torch.float32)
        model, theirs = network(dtype), shard(network(dtype), **options)
        fsdp.compress(shard(model, **options))
        check_close(train(model, sgd(model), 20), train(theirs, sgd(theirs), 20))
        check_alike(used(model))
    torch.set_default_dtype(torch.float32)


def check_interrupted():
    """A gather that ended by an exception leaves no difference behind that some hosts have alone."""
    model = network()
    state = fsdp.compress(shard(model))
    train(model, sgd(model), 3)

    def cut(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp._Encoded, "_pieces", cut)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            loss_of(model, 3)
    assert "gather" not in state.state_dict()["0"]


def check_turned_off():
    """None puts back what was, and losses of other ranks' numbers are left out."""
    model, theirs = network(), network()
    optimizer, its = sgd(model := shard(model)), sgd(theirs := shard(theirs))
    state = fsdp.compress(model)
    assert away(train_whole(model, optimizer, 0), train_whole(theirs, its, 0)) > 0
    foreign = copy.deepcopy(state.state_dict())
    for held in foreign.values():
        held["reduce"]["lost"] = torch.ones(3, held["reduce"]["lost"].size(1))
        held["gather"]["weights"] = held["gather"]["weights"].repeat(3, 1)
    state.load_state_dict(foreign)
    train(model, optimizer, 1, first=1)
    state.forget_gradients()
    assert all("reduce" not in held for held in state.state_dict().values())
    fsdp.compress(model, None, None)
    theirs.load_state_dict(model.state_dict())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert equal(train_whole(model, optimizer, 2), train_whole(theirs, its, 2))


def train_whole(model, optimizer, step):
    train(model, optimizer, 1, first=step)
    return whole(model)


class Branches(nn.Module):
    """One unit with layers of which a pass uses one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(8, 64), nn.Linear(8, 32)])

    def forward(self, inputs, layer):
        return self.layers[layer](inputs)


def check_other_parameters():
    """FSDP reduces those that have gradients in a pass. Sums of steps are as without few bits, but for one message."""
    found = []
    for few in (True, False):
        model = fully_shard(Branches(), mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
        if few:
            fsdp.compress(model, None)
        for layer in (1, 0, 0, 1):
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
            model(inputs, layer).square().mean().backward()
        found.append([one.grad.full_tensor() for one in model.parameters()])
    assert 0 < away(*found) < 0.1


def check_refused():
    world = dist.group.WORLD
    with pytest.raises(ConfigError, match=r"Sequential has no units of FSDP2: call .*fully_shard"):
        fsdp.compress(network())
    elsewhere = shard(network(), dist.new_group(backend="gloo"))
    fsdp.compress(elsewhere)
    with pytest.raises(ConfigError, match=r"Unit '0' is sharded over backend 'gloo' on device cpu"):
        loss_of(elsewhere, 0)
    model = shard(network())
    with pytest.raises(ValueError, match="There is no codec 'int8'"):
        fsdp.compress(model, "int8")
    with pytest.raises(ValueError, match="'topk' is too coarse for weights"):
        fsdp.compress(model, Codec("topk", error_feedback=False))
    fsdp.compress(model, "int4" if dist.get_rank() == 0 else "minmax8")
    with pytest.raises(ConfigError, match="Ranks 0 and 1 called compress"):
        loss_of(model, 0)
    mixed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double().requires_grad_(False))
    fsdp.compress(fully_shard(mixed, mesh=DeviceMesh.from_group(world, "cpu")))
    with pytest.raises(ConfigError, match=r"Unit '' has parameters of several dtypes"):
        mixed(torch.zeros(1, 8))


CHECKS = {
    "2 x 1": (TWO_HOSTS, (check_replaced, check_resumed, check_refused, check_off, check_feedback, check_unchanged)),
    "2 x 1, more": (TWO_HOSTS, (check_other_parameters, check_turned_off, check_interrupted)),
    "2 x 2": (TWO_BY_TWO, (check_feedback, check_resumed, check_options)),
}


def rank_checks(folder, layout):
    begin(folder)
    for check in CHECKS[layout][1]:
        check()
        dist.barrier()
        print(f"passed {check.__name__}", flush=True)


@pytest.mark.parametrize("layout", CHECKS)
def test_what_is_promised(ranks, tmp_path, layout):
    ranks.run(rank_checks, hosts=CHECKS[layout][0], folder=str(tmp_path), layout=layout)


def rank_islands():
    """Islands of two ranks on two hosts each; between them gradients are averaged as they are."""
    bagua.init_process_group()
    trained = []
    for backend in ("gloo", "bagua"):
        model = shard(network(), dist.new_group(backend=backend))
        if backend == "bagua":
            fsdp.compress(model)
        optimizer = sgd(model)
        model.with_bagua([optimizer], bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm())
        losses = train(model, optimizer, 20)
        trained.append((losses, whole(model)))
        check_alike(used(model))
    (expected, _), (losses, parameters) = trained
    check_close(losses, expected)
    return parameters


def test_islands_over_hosts(ranks):
    first, *others = ranks.run(rank_islands, hosts=[[0], [1], [2], [3]], environment={"BAGUA_ISLAND_SIZE": "2"})
    assert all(equal(first, other) for other in others)


def rank_uneven(folder):
    begin(folder)
    model = shard(network())
    fsdp.compress(model)
    with pytest.raises(ConfigError, match=r"lie on hosts \[0, 0, 1\]: .* equally many ranks"):
        loss_of(model, 0)
    dist.barrier()


def test_hosts_with_different_numbers_of_ranks_are_refused(ranks, tmp_path):
    ranks.run(rank_uneven, hosts=[[0, 1], [2]], folder=str(tmp_path))
