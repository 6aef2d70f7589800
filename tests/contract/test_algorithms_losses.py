"""Every algorithm when ranks are killed: a step that was cut off and repeated gives the bits of one that was not.

In one job, all losses come between steps: nothing is repeated. In another one, of each algorithm, the same ranks are
killed at the same steps, but in the middle of an exchange: before a bucket starts, before anything is waited for, and
when results are whole and not committed yet. Whoever is left must hold the same bits after each step.

Algorithms that can't repeat an exchange begin anew with rank 0's weights: there replicas must be alike then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.algorithms.case import flat, mlp, square
from contract.algorithms.subjects import Subject, one_bit_adam, q_adam, subject_of, zero_one_adam
from rig.engine_hosts import make_ranks
from rig.faults import VARIABLE, Fault
from rig.placing import placed

import bagua.torch_api as bagua
from bagua import algorithms
from bagua.torch_api.join.session import current

HOSTS = [[0, 1, 2], [3, 4]]
LEFT = (2, 3)
STEPS = 10
KILLS = {1: (3, "start"), 4: (5, "submitted"), 0: (7, "ready")}
"""Of each member that is killed: step and phase. Those that are left are on two hosts."""


def of(name: str, make: Callable[[], Any], **options: Any) -> Subject:
    return Subject(name, make, **options)


EXACT: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        of("gradient_allreduce", algorithms.GradientAllReduceAlgorithm),
        of("gradient_allreduce sum", partial(algorithms.GradientAllReduceAlgorithm, average=False)),
        of("gradient_allreduce onebit", partial(algorithms.GradientAllReduceAlgorithm, codec="onebit")),
        of(
            "gradient_allreduce int4 everywhere",
            partial(algorithms.GradientAllReduceAlgorithm, codec="int4", everywhere=True),
        ),
        subject_of("bytegrad"),
        of("top_k", partial(algorithms.TopKAlgorithm, density=0.1, warmup_steps=2)),
        of("power_sgd", partial(algorithms.PowerSGDAlgorithm, rank=1)),
        of("qadam", algorithms.QAdamAlgorithm, optimizers=q_adam),
        of("one_bit_adam", algorithms.OneBitAdamAlgorithm, optimizers=one_bit_adam),
        of("zero_one_adam", algorithms.ZeroOneAdamAlgorithm, optimizers=zero_one_adam),
        of("local_sgd", partial(algorithms.LocalSGDAlgorithm, interval=2)),
        of("local_sgd int4", partial(algorithms.LocalSGDAlgorithm, interval=2, codec="int4")),
        of("diloco int4", partial(algorithms.DiLoCoAlgorithm, interval=2, codec="int4", warmup_steps=2)),
        of("no_loco", partial(algorithms.NoLoCoAlgorithm, interval=2)),
        of("decentralized", algorithms.DecentralizedAlgorithm),
        of("decentralized int4", partial(algorithms.DecentralizedAlgorithm, codec="int4")),
    )
}
OFTEN = {"gradient_allreduce onebit", "power_sgd", "zero_one_adam", "local_sgd", "diloco int4", "decentralized"}
"""Those that are compared without --full: one of each kind of state."""

ANEW: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        of("low_precision_decentralized", algorithms.LowPrecisionDecentralizedAlgorithm),
        of("async", partial(algorithms.AsyncModelAverageAlgorithm, sync_interval_ms=0)),
        of("streaming_diloco", partial(algorithms.StreamingDiLoCoAlgorithm, interval=4, fragments=2)),
    )
}


def rank_train(names: list[str]) -> dict[str, list[torch.Tensor]]:
    """Trains a model with each of these algorithms, all of them in each step. Returns their parameters after each."""
    bagua.init_process_group()
    member = current().membership.member
    models = {}
    for name in names:
        subject = {**EXACT, **ANEW}[name]
        torch.manual_seed(0)
        model = placed(mlp())
        optimizers = subject.optimizers(model)
        models[name] = model.with_bagua(optimizers, subject.make()), optimizers
    fault = Fault(lambda: [])
    found: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for step in range(STEPS):
        bagua.barrier()
        fault.step = step
        fault.at("between")
        bagua.barrier()
        for name, (model, optimizers) in models.items():
            for optimizer in optimizers:
                optimizer.zero_grad()
            square(model, member, step).backward()
            for optimizer in optimizers:
                optimizer.step()
            found[name].append(flat(model))
    bagua.barrier()
    return found


def train(
    folder: Path, names: list[str], phases: dict[int, str], variables: dict[str, str] | None = None
) -> list[dict[str, list[torch.Tensor]]]:
    """Results of the ranks that are left. ``phases``: in which each of the others is killed."""
    kills = " ".join(f"{member}:{step}:0:{phases[member]}" for member, (step, _) in KILLS.items())
    with make_ranks(folder) as ranks:
        environment = {VARIABLE: kills, "BAGUA_DEFAULT_BUCKET_SIZE": "3000", **(variables or {})}
        ranks.start(rank_train, hosts=HOSTS, elastic=True, environment=environment, names=names)
        ranks.wait(150.0)
        for one in ranks.started:
            assert one.process.returncode == (0 if one.rank in LEFT else -9), f"{one.rank}: {one.output}"
        return [ranks.started[member].result() for member in LEFT]


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[torch.Tensor]]]:
    """Of all algorithms, with losses between steps."""
    return train(tmp_path_factory.mktemp("uncut"), list(EXACT), dict.fromkeys(KILLS, "between"))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.full) for name in EXACT]
)
def test_a_repeated_step_gives_the_same_bits(
    uncut: list[dict[str, list[torch.Tensor]]], tmp_path: Path, name: str
) -> None:
    found = train(tmp_path, [name], {member: phase for member, (_, phase) in KILLS.items()})
    for mine, wanted in zip(found, uncut, strict=True):
        equal = [torch.equal(one, other) for one, other in zip(mine[name], wanted[name], strict=True)]
        assert all(equal), equal


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ANEW)
def test_others_begin_anew(tmp_path: Path, name: str) -> None:
    found = train(tmp_path, [name], {member: phase for member, (_, phase) in KILLS.items()})
    for one in found:
        assert all(bool(parameters.isfinite().all()) for parameters in one[name])
    assert (found[0][name][-1] - found[1][name][-1]).abs().max() < 0.5
