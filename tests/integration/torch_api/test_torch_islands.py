"""Islands: ranks of one hold a sharded copy of the model, and train as one process with the same batches."""

import contextlib
import functools
import os

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DistributedSampler
from training_scenarios.support import shard, whole_parameters

import bagua.torch_api as bagua
from bagua.base import replica_check
from bagua.base.algorithm_choice import NAMES
from bagua.base.errors import BaguaError, ConfigError
from bagua.base.islands import VARIABLE
from bagua.torch_api.algorithms.one_bit_adam import OneBitAdamOptimizer
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.algorithms.zero_one_adam import ZeroOneAdamOptimizer
from bagua.torch_api.comm.shards import AfterGather, IslandMeans
from bagua.torch_api.data_parallel.distributed import DistributedDataParallel
from bagua.torch_api.layers import functional

ISLANDS = {VARIABLE: "2"}
LAYOUTS = {
    "one host": ([0, 1, 2, 3],),
    "two hosts": ([0, 1], [2, 3]),
    "islands over hosts": ([0], [1], [2], [3]),
    "one over hosts, one on a host": ([0], [1], [2, 3]),
}
EXACT = (
    "gradient_allreduce",
    "local_sgd:interval=2",
    "diloco:interval=2",
    "streaming_diloco:interval=4,fragments=2,overlap=1",
    "no_loco:interval=2",
    "decentralized:hierarchical=false",
    "qadam",
    "one_bit_adam",
    "zero_one_adam",
)
"""float64 travels as it is, whatever the codec."""
LOSSY = ("bytegrad", "gradient_allreduce:codec=int4", "power_sgd", "top_k", "low_precision_decentralized")
REFUSED = ("async",)
OPTIMIZERS = {
    "qadam": functools.partial(QAdamOptimizer, warmup_steps=3),
    "one_bit_adam": functools.partial(OneBitAdamOptimizer, warmup_steps=3, floor=0.0, eps=0.1),
    "zero_one_adam": functools.partial(ZeroOneAdamOptimizer, var_freeze_step=3, floor=0.0, eps=0.1),
}
"""A floor follows from a rank's part of a parameter."""
STEPS, BATCH = 8, 4


def net(dtype=torch.float64):
    torch.manual_seed(5)
    layers = [nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 9), nn.Tanh(), nn.Linear(9, 1)]
    return nn.Sequential(*layers).to(dtype)


def batches(replicas, step, dtype=torch.float64):
    """The batches of all replicas in that step."""
    random = torch.Generator().manual_seed(step)
    return torch.randn(replicas, BATCH, 8, generator=random, dtype=torch.float64).to(dtype)


@contextlib.contextmanager
def algorithm(text):
    os.environ["BAGUA_ALGORITHM"] = text
    try:
        yield
    finally:
        del os.environ["BAGUA_ALGORITHM"]


def rank_trains(
    text,
    sharded=True,
    ignored=(),
    dtype="float64",
    passes=1,
    optimizer="Adam",
    differ=False,
    clip=0.0,
    layers=True,
    validates=False,
    derives=False,
):
    """Parameters afterwards, and digests of what this rank holds of them. Ranks that hold a replica together share its
    batch."""
    kind = getattr(torch, dtype)
    replicas = bagua.get_replica_count() if sharded else bagua.get_world_size()
    mine, share = bagua.get_island() if sharded else bagua.get_rank(), BATCH // bagua.get_island_size()
    begin = share * (bagua.get_rank() % bagua.get_island_size()) if sharded else 0
    model = net(kind)
    if differ:
        torch.manual_seed(bagua.get_island())
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    if sharded:
        shard(model, ignored, layers)
    made = (OPTIMIZERS.get(text) or getattr(torch.optim, optimizer))(model.parameters(), lr=1e-2)
    if not layers:  # whose parameters stay whole behind a forward pass alone
        model(torch.zeros(1, 7, dtype=kind))
    with algorithm(text):
        model.with_bagua([made])
    try:
        for step in range(STEPS):
            if validates and bagua.get_island() == 0:  # FSDP has whole parameters in place after it
                model.eval()
                model(torch.zeros(1, 7, dtype=kind))
                model.train()
            if derives and bagua.get_island() == 0:
                model.eval()
                inputs = torch.zeros(1, 7, dtype=kind, requires_grad=True)
                torch.autograd.grad(model(inputs).sum(), inputs)
                model.train()
            batch = batches(replicas, step, kind)[mine][begin : begin + share if sharded else None]
            made.zero_grad()
            for number, part in enumerate(batch.chunk(passes)):
                last = number == passes - 1
                if sharded and passes > 1:
                    model.set_requires_gradient_sync(last)
                with contextlib.nullcontext() if last else model.bagua_ddp.no_sync():
                    (model(part[:, :7]) - part[:, 7:]).square().mean().div(passes).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            made.step()
        found = whole_parameters(model)
        held = [one.to_local() if hasattr(one, "to_local") else one for one in model.parameters()]
        return found, [one.detach().clone() for one in held]
    finally:
        model.bagua_ddp.close()


def in_one_process(clip=0.0):
    """All batches of two replicas, with Adam, in this process."""
    model = net()
    made = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        batch = batches(2, step).flatten(0, 1)
        made.zero_grad()
        (model(batch[:, :7]) - batch[:, 7:]).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
    return [one.detach() for one in model.parameters()]


def assert_close(found, wanted, tolerance=1e-9):
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=tolerance)


def assert_alike(found):
    """Ranks 2 and 3, the second island, hold what ranks 0 and 1 do."""
    for rank in (2, 3):
        assert_close(found[rank][1], found[rank - 2][1], 0.0)


@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS)
def test_an_island_trains_as_one_process(pools, hosts):
    found = pools(*hosts, environment=ISLANDS).run(rank_trains, text="gradient_allreduce")
    assert_close(found[0][0], in_one_process())
    assert_alike(found)


def test_islands_begin_with_the_weights_of_the_first(pools):
    assert_alike(pools([0, 1, 2, 3], environment=ISLANDS).run(rank_trains, text="gradient_allreduce", differ=True))


@pytest.mark.parametrize(
    "options", [{"passes": 2}, {"clip": 0.1}, {"ignored": ["0"]}, {"ignored": ["0"], "passes": 2}], ids=str
)
def test_passes_that_accumulate_clipping_and_layers_that_are_not_sharded(pools, options):
    """A layer that FSDP leaves out has the mean over all ranks, as under DDP."""
    found = pools([0, 1, 2, 3], environment=ISLANDS).run(rank_trains, text="gradient_allreduce", **options)
    assert_close(found[3][0], in_one_process(options.get("clip", 0.0)))


@pytest.mark.parametrize("text", EXACT)
def test_an_algorithm_finds_what_it_finds_with_whole_replicas(pools, text):
    """Shards of two islands, and two ranks with a replica each."""
    islands = pools([0, 1], [2, 3], environment=ISLANDS).run(rank_trains, text=text, optimizer="SGD")
    replicas = pools([0], [1]).run(rank_trains, text=text, optimizer="SGD", sharded=False)
    for rank in range(4):
        assert_close(islands[rank][0], replicas[rank // 2][0])


@pytest.mark.parametrize("text", ["gradient_allreduce", "local_sgd:interval=2,warmup_steps=3"])
def test_a_model_that_is_one_unit(pools, text):
    """After a forward pass alone, and where a step begins, FSDP has whole parameters in the place of its parts."""
    islands = pools([0, 1], [2, 3], environment=ISLANDS).run(rank_trains, text=text, optimizer="SGD", layers=False)
    replicas = pools([0], [1]).run(rank_trains, text=text, optimizer="SGD", sharded=False)
    for rank in range(4):
        assert_close(islands[rank][0], replicas[rank // 2][0])


@pytest.mark.parametrize("text", ["local_sgd:interval=2,warmup_steps=3", "diloco:interval=2,warmup_steps=3"])
def test_an_algorithm_begins_anew_where_one_island_has_validated(pools, text):
    pool, found = pools([0, 1], [2, 3], environment=ISLANDS), []
    for validates in (False, True):
        found += pool.run(rank_trains, text=text, optimizer="SGD", layers=False, validates=validates)
    for rank in range(4):
        assert_close(found[rank + 4][0], found[rank][0], 0.0)


def test_a_derivative_that_one_island_takes_is_no_step(pools):
    pool, found, text = pools([0, 1], [2, 3], environment=ISLANDS), [], "power_sgd:start_after=3"
    for derives in (False, True):
        found += pool.run(rank_trains, text=text, optimizer="SGD", dtype="float32", derives=derives)
    for rank in range(4):
        assert_close(found[rank + 4][0], found[rank][0], 0.0)


def rank_uses_torchs_groups():
    """Sums over torch's world, and over a group of torch of this rank alone."""
    alone = [torch.distributed.new_group([rank]) for rank in range(2)][torch.distributed.get_rank()]
    one = torch.full((1,), 1.0 + bagua.get_rank())
    return [functional.all_reduce(one, group=group).item() for group in (torch.distributed.group.WORLD, alone)]


def test_groups_of_torch_are_of_the_island(pools):
    found = pools([0, 1], [2, 3], environment=ISLANDS).run(rank_uses_torchs_groups)
    assert found == [[3.0, 1.0], [3.0, 2.0], [7.0, 3.0], [7.0, 4.0]]


def rank_averages(weights):
    """Gradients of 1 and 2 with these weights, averaged, and both with the weight 6 afterwards."""
    layer = nn.Linear(3, 1)
    weight = weights[bagua.get_rank()]
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, weight * (1.0 + bagua.get_rank()))
    means = IslandMeans(list(layer.named_parameters()))
    means.finish(True, weight, lambda *_: None, lambda: None)
    return [one.grad * (6.0 / weight) for one in layer.parameters()]


@pytest.mark.parametrize("weights", [[1.0, 1.0], [2.0, 2.0], [1.0, 2.0]])
def test_mates_of_which_one_has_heard_of_a_loss_average_alike(pools, weights):
    for found in pools([0, 1], environment=ISLANDS).run(rank_averages, weights=weights):
        assert all(torch.equal(one, torch.full_like(one, 9.0)) for one in found)


def rank_shards_two_as_one():
    """A model whose layers are one unit comes to its end, also when methods of it were looked after."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard([model[0], model[2]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    seen = []
    hooks = [AfterGather(unit, seen.append) for unit in (model[0], model[2])]
    model(torch.zeros(1, 7, dtype=torch.float64))
    for hook in hooks:
        hook.remove()
    before = len(seen)
    model(torch.zeros(1, 7, dtype=torch.float64))
    return before, len(seen)


def test_units_that_are_sharded_as_one_are_left_as_they_were(pools):
    for before, after in pools([0, 1], environment=ISLANDS).run(rank_shards_two_as_one):
        assert before == after >= 2


def rank_copies_buffers():
    """The mean of a BatchNorm after a forward pass, which began with rank 0's on all ranks."""
    model = nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4)).double()
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped = DistributedDataParallel(model, broadcast_buffers=True, optimizers=[optimizer])
    try:
        model[1].running_mean.fill_(bagua.get_rank() + 1.0)
        model[1].eval()  # so the pass leaves them
        wrapped(torch.ones(2, 7, dtype=torch.float64)).sum().backward()
        return model[1].running_mean.tolist()
    finally:
        model.bagua_ddp.close()


def test_buffers_become_those_of_rank_0(pools):
    assert pools([0, 1, 2, 3], environment=ISLANDS).run(rank_copies_buffers) == [[1.0] * 4] * 4


def rank_registers():
    model = shard(net())
    average = [one.detach().clone() for one in model.parameters()]

    class Average:
        def state_dict(self):
            return {"average": average}

        def load_state_dict(self, state):
            pass

    with pytest.raises(TypeError, match="a part of a sharded tensor belongs into the model"):
        bagua.register_state("average", Average())


def test_parts_are_no_state_of_a_program(pools):
    pools([0, 1, 2, 3], environment=ISLANDS).run(rank_registers)


@pytest.mark.parametrize("text", LOSSY)
def test_few_bits_of_shards_are_the_same_on_all_islands(pools, text):
    found = pools([0, 1], [2, 3], environment=ISLANDS).run(rank_trains, text=text, optimizer="SGD", dtype="float32")
    assert all(one.isfinite().all() for one in found[3][1])
    if text != "low_precision_decentralized":  # whose replicas may differ
        assert_alike(found)


@pytest.mark.parametrize("text", ["gradient_allreduce:codec=int4", "diloco:interval=2,codec=int4"])
def test_few_bits_of_a_layer_that_stays_whole_are_the_same_on_all_ranks(pools, text):
    """Ranks of an island have other shards beside it, of other lengths: one of them fits into a bucket with it."""
    bucket_bytes = "1700" if text.startswith("gradient") else "1250"
    pool = pools([0, 1], [2, 3], environment={**ISLANDS, "BAGUA_DEFAULT_BUCKET_SIZE": bucket_bytes})
    found = pool.run(rank_trains, text=text, ignored=["2"], optimizer="SGD", dtype="float32")
    for rank in range(4):
        assert_close(found[rank][0], found[0][0], 0.0)


@pytest.mark.parametrize("text", ["power_sgd", "gradient_allreduce:codec=int4", "top_k", *OPTIMIZERS])
def test_buckets_of_which_a_rank_has_nothing(pools, text):
    """The last layer has one row, and a bucket for each parameter."""
    environment = {**ISLANDS, "BAGUA_DEFAULT_BUCKET_SIZE": "8"}
    assert_alike(pools([0, 1], [2, 3], environment=environment).run(rank_trains, text=text, dtype="float32"))


def rank_drifts():
    """The words of the error when parts of one island differ."""
    model = shard(net(torch.float32))
    model.with_bagua([torch.optim.SGD(model.parameters(), lr=1e-3)])
    try:
        if bagua.get_island() == 1:
            for parameter in model.parameters():
                parameter.detach().to_local().add_(1.0)
        model(torch.ones(2, 7)).sum().backward()
    except BaguaError as error:
        return str(error)
    finally:
        model.bagua_ddp.close()
    return ""


def test_islands_that_drift_apart_are_found(pools):
    found = pools([0, 1, 2, 3], environment={**ISLANDS, replica_check.VARIABLE: "error"}).run(rank_drifts)
    assert all("Replicas have drifted apart" in words and "[BG617]" in words for words in found), found


def rank_is_refused(case):
    """The words of the error."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    odd = bagua.get_island() == 1
    model = net(torch.float32)
    if case == "an embedding":
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1))
    elif case == "an embedding that stays whole":
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1))
        shard(model, ["0"])
    elif case == "another mesh on an island" and odd:
        fully_shard(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner")))
    elif case == "another mesh on an island":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif case == "a layer whole on an island":
        shard(model, ["0"] if odd else [])
    elif not (case == "an island not sharded" and odd) and case != "sharded afterwards":
        shard(model)
    if case == "an embedding":
        shard(model)
    made = torch.optim.SGD((net() if case == "an optimizer of before" else model).parameters(), lr=1.0)
    group = bagua.communication.new_group() if case == "a group" else None
    try:
        with algorithm(case if case.partition(":")[0] in NAMES else "gradient_allreduce"):
            model.with_bagua([made], process_group=group, step_in_backward=case == "step in backward")
        if case == "join":
            with Join([model.bagua_ddp]):
                model(torch.ones(2, 7))
        if case == "the original's checkpoint":
            bagua.checkpoint.save_checkpoint(1, "/nonexistent", model)
        if case == "a part in a primitive":
            bagua.allreduce_inplace(next(model.parameters()).detach())
        if case == "sharded afterwards":
            shard(model)
            model(torch.ones(2, 7)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if hasattr(model, "bagua_ddp"):
            model.bagua_ddp.close()
    return ""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("async", "Take any other of the library's"),
        ("a group", "leave process_group out"),
        ("step in backward", "leave it out"),
        ("gradient_allreduce:average=false", "multiply the loss by bagua.get_replica_count()"),
        ("an embedding", "Parameter 0.weight gets sparse gradients, which do not go between islands"),
        ("an embedding that stays whole", "Parameter 0.weight gets sparse gradients, which do not go between islands"),
        ("another mesh on an island", "rank 2 of island 1 has 0.weight float32 divided as"),
        ("a layer whole on an island", "rank 2 of island 1 has 0.weight float32 [33, 7]"),
        ("an island not sharded", "rank 2 of island 1 has 0.weight float32 [33, 7]"),
        ("the original's checkpoint", "A file holds one rank's parts of a sharded model"),
        ("a part in a primitive", "pass tensor.full_tensor()"),
        ("join", "ranks of an island run the same passes"),
        ("sharded afterwards", "was divided among ranks after with_bagua"),
        ("an optimizer of before", "was made before fully_shard"),
    ],
)
def test_what_can_not_be_is_refused_on_all_ranks(pools, case, words):
    found = pools([0, 1, 2, 3], environment=ISLANDS).run(rank_is_refused, case=case)
    assert len(set(found)) == 1 and words in found[0] and "[BG" in found[0], found


def rank_begins(own_group=""):
    """The words of the error. ``own_group``: a file at which the program makes a group of torch's by itself."""
    try:
        if own_group:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            torch.distributed.init_process_group("gloo", init_method=f"file://{own_group}", rank=rank, world_size=world)
        bagua.init_process_group()
        model = shard(net())
        model.with_bagua([torch.optim.SGD(model.parameters(), lr=1.0)])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_mesh_that_leaves_the_island_is_refused(ranks, tmp_path):
    found = ranks.run(rank_begins, 4, environment=ISLANDS, own_group=str(tmp_path / "group"))
    assert len(set(found)) == 1 and "0.weight is divided among ranks [0, 1, 2, 3] of 4" in found[0], found


def test_ranks_that_make_no_whole_islands_are_refused(ranks):
    found = ranks.run(rank_begins, 3, environment=ISLANDS)
    assert len(set(found)) == 1 and "3 ranks can't be divided into islands of 2" in found[0], found


def rank_shares_among_pairs():
    """Indices of a sampler for islands of four ranks, of which two read the same."""
    bagua.init_process_group()
    with pytest.raises(ConfigError, match=r"same samples.*BG701"):
        DistributedSampler(range(8))
    return list(DistributedSampler(range(8), bagua.get_world_size() // 2, bagua.get_rank() // 2, shuffle=False))


def test_torchs_sampler_for_ranks_of_an_island_that_read_the_same(ranks):
    found = ranks.run(rank_shares_among_pairs, 4, environment={VARIABLE: "4"})
    assert found == [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]] * 2


def rank_counts_islands():
    """Indices of torch's sampler for ranks. It refuses numbers of islands."""
    bagua.init_process_group()
    with pytest.raises(ConfigError, match=r"per_island=True.*BG701"):
        DistributedSampler(range(8), bagua.get_replica_count(), bagua.get_island())
    return list(DistributedSampler(range(8), bagua.get_world_size(), bagua.get_rank(), shuffle=False))


def test_torchs_sampler_of_an_elastic_job_counts_no_islands(ranks):
    found = ranks.run(rank_counts_islands, 4, elastic=True, environment=ISLANDS)
    assert found == [[rank, rank + 4] for rank in range(4)]


def test_a_sharded_model_without_islands_is_refused(pools):
    assert all("--island-size" in words for words in pools([0, 1]).run(rank_is_refused, case="no islands"))


def test_all_algorithms_are_here():
    assert {text.partition(":")[0] for text in (*EXACT, *LOSSY, *REFUSED)} == set(NAMES) - {"combine"}
