"""Every algorithm when ranks join: as one process that has their replicas, too, from that step on.

All algorithms train in one job, a model for each of them. A newcomer takes over the state of the first rank, and trains
on batches of its own from the next step on. Replicas are compared with the reference of each case after each step.
"""

import copy
import faulthandler
import re
from pathlib import Path

import pytest
import torch
from contract.algorithms import load_cases
from contract.algorithms.case import Simulation, World, flat, seeded
from contract.algorithms.harness import selected
from contract.algorithms.rank_side import compare_replicas, one_step
from rig.files import await_file
from rig.ranks.engine_hosts import make_ranks

import bagua.torch_api as bagua

JOINS_AFTER = 4  # steps
WORLDS = {"2 ranks, then 4": ([[0, 1]], {0: [2, 3]}), "2 hosts x 1, then 1 and 2": ([[0], [1]], {1: [2]})}
BECOMES = {"2 ranks, then 4": "4 ranks", "2 hosts x 1, then 1 and 2": "2 hosts, 1 and 2"}
"""The world of a case in which its reference must hold."""
CASES = {name: case for name, case in load_cases().items() if case.steps > JOINS_AFTER}
ANEW = {
    name for name in CASES if re.match("async|low_precision|decentralized shift_one .*(minmax8|onebit|topk|int4)", name)
}
RARE = ANEW - {"async", "low_precision_decentralized", "decentralized shift_one minmax8 everywhere"}
"""Those that begin anew, but for one of each kind: with --full."""
ON_ONE_HOST = {"async", "gradient_allreduce", "power_sgd", "qadam", "low_precision_decentralized", "streaming_diloco"}
"""Those that are run on one host, too, without --full."""


def often_enough(world, name):
    """Whether a case is run in a world without --full."""
    return name not in RARE and (len(WORLDS[world][0]) > 1 or name in ON_ONE_HOST)


def limit_s(names):
    """After so many seconds ranks hang. All cases are trained side by side: the more there are, the longer it takes."""
    return 120.0 + 4.0 * len(names)


def rank_train(names, folder):
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
    for step in range(JOINS_AFTER if newcomer else 0, max(CASES[name].steps for name in names)):
        bagua.wait_to_join()
        if step == JOINS_AFTER - 1:
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
    hosts, newcomers = WORLDS[world]
    with make_ranks(folder) as ranks:
        arguments = {"names": list(names), "folder": str(folder)}
        ranks.start(rank_train, hosts=hosts, elastic=True, environment=environment, **arguments)
        assert ranks.regrouper is not None
        ranks.regrouper.on_plan = lambda generation: (folder / "planned").touch()
        await_file(folder / "ready", limit_s(names))
        for host, members in newcomers.items():
            ranks.join(rank_train, members, host, environment=environment, **arguments)
        ranks.wait(limit_s(names) + 30.0)
        for one in ranks.started:
            assert one.process.returncode == 0, f"{one.rank}: {one.output}"
        return [one.result() for one in ranks.started]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, request):
    """Results of all ranks, by world, for the cases that are tested there."""
    known = {}

    def results(world):
        if world not in known:
            known[world] = []  # where it fails, it fails once
            known[world] = train(tmp_path_factory.mktemp("joins"), world, selected(request, "test_ranks_join", world))
        if not known[world]:
            pytest.skip("the ranks of this world failed before")
        return known[world]

    return results


def reference(case, world):
    """Parameters of all ranks after each step; from some step on there are more."""
    hosts, newcomers = WORLDS[world]
    torch.set_num_threads(1)
    sim = Simulation(case, World(world, tuple(map(tuple, hosts))))
    for step, _ in enumerate(case.reference(sim), start=1):
        yield [flat(model) for model in sim.models]
        if step == JOINS_AFTER:
            join(sim, case, newcomers)


def join(sim, case, newcomers):
    """They have what the first rank has, and of what is each rank's own nothing."""
    count = sum(map(len, newcomers.values()))
    for _ in range(count):
        sim.models.append(copy.deepcopy(sim.models[0]))
        sim.optimizers.append(case.optimizers(sim.models[-1]))
        for mine, first in zip(sim.optimizers[-1], sim.optimizers[0], strict=True):
            mine.load_state_dict(copy.deepcopy(first.state_dict()))
    for name, value in sim.state.items():
        if isinstance(value, list) and len(value) == sim.n:
            make = torch.clone if name.startswith("copied") else torch.zeros_like
            value += [None if value[0] is None else make(value[0]) for _ in range(count)]
    sim.change_members([[*ranks, *newcomers.get(index, [])] for index, ranks in enumerate(sim.world.hosts)])


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(world, name, marks=() if often_enough(world, name) else pytest.mark.full)
        for world, then in BECOMES.items()
        for name in CASES
        if then in CASES[name].worlds
    ],
)
def test_ranks_join(trained, world, name):
    check(trained(world), world, name)


def check(results, world, name):
    """Parameters of this case are those of the reference, on every rank after each step."""
    case = CASES[name]
    for step, wanted in enumerate(reference(case, world)):
        for rank, values in enumerate(wanted):
            found = results[rank][name][step - (case.steps - len(results[rank][name]))]
            error = (found - values).abs().max().item()
            allowed = max(case.allowed(World("", tuple(map(tuple, WORLDS[world][0]))), step), 3e-6)
            assert error <= allowed, f"step {step}, rank {rank}: differs by {error:.3g}, more than {allowed:.3g}"
