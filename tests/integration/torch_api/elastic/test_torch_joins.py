"""Elastic jobs that members join: results are those of one process with the same members, and no sample is lost."""

import functools
import random
import subprocess
import threading
from pathlib import Path

import numpy
import pytest
import torch
from rig.files import await_file
from rig.ranks.faults import VARIABLE, Fault
from rig.ranks.recutting import Alternating
from torch import nn
from torch.utils.data import TensorDataset
from training_scenarios.support import seeded, sgd, shard, whole_parameters, wide_mlp, wide_square, wrap

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm
from bagua.base import islands
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.comm.commit.retry import units
from bagua.torch_api.compat.model import BaguaDistributedDataParallel
from bagua.torch_api.job.session import current

SAMPLES, EPOCHS = 60, 3


def dataset():
    samples = torch.randn(SAMPLES, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return TensorDataset(samples, torch.arange(SAMPLES))


def flat(model):
    return torch.cat([one.flatten() for one in whole_parameters(model)])


def equal_layers():
    """Parameters that can be fused."""
    return nn.Sequential(*[nn.Linear(10, 10) for _ in range(4)]).double()


class Factored(torch.optim.Optimizer):
    """Its state has other shapes than the parameters: one element for each row, which is divided as they are, and
    three that each rank has."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            state, rows = self.state[one], one.grad.square()
            rows = rows.mean(dim=-1, keepdim=True) if one.dim() > 1 else rows
            state["rows"] = rows + 0.9 * state["rows"] if "rows" in state else rows
            state["count"] = state.get("count", one.grad.new_zeros(3)) + 1
            one.sub_(one.grad / (state["rows"].sqrt() + 1), alpha=0.05)


INNER = {
    "sgd": sgd,
    "adam": lambda model: torch.optim.Adam(model.parameters()),
    "factored": lambda model: Factored(model.parameters()),
}
"""Adam counts steps in scalars. torch's Adafactor steps no shards."""


def rank_train(folder, waits, differs="", fused=False, recuts=False, sharded=False, inner="sgd", algorithm="", **sizes):
    """Trains; returns what this member did in each step: the members, its samples, parameters afterwards. ``waits``:
    names of files that it waits for before the step of that number, 0: before it waits to join. ``differs``: what is
    another one than that of the others. ``fused``: the optimizer is. ``recuts``: buckets are cut anew all the time."""
    bagua.init_process_group()
    member = current().membership.member
    samples = dataset()
    if differs == "dataset":
        samples = TensorDataset(*samples[:50])
    sampler = bagua.contrib.ElasticSampler(samples, **(sizes or {"batch_size": 3}))
    loader = sampler.loader()
    model = seeded(equal_layers if fused else wide_mlp, seed=member // bagua.get_island_size())
    if differs == "model":
        model.append(nn.Linear(4, 3).double())
    if sharded:
        shard(model)
    optimizer = INNER[inner](model)
    if recuts:
        tuner = functools.partial(Alternating, -1)
        model.bagua_ddp = BaguaDistributedDataParallel(model, [optimizer], GradientAllReduceAlgorithm(), tuner=tuner)
    elif algorithm:
        model.with_bagua([optimizer], Algorithm.init(algorithm))
    else:
        wrap(model, optimizer, average=differs != "algorithm", step_in_backward=fused)
    if differs == "groups":
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    make_step = bagua.contrib.fuse_optimizer(optimizer).fuse_step if fused else optimizer.step
    fault = Fault(lambda: model.bagua_buckets)
    fault.step = 0
    steps = []
    seen = {"member": member, "newcomer": bagua.is_newcomer(), "steps": steps}
    count = torch.zeros(1)
    kind = LateCounter if differs == f"state of {member}" else Counter
    bagua.register_state("steps" if differs == "state" else "count", kind(count))
    if "0" in waits:
        await_file(Path(folder, waits["0"]))
    for epoch in sampler.epochs(EPOCHS):
        for inputs, indices in loader:
            count += 1
            step = int(count)
            Path(folder, f"step-{step}").touch()
            if str(step) in waits:
                await_file(Path(folder, waits[str(step)]))
            fault.step = step
            optimizer.zero_grad()
            fault.at("before")
            model(inputs).square().mean().backward()
            fault.at("committed")
            make_step()
            steps.append((step, epoch, list(current().membership.members), indices.tolist(), flat(model)))
    bagua.barrier()
    assert not bagua.is_newcomer()
    seen["passes"] = current().connection.passes
    seen["done"] = current().statistics.done
    seen["cuts"] = [list(bucket.names) for bucket in model.bagua_buckets]
    seen["fused"] = optimizer._bagua_fused_optimizer.count if fused else 0
    return {**seen, "flat": flat(model), "opening": sampler._course.opening}


class Counter:
    """A state of a program."""

    def __init__(self, held):
        self._held = held

    def state_dict(self):
        return {"count": self._held, "words": ("a", {"b": [1.5, None]}), "turned": torch.arange(6.0).view(2, 3).t()}

    def load_state_dict(self, state):
        assert state["words"] == ("a", {"b": [1.5, None]})
        assert torch.equal(state["turned"], torch.arange(6.0).view(2, 3).t())
        self._held.copy_(state["count"])


class LateCounter(Counter):
    """Once it has counted it can't be told any more. It describes itself as the others do."""

    def state_dict(self):
        return super().state_dict() | ({"path": Path("x")} if self._held else {})


LateCounter.__name__ = "Counter"


def check(results, make=wide_mlp, inner="sgd"):
    """Replicas are equal after each step, and those of a reference with the same samples; each sample was used once in
    each epoch. Returns the members of each step."""
    by_step = {}
    for result in results:
        for step, *rest in result["steps"]:
            by_step.setdefault(step, []).append((result["member"], rest))
    inputs = dataset().tensors[0]
    model = seeded(make, seed=0)
    optimizer = INNER[inner](model)
    used = []
    for step in sorted(by_step):
        members = by_step[step][0][1][1]
        assert sorted(member for member, _ in by_step[step]) == sorted(members)
        optimizer.zero_grad()
        together = sum(len(indices) for _, (_, _, indices, _) in by_step[step])
        for _, (_, _, indices, _) in by_step[step]:
            used += indices
            (model(inputs[indices]).square().mean() * (len(indices) / together)).backward()
        optimizer.step()
        for _, (_, _, _, found) in by_step[step]:
            assert torch.equal(found, by_step[step][0][1][3])
            assert torch.allclose(found, flat(model), rtol=0, atol=1e-12), (step, (found - flat(model)).abs().max())
    assert {result["passes"] for result in results} == {max(by_step)}, "newcomers count on"
    assert {result["done"] for result in results} == {max(by_step)}, "so do reports of steps"
    used += results[0]["opening"]
    assert sorted(used) == sorted(list(range(SAMPLES)) * EPOCHS)
    return [by_step[step][0][1][1] for step in sorted(by_step)]


def check_equal(results):
    """Replicas are equal after each step."""
    first = {step: found for step, *_, found in results[0]["steps"]}
    for result in results:
        for step, *_, found in result["steps"]:
            assert torch.equal(found, first[step])


def begin(ranks, function, hosts, folder, **more):
    """Ranks of an elastic job. There is a file for each generation that is planned, and each that follows a loss."""
    ranks.start(function, hosts=hosts, elastic=True, folder=str(folder), **more)
    ranks.regrouper.on_plan = lambda generation: (folder / f"planned-{generation}").touch()
    ranks.regrouper.on_regroup = lambda generation: (folder / f"regrouped-{generation}").touch()


def start(ranks, folder, hosts, waits, **more):
    begin(ranks, rank_train, hosts, folder, waits=waits, **more)


def join(ranks, folder, members, step, host=0, **more):
    """Newcomers that are ready in that step of the others."""
    ranks.join(rank_train, members, host, folder=str(folder), waits={"0": f"step-{step}"}, **more)


@pytest.mark.parametrize(
    ("hosts", "newcomers"),
    [([[0, 1]], {0: [2]}), pytest.param([[0, 1]], {1: [2]}, marks=pytest.mark.full), ([[0], [1]], {0: [2], 2: [3, 4]})],
    ids=str,
)
def test_newcomers_join(ranks, tmp_path, hosts, newcomers):
    start(ranks, tmp_path, hosts, {"4": "planned-2"})
    for host, members in newcomers.items():
        join(ranks, tmp_path, members, 4, host)
    results = ranks.left()
    members_of = check(results)
    assert ranks.regrouper.passes == 4
    assert [sorted(members) for members in members_of[:6]] == [[0, 1]] * 4 + [list(range(len(results)))] * 2
    assert [result["newcomer"] for result in results] == [member > 1 for member in range(len(results))]
    assert sorted(ranks.hosts[0].takes_newcomers) == sorted([*hosts[0], *newcomers.get(0, [])])


@pytest.mark.parametrize("what", ["fused", "recuts"])
def test_newcomers_take_over_the_state_of_fused_optimizers_and_the_present_cuts(ranks, tmp_path, what):
    """Stepping in backward has no effect there, and says so."""
    start(ranks, tmp_path, [[0], [1]], {"4": "planned-2"}, **{what: True})
    join(ranks, tmp_path, [2], 4, 1, **{what: True})
    results = ranks.left()
    members_of = check(results, equal_layers if what == "fused" else wide_mlp)
    assert [sorted(members) for members in members_of[3:5]] == [[0, 1], [0, 1, 2]]
    assert [result["cuts"] for result in results] == [results[0]["cuts"]] * 3
    if what == "fused":
        assert [result["fused"] for result in results] == [8, 8, 8]
        assert "step_in_backward=True has no effect in an elastic job" in ranks.started[0].output


@pytest.mark.parametrize("inner", INNER)
def test_an_island_joins(ranks, tmp_path, inner):
    """Each newcomer gets its shard from the rank at its place."""
    more = {"environment": {islands.VARIABLE: "2"}, "sharded": True, "inner": inner}
    start(ranks, tmp_path, [[0, 1]], {"4": "planned-2"}, **more)
    join(ranks, tmp_path, [2, 3], 4, **more)
    members_of = check(ranks.left(), inner=inner)
    assert [sorted(members) for members in members_of[3:5]] == [[0, 1], [0, 1, 2, 3]]


def test_one_leaves_as_planned_and_all_are_held(ranks, tmp_path):
    start(ranks, tmp_path, [[0, 1, 2]], {"3": "planned-2", "5": "planned-3"})
    await_file(tmp_path / "step-3")
    ranks.regrouper.plan({0: [0, 2]})
    await_file(tmp_path / "step-5")
    ranks.regrouper.hold()
    ranks.regrouper.plan({0: [0, 2]})
    ranks.wait()
    assert "member 1 leaves the job" in ranks.started[1].output and ranks.started[1].process.returncode == 0
    results = [ranks.started[member].result() for member in (0, 2)]
    assert {tuple(members) for _, _, members, *_ in results[0]["steps"][3:]} == {(0, 2)}
    assert all(torch.equal(one[4], other[4]) for one, other in zip(*(r["steps"] for r in results), strict=True))


def rank_two_models(folder):
    """Trains one model in the main thread, and another one beside it, until a planned change has taken place. On rank 0
    the main thread comes to it while the other one waits for the flags of its unit. Elsewhere the other thread begins
    that unit only when the main thread waits for the members of the next generation."""
    bagua.init_process_group()
    session, member = current(), current().membership.member
    models = [seeded(wide_mlp), seeded(wide_mlp, seed=1)]
    optimizers = [sgd(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        wrap(model, optimizer)
    sent, waits, trained = threading.Event(), threading.Event(), threading.Event()

    def step(index, number):
        optimizers[index].zero_grad()
        wide_square(models[index], member, number).backward()
        optimizers[index].step()

    def train_beside():
        flags = units(session).flags
        sent_along = flags.sent_along
        for number in range(2):
            step(1, number)
        optimizers[1].zero_grad()
        last = wide_square(models[1], member, 2)
        trained.set()
        if member == 0:
            flags.sent_along = lambda: (sent_along(), sent.set())[0]  # of this thread
        else:
            assert waits.wait(60.0)
        last.backward()
        optimizers[1].step()

    enter = session.enter
    session.enter = lambda: (waits.set(), enter())
    beside = threading.Thread(target=train_beside)
    beside.start()
    assert trained.wait(60.0)
    Path(folder, f"trained-{member}").touch()
    await_file(Path(folder, "planned-2"))
    step(0, 0)
    if member == 0:
        assert sent.wait(60.0)
    for number in range(1, 4):
        step(0, number)
    beside.join()
    return {"flat": [flat(model) for model in models], "members": list(session.membership.members)}


def test_a_planned_change_waits_for_no_thread(ranks, tmp_path):
    """A thread that waits for its flags holds nothing that the other ranks' threads need to send theirs."""
    begin(ranks, rank_two_models, [[0, 1, 2]], tmp_path)
    for member in range(3):
        await_file(tmp_path / f"trained-{member}")
    ranks.regrouper.plan({0: [0, 1]})
    ranks.wait()
    one, other = (ranks.started[member].result() for member in (0, 1))
    assert one["members"] == other["members"] == [0, 1]
    assert all(torch.equal(mine, its) for mine, its in zip(one["flat"], other["flat"], strict=True))


OFTEN = {(0, "copied"), (1, "let_in"), (3, "copy")}
"""Losses while somebody joins that are tried without --full: of each member, and in each phase."""


@pytest.mark.parametrize(
    ("member", "phase"),
    [
        pytest.param(member, phase, marks=() if (member, phase) in OFTEN else pytest.mark.full)
        for member in (0, 1, 3)
        for phase in ("copy", "copied", "let_in")
    ],
)
def test_a_loss_while_one_joins(ranks, tmp_path, member, phase):
    """Of the first survivor, of another one, and of a newcomer; the other newcomer joins."""
    environment = {VARIABLE: f"{member}:0:0:{phase}"}
    start(ranks, tmp_path, [[0, 1, 2]], {"4": "planned-2"}, environment=environment)
    join(ranks, tmp_path, [3, 4], 4, environment=environment)
    results = ranks.left((member,))
    if member == 3:  # no step was without the others
        check(results)
    check_equal(results)
    assert results[0]["steps"][-1][2] == [one for one in range(5) if one != member]


def test_a_loss_in_the_first_pass_of_a_newcomer(ranks, tmp_path):
    """Its algorithm can't run twice on the same gradients, so that pass is recorded, though the order is known."""
    more = {"algorithm": "top_k", "environment": {VARIABLE: "1:5:0:ready"}}
    start(ranks, tmp_path, [[0, 1]], {"4": "planned-2"}, **more)
    join(ranks, tmp_path, [2], 4, **more)
    check_equal(ranks.left((1,)))


@pytest.mark.parametrize(
    "phase", ["ready", "committed", *(pytest.param(phase, marks=pytest.mark.full) for phase in ("before", "submitted"))]
)
def test_newcomers_wait_for_the_end_of_a_step_that_is_repeated(ranks, tmp_path, phase):
    start(ranks, tmp_path, [[0, 1, 2]], {"3": "ready"}, environment={VARIABLE: f"2:4:0:{phase}"})
    ranks.regrouper.plans, ranks.regrouper.on_ready = False, (tmp_path / "ready").touch
    join(ranks, tmp_path, [3, 4], 2)
    results = ranks.left((2,))
    check_equal(results)
    first = 4 + (phase == "committed")  # step that was exchanged without it
    by_step = {
        step: {result["member"] for result in results if step in [one[0] for one in result["steps"]]}
        for step in range(1, first + 3)
    }
    assert all(members == ({0, 1, 3, 4} if step > first else {0, 1}) for step, members in by_step.items()), by_step


def refused(ranks, tmp_path, others=True, **options):
    """Of a newcomer that ends with an error: its words. The others, which have these options or not, go on."""
    start(ranks, tmp_path, [[0, 1]], {"4": "planned-2"}, **(options if others else {}))
    join(ranks, tmp_path, [2], 4, **options)
    check(ranks.left((2,), code=1))
    return ranks.started[2].output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"differs": "model"},
            "parameter or buffer number 6: the others have none, this newcomer has 5.weight float64",
        ),
        pytest.param({"differs": "algorithm"}, "settings differ: the others have", marks=pytest.mark.full),
        pytest.param({"differs": "dataset"}, "Its samplers were made as", marks=pytest.mark.full),
        ({"differs": "groups"}, "The ranks' optimizers differ: the others have"),
        ({"differs": "state"}, "Its program has communicators 1, model 1, state steps"),
        ({"global_batch": 2}, "global_batch is 2: that is not one sample for each of 3 ranks"),
    ],
)
def test_one_that_differs_is_told_and_the_others_go_on(ranks, tmp_path, options, words):
    told = refused(ranks, tmp_path, "global_batch" in options, **options)
    assert words in told and ("member 2 can't join the job, which goes on without it." in told or "global" in words)


@pytest.mark.parametrize("member", [0, pytest.param(1, marks=pytest.mark.full)])
def test_state_that_can_no_more_be_told(ranks, tmp_path, member):
    """It could when it was registered. Newcomers leave with the words; the others go on."""
    refused(ranks, tmp_path, differs=f"state of {member}")
    words = "Nobody can join this job: the state of state count can't be told. a PosixPath can't be sent to other ranks"
    assert all(words in one.output for one in ranks.started), "\n".join(one.output for one in ranks.started)


def rank_draws(folder, steps):
    """Trains; returns what it has drawn from each random generator, in each step."""
    bagua.init_process_group()
    member = current().membership.member
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    wrap(model, optimizer)
    made = torch.zeros(1)
    bagua.register_state("steps", Counter(made))
    seed_all(member)
    drawn = [draw()]
    if bagua.is_newcomer():
        await_file(Path(folder, "step-2"))
    while made < steps:
        bagua.wait_to_join()
        model(dataset().tensors[0]).square().mean().backward()
        optimizer.step()
        drawn.append(draw())
        made += 1
        Path(folder, f"step-{int(made)}").touch()
        if made == 2:
            await_file(Path(folder, "planned-2"))
    return drawn


def seed_all(member):
    torch.manual_seed(member)
    random.seed(member)
    numpy.random.seed(member)


def draw():
    return float(torch.rand(())), random.random(), float(numpy.random.random())


def test_a_join_touches_no_random_generator(ranks, tmp_path):
    begin(ranks, rank_draws, [[0, 1]], tmp_path, steps=5)
    ranks.join(rank_draws, [2], folder=str(tmp_path), steps=5)
    for member, drawn in enumerate(ranks.left()):
        assert len(drawn) == (3 if member == 2 else 6)
        seed_all(member)
        assert drawn == [draw() for _ in drawn]


def rank_ends(folder, more):
    """Makes so many steps after a newcomer is planned, and ends."""
    bagua.init_process_group()
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    wrap(model, optimizer)
    if bagua.is_newcomer():
        await_file(Path(folder, "step-1"))
    for step in range(1 + more):
        bagua.wait_to_join()
        model(dataset().tensors[0]).square().mean().backward()
        optimizer.step()
        if step == 0:
            Path(folder, "step-1").touch()
            await_file(Path(folder, "planned-2"))


@pytest.mark.parametrize("more", [0, 1], ids=["after the last step", "before the last step"])
def test_a_newcomer_that_comes_too_late(ranks, tmp_path, more):
    """The others end well. It waits until its job is over: then its daemon ends it."""
    begin(ranks, rank_ends, [[0, 1]], tmp_path, more=more)
    (late,) = ranks.join(rank_ends, [2], folder=str(tmp_path), more=more)
    for one in ranks.started[:2]:
        assert one.process.wait(120.0) == 0, one.output
    with pytest.raises(subprocess.TimeoutExpired):
        late.process.wait(0.5)
    assert late.output == "" and ranks.hosts[0].engine.error() == ""


class Odd(Counter):
    def state_dict(self):
        return {"path": Path("x")}


def rank_registers():
    for held, words in ((torch.zeros(1), "needs state_dict and load_state_dict"), (Odd(torch.zeros(1)), "PosixPath")):
        with pytest.raises(TypeError, match=words):
            bagua.register_state("mine", held)
    bagua.register_state("mine", Counter(torch.zeros(1)))
    with pytest.raises(ValueError, match="'mine' already"):
        bagua.register_state("mine", Counter(torch.zeros(1)))
    bagua.wait_to_join()


def test_states_that_cannot_be_taken_over_are_refused(pools):
    pools([0, 1]).run(rank_registers)


def rank_has_rows(folder, newcomer):
    """All gradients are sparse. The first rank trains alone until a newcomer is ready, and lets it in."""
    bagua.init_process_group()
    model = seeded(lambda: nn.Embedding(8, 2, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    together = steps = 0
    while together < 2 and steps < 20:
        steps += 1
        bagua.wait_to_join()
        optimizer.zero_grad()
        model(torch.arange(3)).sum().backward()
        optimizer.step()
        together += bagua.get_world_size() == 2
        if not (newcomer or together):
            Path(folder, "trains").touch()
            await_file(Path(folder, "planned-2"))
    bagua.barrier()
    return together, model.weight.detach()


def test_a_newcomer_joins_a_rank_whose_gradients_are_all_sparse(ranks, tmp_path):
    begin(ranks, rank_has_rows, [[0]], tmp_path, newcomer=False)
    await_file(tmp_path / "trains")
    ranks.join(rank_has_rows, [1], 0, folder=str(tmp_path), newcomer=True)
    (together, first), (_, second) = ranks.left()
    assert together == 2 and torch.equal(first, second)
