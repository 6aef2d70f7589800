"""Elastic jobs that members join: results are those of one process with the same members, and no sample is lost."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from rig.engine_hosts import RankProcess, Ranks
from torch import nn
from torch.utils.data import TensorDataset

import bagua.torch_api as bagua
from bagua.torch_api.join.session import current

sys.path.insert(0, str(Path(__file__).parent))

from training_scenarios.support import seeded, sgd, wide_mlp, wrap

SAMPLES, EPOCHS = 60, 3
DEADLINE_S = 15.0


def dataset() -> TensorDataset:
    samples = torch.randn(SAMPLES, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return TensorDataset(samples, torch.arange(SAMPLES))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def await_file(path: Path) -> None:
    """Ranks of a test wait for each other here: what they wait for comes without them."""
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.005)


def rank_train(folder: str, waits: dict[str, str], **sizes: int) -> dict[str, Any]:
    """Trains; returns what this member did in each step: the members, its samples, parameters afterwards. ``waits``:
    names of files that it waits for before the step of that number, 0: before it waits to join."""
    bagua.init_process_group()
    member = current().membership.member
    sampler = bagua.contrib.ElasticSampler(dataset(), **(sizes or {"batch_size": 3}))
    loader = sampler.loader()
    model = seeded(wide_mlp, seed=member)
    optimizer = sgd(model)
    wrap(model, optimizer)
    steps = []
    seen: dict[str, Any] = {"member": member, "newcomer": bagua.is_newcomer(), "steps": steps}
    count = torch.zeros(1)
    bagua.register_state("count", Counter(count))
    if "0" in waits:
        await_file(Path(folder, waits["0"]))
    for epoch in sampler.epochs(EPOCHS):
        for inputs, indices in loader:
            count += 1
            step = int(count)
            Path(folder, f"step-{step}").touch()
            if str(step) in waits:
                await_file(Path(folder, waits[str(step)]))
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            steps.append((step, epoch, list(current().membership.members), indices.tolist(), flat(model)))
    bagua.barrier()
    assert not bagua.is_newcomer()
    return {**seen, "flat": flat(model), "opening": sampler._course._opening}


class Counter:
    """A state of a program."""

    def __init__(self, held: torch.Tensor) -> None:
        self._held = held

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._held, "words": ("a", {"b": [1.5, None]})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["words"] == ("a", {"b": [1.5, None]})
        self._held.copy_(state["count"])


def check(results: list[dict[str, Any]]) -> list[list[int]]:
    """Replicas are equal after each step, and those of a reference with the same samples; each sample was used once in
    each epoch. Returns the members of each step."""
    by_step: dict[int, list[tuple[int, Any]]] = {}
    for result in results:
        for step, *rest in result["steps"]:
            by_step.setdefault(step, []).append((result["member"], rest))
    inputs = dataset().tensors[0]
    model = seeded(wide_mlp, seed=0)
    optimizer = sgd(model)
    used: list[int] = []
    for step in sorted(by_step):
        members = by_step[step][0][1][1]
        assert sorted(member for member, _ in by_step[step]) == sorted(members)
        optimizer.zero_grad()
        for _, (_, _, indices, _) in by_step[step]:
            used += indices
            (model(inputs[indices]).square().mean() / len(members)).backward()
        optimizer.step()
        for _, (_, _, _, found) in by_step[step]:
            assert torch.equal(found, by_step[step][0][1][3])
            assert torch.allclose(found, flat(model), rtol=0, atol=1e-12), (step, (found - flat(model)).abs().max())
    used += results[0]["opening"]
    assert sorted(used) == sorted(list(range(SAMPLES)) * EPOCHS)
    return [by_step[step][0][1][1] for step in sorted(by_step)]


def results_of(ranks: Ranks) -> list[dict[str, Any]]:
    ranks.wait(DEADLINE_S)
    failed = [one for one in ranks.started if one.process.returncode]
    assert not failed, "\n".join(f"{one.rank}: {one.process.returncode}\n{one.output}" for one in ranks.started)
    return [one.result() for one in ranks.started]


def tell_plans(ranks: Ranks, folder: Path) -> None:
    """A file for each generation that is planned."""
    assert ranks.regrouper is not None
    ranks.regrouper.on_plan = lambda generation: (folder / f"planned-{generation}").touch()


def test_one_joins_two(ranks: Ranks, tmp_path: Path) -> None:
    ranks.start(rank_train, nprocs=2, elastic=True, folder=str(tmp_path), waits={"4": "planned-2"})
    tell_plans(ranks, tmp_path)
    made: list[RankProcess] = ranks.join(rank_train, [2], folder=str(tmp_path), waits={"0": "step-4"})
    results = results_of(ranks)
    assert made[0].result()["newcomer"]
    assert check(results)[:6] == [[0, 1]] * 4 + [[0, 1, 2]] * 2
    assert sorted(ranks.hosts[0].takes_newcomers) == [0, 1]
