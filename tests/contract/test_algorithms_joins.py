"""Every algorithm when ranks join, and when ranks are lost between steps: as one process that has the replicas of the
members of each step.

All algorithms train in one job, a model for each of them. A newcomer takes over the state of the first rank, and trains
on batches of its own from the next step on; the state of a lost rank is lost with it. Replicas are compared with the
reference of each case after each step.
"""

import copy
import faulthandler
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from contract.algorithms import load_cases
from contract.algorithms.case import Simulation, World, flat, seeded
from contract.algorithms.harness import selected
from contract.algorithms.rank_side import compare_replicas, one_step
from rig.files import await_file
from rig.ranks.engine_hosts import make_ranks
from rig.ranks.faults import kill_self

import bagua.torch_api as bagua
from bagua.torch_api.job.session import current

CHANGED_AFTER = 4  # steps


@dataclass(frozen=True)
class Change:
    """Ranks of each host, ranks that join by host, or ranks that are lost, and the world in which a case's reference
    must hold then."""

    hosts: tuple[tuple[int, ...], ...]
    then: str
    newcomers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    lost: tuple[int, ...] = ()

    @property
    def left(self):
        return [rank for host in self.hosts for rank in host if rank not in self.lost]


CHANGES = {
    "2 ranks, then 4": Change(((0, 1),), "4 ranks", {0: (2, 3)}),
    "2 hosts x 1, then 1 and 2": Change(((0,), (1,)), "2 hosts, 1 and 2", {1: (2,)}),
    "4 ranks, then 2": Change(((0, 1, 2, 3),), "2 ranks", lost=(0, 2)),
    "2 hosts x 2, then 1 and 2": Change(((0, 1), (2, 3)), "2 hosts, 1 and 2", lost=(0,)),
}
CASES = {name: case for name, case in load_cases().items() if case.steps > CHANGED_AFTER}
ANEW = {
    name for name in CASES if re.match("async|low_precision|decentralized shift_one .*(minmax8|onebit|topk|int4)", name)
}
RARE = ANEW - {"async", "low_precision_decentralized", "decentralized shift_one minmax8 everywhere"}
"""Those that begin anew, but for one of each kind: with --full."""
ON_ONE_HOST = {"async", "gradient_allreduce", "power_sgd", "qadam", "low_precision_decentralized", "streaming_diloco"}
"""Those that newcomers join on one host, too, without --full."""
LOSE_OFTEN = ON_ONE_HOST - {"qadam"} | {"top_k", "zero_one_adam", "diloco", "no_loco", "decentralized minmax8"}
"""Those that lose ranks without --full: on two hosts."""


def often_enough(world, name):
    """Whether a case is run in a world without --full."""
    if CHANGES[world].lost:
        return name in LOSE_OFTEN and len(CHANGES[world].hosts) > 1
    return name not in RARE and (len(CHANGES[world].hosts) > 1 or name in ON_ONE_HOST)


def limit_s(names):
    """After so many seconds ranks hang. All cases are trained side by side: the more there are, the longer it takes."""
    return 120.0 + 4.0 * len(names)


def rank_train(names, folder, lost=()):
    """Trains a model of each case, all of them in each step. Returns their parameters after each."""
    faulthandler.dump_traceback_later(limit_s(names), exit=True)  # for hangs alone
    bagua.init_process_group()
    compare_replicas(every=2)  # newcomers count exchanges as the others do
    newcomer = bagua.is_newcomer()
    models = {}
    for name in names:
        case = CASES[name]
        model = seeded(case.model, seed=bagua.get_rank())
        optimizers = case.optimizers(model)
        models[name] = model.with_bagua(optimizers, case.algorithm(), **case.options), optimizers
    found = {name: [] for name in names}
    for step in range(CHANGED_AFTER if newcomer else 0, max(CASES[name].steps for name in names)):
        if lost:
            bagua.barrier()
            if step == CHANGED_AFTER and current().membership.member in lost:
                kill_self()
            bagua.barrier()
        else:
            bagua.wait_to_join()
            if step == CHANGED_AFTER - 1:
                Path(folder, "ready").touch()
                await_file(Path(folder, "planned"), limit_s(names))
        for name, (model, optimizers) in models.items():
            if step < CASES[name].steps:
                train = CASES[name].train or one_step
                train(model, optimizers, CASES[name].loss, bagua.get_rank(), step)
                found[name].append(flat(model))
    bagua.barrier()
    faulthandler.cancel_dump_traceback_later()
    return found


def train(folder, world, names, environment=None):
    """Results of all ranks that are there at the end."""
    change = CHANGES[world]
    with make_ranks(folder) as ranks:
        arguments = {"names": list(names), "folder": str(folder), "lost": change.lost}
        hosts = [list(host) for host in change.hosts]
        ranks.start(rank_train, hosts=hosts, elastic=True, environment=environment, **arguments)
        if change.newcomers:
            assert ranks.regrouper is not None
            ranks.regrouper.on_plan = lambda generation: (folder / "planned").touch()
            await_file(folder / "ready", limit_s(names))
        for host, members in change.newcomers.items():
            ranks.join(rank_train, list(members), host, environment=environment, **arguments)
        ranks.wait(limit_s(names) + 30.0)
        for one in ranks.started:
            assert one.process.returncode == (-9 if one.rank in change.lost else 0), f"{one.rank}: {one.output}"
        return [one.result() for one in ranks.started if one.rank not in change.lost]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, request):
    """Results of all ranks, by world, for the cases that are tested there."""
    known = {}

    def results(world):
        if world not in known:
            known[world] = []  # where it fails, it fails once
            names = selected(request, "test_ranks_are_lost" if CHANGES[world].lost else "test_ranks_join", world)
            known[world] = train(tmp_path_factory.mktemp("changes"), world, names)
        if not known[world]:
            pytest.skip("the ranks of this world failed before")
        return known[world]

    return results


def reference(case, change):
    """Parameters of all ranks after each step; from some step on there are more, or fewer."""
    torch.set_num_threads(1)
    sim = Simulation(case, World("", change.hosts))
    for step, _ in enumerate(case.reference(sim), start=1):
        yield [flat(model) for model in sim.models]
        if step == CHANGED_AFTER:
            (lose if change.lost else join)(sim, case, change)


def join(sim, case, change):
    """They have what the first rank has, and of what is each rank's own nothing."""
    count = sum(map(len, change.newcomers.values()))
    for _ in range(count):
        sim.models.append(copy.deepcopy(sim.models[0]))
        sim.optimizers.append(case.optimizers(sim.models[-1]))
        for mine, first in zip(sim.optimizers[-1], sim.optimizers[0], strict=True):
            mine.load_state_dict(copy.deepcopy(first.state_dict()))
    for name, value in sim.state.items():
        if isinstance(value, list) and len(value) == sim.n:
            make = torch.clone if name.startswith("copied") else torch.zeros_like
            value += [None if value[0] is None else make(value[0]) for _ in range(count)]
    sim.change_members([[*ranks, *change.newcomers.get(index, ())] for index, ranks in enumerate(change.hosts)])


def lose(sim, case, change):
    """State of these ranks is lost with them; the others are counted anew."""
    for one in (sim.models, sim.optimizers, *(one for one in sim.state.values() if isinstance(one, list))):
        if len(one) == sim.n:
            one[:] = [one[rank] for rank in change.left]
    sim.change_members([[change.left.index(rank) for rank in host if rank in change.left] for host in change.hosts])


def worlds_and_names(loses):
    """Parameters of a test: each case where its reference must hold before and after."""
    return [
        pytest.param(world, name, marks=() if often_enough(world, name) else pytest.mark.full)
        for world, change in CHANGES.items()
        for name, case in CASES.items()
        if bool(change.lost) is loses
        and change.then in case.worlds
        and (not loses or world.partition(",")[0] in case.worlds)
    ]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("world", "name"), worlds_and_names(loses=False))
def test_ranks_join(trained, world, name):
    check(trained(world), world, name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "name"), worlds_and_names(loses=True))
def test_ranks_are_lost(trained, world, name):
    check(trained(world), world, name)


def check(results, world, name):
    """Parameters of this case are those of the reference, on every rank after each step."""
    case, change = CASES[name], CHANGES[world]
    for step, wanted in enumerate(reference(case, change)):
        # Twice as much as without a loss: sums are in another order.
        allowed = max((2 if change.lost else 1) * case.allowed(World("", change.hosts), step), 3e-6)
        allowed = max(allowed, case.flip if change.lost else 0.0)
        for place, found in enumerate(results):
            rank = change.left[place] if change.lost and step < CHANGED_AFTER else place
            if rank < len(wanted):  # else it has not joined yet
                values = found[name][step - (case.steps - len(found[name]))]
                error = (values - wanted[rank]).abs().max().item()
                assert error <= allowed, f"step {step}, rank {place}: differs by {error:.3g}, more than {allowed:.3g}"
