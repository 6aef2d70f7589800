"""DDP over backend "bagua" with plans of ours: ``bagua.ddp_hook`` and BAGUA_ALGORITHM. What can't be is an error on
every rank."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError, ConfigError

TWO_HOSTS = [[0], [1]]
CHOICES = {
    "gradient_allreduce": {},
    "bytegrad": {},
    "power_sgd": {"rank": 2},
    "power_sgd_later": {"rank": 2, "start_after": 2},
    "top_k": {"density": 0.2},
    "combine": {"codec": "int4"},
}


def begin(folder, backend="bagua"):
    import bagua.c10d  # noqa: F401 - before torch 2.5 nothing else would register it

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    return rank


class Layers(nn.Module):
    """[*, 24] -> [*, 24]. Names of parameters are those that a hook gives them: numbers.

    ``order``: in which layers are applied; they are registered in the order of their numbers. Gradients come from the
    last one on."""

    def __init__(self, order):
        super().__init__()
        torch.manual_seed(4)
        self.order = order
        for layer in range(len(order)):
            weight = nn.Parameter(torch.randn(24, 24) / 5)
            self.register_parameter(str(layer), weight)

    def forward(self, x):
        weights = list(self.parameters())
        for layer in self.order:
            x = torch.tanh(x @ weights[layer])
        return x


def train(model, optimizer, steps=5):
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(8, 24, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs.flip(1)).square().mean().backward()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


def in_ddp(hook, order, **options):
    model = DistributedDataParallel(Layers(order), **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.5))


def with_bagua(name, order):
    model = Layers(order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    algorithm = bagua.algorithms.Algorithm.init(name.removesuffix("_later"), **CHOICES[name])
    model.with_bagua([optimizer], algorithm)
    return train(model, optimizer)


def check_replicas(parameters):
    for one in parameters:
        others = [torch.empty_like(one) for _ in range(dist.get_world_size())]
        dist.all_gather(others, one)
        assert torch.equal(others[0], others[1])


def rank_hooks(folder):
    begin(folder)
    straight = [2, 1, 0]
    exact = in_ddp(None, straight)
    for name, arguments in CHOICES.items():
        found = in_ddp(bagua.ddp_hook(name.removesuffix("_later"), **arguments), straight)
        check_replicas(found)
        for ours, theirs in zip(found, with_bagua(name, straight), strict=True):
            assert torch.equal(ours, theirs), name
        alike = all(torch.equal(ours, theirs) for ours, theirs in zip(found, exact, strict=True))
        assert alike == (name == "gradient_allreduce"), name


def test_a_hook_gives_what_a_wrapped_model_gives(ranks, tmp_path):
    """Bit by bit, for each algorithm, between two hosts."""
    ranks.run(rank_hooks, hosts=TWO_HOSTS, folder=str(tmp_path))


def rank_buckets_made_anew(folder):
    """Gradients come in another order than that of registration, so DDP has other buckets from the second step on."""
    begin(folder)
    turned = [2, 0, 3, 1]
    for name in ("gradient_allreduce", "power_sgd", "power_sgd_later"):
        hook = bagua.ddp_hook(name.removesuffix("_later"), **CHOICES[name])
        found = in_ddp(hook, turned, bucket_cap_mb=0.003)
        for ours, theirs in zip(found, with_bagua(name, turned), strict=True):
            assert torch.equal(ours, theirs), name
    check_replicas(in_ddp(bagua.ddp_hook("top_k", density=0.1), turned, bucket_cap_mb=0.003))
    found = in_ddp(bagua.ddp_hook("bytegrad"), turned, bucket_cap_mb=0.003, gradient_as_bucket_view=True)
    check_replicas(found)
    unused = in_ddp(bagua.ddp_hook("power_sgd"), [0, 0, 2], find_unused_parameters=True)
    check_replicas(unused)


def test_state_outlives_buckets_that_ddp_makes_anew(ranks, tmp_path):
    ranks.run(rank_buckets_made_anew, hosts=TWO_HOSTS, folder=str(tmp_path))


def rank_variable(folder):
    begin(folder)
    found = in_ddp(None, [0, 1, 2])
    check_replicas(found)
    return found


def test_the_variable_chooses_without_touching_code(ranks, tmp_path):
    (tmp_path / "plain").mkdir()
    plain = ranks.run(rank_variable, hosts=TWO_HOSTS, folder=str(tmp_path / "plain"))[0]
    ranks.close()
    (tmp_path / "encoded").mkdir()
    variable = {"BAGUA_ALGORITHM": "bytegrad"}
    encoded = ranks.run(rank_variable, hosts=TWO_HOSTS, environment=variable, folder=str(tmp_path / "encoded"))[0]
    for one, other in zip(plain, encoded, strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)


def check_refusals():
    """Algorithms that have no place in DDP, and words that name none."""
    for text in ("local_sgd:interval=4", "decentralized", "qadam", "one_bit_adam", "async", "diloco:interval=4"):
        os.environ["BAGUA_ALGORITHM"] = text
        with pytest.raises(ConfigError, match=r"BAGUA_ALGORITHM is .*with_bagua\(\[optimizer\], algorithm\)"):
            DistributedDataParallel(Layers([0]))
    os.environ["BAGUA_ALGORITHM"] = "bytegrad"
    model = DistributedDataParallel(Layers([0]))
    with pytest.raises(ConfigError, match=r"join\(\) of DistributedDataParallel"), model.join():
        pass
    with pytest.raises(RuntimeError, match="only be called once"):
        model.register_comm_hook(None, bagua.ddp_hook("top_k"))
    os.environ["BAGUA_ALGORITHM"] = "bytgrad"
    with pytest.raises(ConfigError, match="bytgrad"):
        DistributedDataParallel(Layers([0]))
    del os.environ["BAGUA_ALGORITHM"]
    with pytest.raises(ConfigError, match="exchanges weights"):
        bagua.ddp_hook("local_sgd", interval=2)
    with pytest.raises(TypeError, match="no argument 'rnak'"):
        bagua.ddp_hook("power_sgd", rnak=8)


def check_changed_model():
    """A hook with state goes on with another model. Ranks choose different algorithms."""
    hook = bagua.ddp_hook("power_sgd", rank=2)
    in_ddp(hook, [0, 1])
    with pytest.raises(BaguaError, match="parameters of this DistributedDataParallel model were not there"):
        in_ddp(hook, [0, 1, 2])
    with pytest.raises(BaguaError, match="different algorithms"):
        in_ddp(bagua.ddp_hook("power_sgd", rank=2 + dist.get_rank()), [0, 1])
    again = bagua.ddp_hook("bytegrad")  # which keeps nothing
    in_ddp(again, [0, 1])
    in_ddp(again, [0, 1, 2])


def check_mixed():
    """with_bagua and DDP on one model."""
    model = Layers([0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = DistributedDataParallel(model)
    for one in (model, wrapped, nn.Sequential(model)):
        with pytest.raises(BaguaError, match="is in a DistributedDataParallel"):
            one.with_bagua([optimizer])
    model = Layers([0])
    model.with_bagua([torch.optim.SGD(model.parameters(), lr=0.1)])
    for one in (model, nn.Sequential(nn.Linear(1, 1), model)):
        with pytest.raises(BaguaError, match=r"was wrapped with with_bagua\(\)"):
            DistributedDataParallel(one)
    bagua.barrier()


REFUSALS = {"algorithms": check_refusals, "a model that changes": check_changed_model, "two wrappers": check_mixed}


def rank_refusals(folder):
    """Each of them is an error on every rank, and leaves the ranks in step."""
    begin(folder)
    for name, check in REFUSALS.items():
        check()
        dist.barrier()
        print(f"passed {name}", flush=True)


def test_what_can_not_be_is_refused_on_all_ranks(ranks, tmp_path):
    ranks.run(rank_refusals, 2, folder=str(tmp_path))


def rank_with_a_backend_for_each_device(folder, backend):
    """Whether the chosen algorithm is in use. One that has no place in DDP is refused there, and nowhere else."""
    begin(folder, backend)
    found = in_ddp(None, [0, 1, 2])
    del os.environ["BAGUA_ALGORITHM"]
    exact = all(torch.equal(*pair) for pair in zip(found, in_ddp(None, [0, 1, 2]), strict=True))
    os.environ["BAGUA_ALGORITHM"] = "local_sgd:interval=4"
    try:
        DistributedDataParallel(Layers([0]))
    except ConfigError:
        assert not exact
        return True
    assert exact
    return False


@pytest.mark.parametrize(("backend", "ours"), [("cpu:bagua,cuda:gloo", True), ("cpu:gloo,cuda:bagua", False)])
def test_the_variable_counts_where_the_backend_carries_the_parameters(ranks, tmp_path, backend, ours):
    environment = {"BAGUA_ALGORITHM": "bytegrad"}
    found = ranks.run(
        rank_with_a_backend_for_each_device,
        hosts=TWO_HOSTS,
        environment=environment,
        folder=str(tmp_path),
        backend=backend,
    )
    assert found == [ours, ours]
    assert all(("BAGUA_ALGORITHM has no effect" in rank.output) != ours for rank in ranks.started)


def rank_shares_a_session(folder):
    """The library began first, and was told to leave torch.distributed alone."""
    bagua.init_process_group()
    assert not dist.is_initialized()
    rank = begin(folder)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    bagua.allreduce_inplace(tensor)
    assert tensor.tolist() == [4.0] * 3 and bagua.get_rank() == rank
    with pytest.raises(BaguaError, match="called twice"):
        bagua.init_process_group()
    with pytest.raises(ValueError, match="twice"):
        begin(folder)
    dist.destroy_process_group()
    bagua.allreduce_inplace(tensor)  # the session is the program's own
    assert tensor.tolist() == [8.0] * 3
    bagua.destroy_process_group()


def test_the_library_and_torch_share_a_session(ranks, tmp_path):
    ranks.run(rank_shares_a_session, 2, environment={"BAGUA_TORCH_DISTRIBUTED": "0"}, folder=str(tmp_path))


def rank_hook_in_elastic_job(folder):
    begin(folder)
    with pytest.raises(ConfigError, match="elastic job"):
        in_ddp(bagua.ddp_hook("bytegrad"), [0])


def test_hooks_are_refused_in_elastic_jobs(ranks, tmp_path):
    ranks.run(rank_hook_in_elastic_job, 2, elastic=True, folder=str(tmp_path))
