"""MoE on several ranks against the same layer on one process that has all experts."""

import copy
import itertools
import pickle

import pytest
import torch
from rig.ranks import placing
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError, CommunicationError, ConfigError
from bagua.torch_api.comm.communicators import communicator_of
from bagua.torch_api.comm.shared_rows import SharedRows
from bagua.torch_api.job.session import current

WIDTH = 6
CLOSE = 1e-5


def expert(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, WIDTH))


def layers(local, **options):
    """The layer, and one with all experts here. Each expert has weights of its own."""
    me, n = bagua.get_rank(), bagua.get_world_size()
    torch.manual_seed(1)
    layer = bagua.moe.MoE(WIDTH, expert(), local, **options)
    alone = bagua.communication.new_group([me])
    whole = bagua.moe.MoE(WIDTH, expert(), n * local, process_group=alone, **options)
    assert layer.bagua_moe.world_size == n
    whole.bagua_moe.gate.load_state_dict(layer.bagua_moe.gate.state_dict())
    for number in range(n * local):
        weights = expert(10 + number).state_dict()
        whole.bagua_moe.experts.bagua_experts[number].load_state_dict(weights)
        if number // local == me:
            layer.bagua_moe.experts.bagua_experts[number % local].load_state_dict(weights)
    return layer, whole


def batch(rank, tokens):
    """Inputs, weights of the outputs in the loss, used tokens."""
    generator = torch.Generator().manual_seed(rank)
    inputs, weights = torch.randn(2, tokens, WIDTH, generator=generator)
    return inputs.view(tokens, 1, WIDTH), weights.view(tokens, 1, WIDTH), torch.arange(tokens) % 3 != 1


def near(found, wanted, what):
    assert found is not None and wanted is not None, what
    limit = CLOSE * max(1e-3, wanted.detach().abs().max().item() if wanted.numel() else 0.0)
    torch.testing.assert_close(found, wanted, atol=limit, rtol=0.0, msg=lambda text: f"{what}: {text}")


def compare(local, sizes, used=False, **options):
    what = f"{local} {sizes} {used} {options}"
    me, n = bagua.get_rank(), bagua.get_world_size()
    layer, whole = layers(local, **options)
    if options.get("eval_capacity_factor"):
        layer.eval(), whole.eval()
    pairs = []
    for rank in range(n):
        inputs, weights, mask = batch(rank, sizes[rank])
        for model in (whole, layer)[: 1 + (rank == me)]:
            mine = inputs.clone().requires_grad_()
            torch.manual_seed(rank)
            found, loss, counts = model(mine, mask if used else None)
            ((found * weights).sum() + 0.1 * loss).backward()
            pairs.append((rank, mine.grad, found, loss, counts))
    for one, other in itertools.pairwise(pairs):
        if one[0] == other[0]:
            for name, wanted, found in zip(("gradient", "output", "loss"), one[1:4], other[1:4], strict=True):
                near(found, wanted, f"{what} {name}")
            assert one[4].tolist() == other[4].tolist() and one[4].dtype == torch.int64
    scale = 1.0 / n if options.get("average", True) else 1.0
    gate, all_experts = whole.bagua_moe.gate, whole.bagua_moe.experts.bagua_experts
    mine = layer.bagua_moe.gate.wg.weight.grad.clone()
    bagua.allreduce_inplace(mine)
    near(mine, gate.wg.weight.grad, f"{what} gate")
    for number, one in enumerate(layer.bagua_moe.experts.bagua_experts):
        for name, parameter in one.named_parameters():
            wanted = all_experts[me * local + number].get_parameter(name).grad * scale
            near(parameter.grad, wanted, f"{what} expert {number} {name}")


def rank_compares():
    n = bagua.get_world_size()
    sizes = [23, 9, 31, 14][:n]
    for k in (1, 2):
        compare(1, sizes, k=k, capacity_factor=8.0)
        compare(2, sizes, k=k, capacity_factor=0.5)
        compare(1, sizes, k=k, min_capacity=1, capacity_factor=0.3, average=False)
        compare(3, sizes, k=k, used=True, eval_capacity_factor=0.7)
        compare(1, [0, *sizes[1:]], k=k)
        compare(2, sizes, k=k, noisy_gate_policy="Jitter")
    compare(1, [0] * n)
    compare(2, sizes, noisy_gate_policy="RSample", used=True)


@pytest.mark.parametrize(
    ("hosts", "device"),
    [pytest.param([[0, 1]], "cpu", marks=pytest.mark.full), ([[0, 1], [2]], "cpu"), ([[0], [1]], "fake")],
    ids=["2", "2+1", "fake"],
)
def test_equal_to_one_process(pools, hosts, device):
    pools(*hosts, environment=placing.environment(device, "staged")).run(rank_compares)


def rank_borrows():
    """Rows that ranks of one host write into each other's memory: only what was lent, and as long as it is."""
    me, session = bagua.get_rank(), current()
    private, lent = session.connection.alloc(4096), session.connection.alloc(4096, for_peers=True)
    ids = torch.zeros(2, 2, dtype=torch.int64)
    ids[me] = torch.tensor([private.id, lent.id])
    bagua.allreduce_inplace(ids)
    peer = 1 - me
    session.connection.borrow(peer, int(ids[peer, 1]))
    for rank, segment, words in ((peer, int(ids[peer, 0]), "has made no segment"), (7, 1, "not in the generation")):
        with pytest.raises(CommunicationError, match=words):
            session.connection.borrow(rank, segment)
    bagua.barrier()
    session.connection.free(lent.id)
    bagua.barrier()
    with pytest.raises(CommunicationError, match="or has freed it"):
        session.connection.borrow(peer, int(ids[peer, 1]))
    with pytest.raises(BaguaError, match=r"rank 0: float32, rank 1: float64"):
        SharedRows(session, communicator_of(None)).meet(torch.float64 if me == 1 else torch.float32)


def rank_repeats():
    """All tokens go to one rank, more than it has offered room for; and a graph is used twice."""
    layer = bagua.moe.MoE(WIDTH, nn.Linear(WIDTH, WIDTH), capacity_factor=100.0)
    with torch.no_grad():
        layer.bagua_moe.gate.wg.weight[1] = 0.0
        layer.bagua_moe.gate.wg.weight[0] = 1.0
    for tokens in (4, 300, 8):
        inputs = torch.rand(tokens, WIDTH, requires_grad=True)
        found, _, counts = layer(inputs)
        assert counts.tolist() == [tokens, 0]
        found.sum().backward(retain_graph=True)
        assert inputs.grad is not None
        once = inputs.grad.clone()
        found.sum().backward()
        torch.testing.assert_close(inputs.grad, 2 * once)


@pytest.mark.parametrize("function", [rank_borrows, rank_repeats])
def test_shared_memory(pools, function):
    pools([0, 1]).run(function)


class Net(nn.Module):
    def __init__(self, local):
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.moe = bagua.moe.MoE(WIDTH, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), local, k=2)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, inputs):
        found, loss, _ = self.moe(self.first(inputs).relu())
        return self.last(found), loss


def everyones(tensor):
    found = tensor.new_empty(bagua.get_world_size(), *tensor.shape)
    bagua.allgather(tensor.detach(), found)
    return found


def rank_trains():
    """Experts go their own ways in a wrapped model, whatever it was copied from or moved to."""
    me = bagua.get_rank()
    torch.manual_seed(me)
    model = copy.deepcopy(Net(2)).double().float()
    model = pickle.loads(pickle.dumps(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.randn(8, 3))[0].sum().backward()
    optimizer.step()  # state that is there before the model is wrapped
    of_experts = {name: one for name, one in model.state_dict(keep_vars=True).items() if ".experts." in name}
    before = {name: one.detach().clone() for name, one in of_experts.items()}
    weight = model.get_parameter("moe.bagua_moe.experts.bagua_experts.0.0.weight")
    momentum = optimizer.state[weight]["exp_avg"].clone()
    model.with_bagua([optimizer])
    assert all(bagua.moe.is_moe_param(one) for one in of_experts.values()) and len(of_experts) == 14
    assert all(torch.equal(one, before[name]) for name, one in of_experts.items())
    assert torch.equal(optimizer.state[weight]["exp_avg"], momentum)
    assert not any(".experts." in name for name, _ in model.bagua_ddp.bagua_build_params())
    losses = []
    for step in range(30):
        inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(step * 10 + me))
        optimizer.zero_grad()
        found, loss = model(inputs)
        error = (found - inputs.sum(1, keepdim=True)).square().mean()
        (error + 0.01 * loss).backward()
        optimizer.step()
        losses.append(error.item())
    assert sum(losses[-5:]) < sum(losses[:5])
    for name, one in model.named_parameters():
        rows = everyones(one)
        assert bool((rows == rows[0]).all()) != (".experts." in name), name


def test_training(pools):
    pools([0, 1], [2]).run(rank_trains)


def rank_errs():
    me, n = bagua.get_rank(), bagua.get_world_size()
    for call, words in (
        (lambda: bagua.moe.MoE(4, nn.Identity(), num_experts=n + 1), "4 experts can't be shared equally by 3"),
        (lambda: bagua.moe.MoE(4, nn.Identity(), 0), "at least one expert"),
        (lambda: bagua.moe.MoE(4, nn.Identity(), k=3), "to 1 expert, or to 2"),
        (lambda: bagua.moe.MoE(4, nn.Identity(), noisy_gate_policy="loud"), "choose None, 'Jitter' or 'RSample'"),
        (lambda: bagua.moe.MoE(4, nn.Identity(), capacity_factor=0.0), "factors must be positive"),
        (lambda: bagua.moe.MoE(4, nn.Identity())(torch.ones(2, 3)), "last dimension must be 4"),
        (lambda: bagua.moe.MoE(4, nn.Identity())(torch.ones(2, 4), torch.ones(3)), "3 elements: there are 2 tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    layer = bagua.moe.MoE(4, nn.Identity(), 1 + (me == 1))
    layer.bagua_moe.gate.wg = nn.Linear(4, n * layer.bagua_moe.num_local_experts)
    with pytest.raises(BaguaError, match=r"MoE layers differ.*rank 1: \[2, 4, 1\]"):
        layer(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"made \[\d+, 3\] of \[\d+, 4\]"):
        bagua.moe.MoE(4, nn.Linear(4, 3))(torch.ones(2, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert bagua.moe.MoE(4, nn.Linear(4, 4))(torch.ones(2, 4))[0].dtype == torch.bfloat16
    other = bagua.communication.new_group([0])
    if me:
        with pytest.raises(ConfigError, match="no member of the layer's process group"):
            bagua.moe.MoE(4, nn.Identity(), process_group=other)(torch.ones(2, 4))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        layer = bagua.moe.MoE(4, nn.Linear(4, 4), k=2).to(dtype)
        inputs = torch.randn(5, 4).to(dtype).requires_grad_()
        layer(inputs)[0].sum().backward()
        assert inputs.grad is not None and inputs.grad.dtype == dtype and bool(inputs.grad.isfinite().all())
    bagua.barrier()


def test_mistakes_and_dtypes(pools):
    pools([0, 1], [2]).run(rank_errs)


def rank_is_elastic():
    layer = bagua.moe.MoE(4, nn.Identity())
    bagua.init_process_group()
    for call in (lambda: layer(torch.ones(2, 4)), lambda: bagua.moe.MoE(4, nn.Identity())):
        with pytest.raises(ConfigError, match="can't be used in an elastic job"):
            call()


def test_not_in_an_elastic_job(ranks):
    ranks.survive(rank_is_elastic, (), 1)


def test_without_a_job():
    layer = bagua.moe.MoE(WIDTH, expert(), 4, min_capacity=0)
    names = list(layer.state_dict())
    assert names[0] == "bagua_moe.gate.wg.weight" and names[1] == "bagua_moe.experts.bagua_experts.0.0.weight"
    inputs = torch.randn(20, WIDTH, requires_grad=True)
    found, loss, counts = layer(inputs)
    (found.sum() + loss).backward()
    assert counts.sum() == 20 and inputs.grad is not None
    rows = (found != 0).any(1)
    assert rows.sum() <= sum(min(5, count) for count in counts.tolist())  # no more than an expert's capacity
    layer.eval()
    assert torch.equal(layer(inputs)[0], layer(inputs)[0])
