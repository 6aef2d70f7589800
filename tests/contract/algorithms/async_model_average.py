"""Asynchronous model average, with each average arriving before the next forward pass, and steps can be compared."""

import time
from functools import partial

from contract.algorithms.case import EVEN_WORLDS, SEVERAL_RANKS, Case
from contract.algorithms.decentralized import mean_over, model_per_rank
from contract.algorithms.exchange import Coder, exchange_differences, share, shift_one

import bagua.torch_api as bagua
from bagua.algorithms import AsyncModelAverageAlgorithm

WARM_UP = 2
AN_HOUR_MS = 3_600_000


def step_and_wait(model, optimizers, loss, rank, step):
    """One step; then what it started in the background is let come to its end."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss(model, rank, step).backward()
    for optimizer in optimizers:
        optimizer.step()
    bagua.barrier()  # all have started it
    buckets = model.bagua_buckets
    while model.bagua_algorithm.exchanged == "weight" and not all(bucket.done() for bucket in buckets):
        time.sleep(0.001)


def averages(sim, warm_up, mean, rounds=None):
    """x += mean(s) - s before every pass, where s was x before the pass before it; first ``warm_up`` steps with the
    mean of gradients. ``rounds``: how many averages there are; None: one per step. All begin anew when members change:
    pairs, too."""
    snapshots = []
    round = 0
    for step in range(sim.steps):
        if sim.members_changed() and step >= warm_up:
            sim.begin_anew()
            snapshots, round = [], 0
            sim.state.clear()
        if step < warm_up:
            sim.backward(step)
            sim.set_gradients([sim.mean(sim.gradients())] * sim.n)
        else:
            if snapshots:
                news = mean(sim, snapshots, round)
                round += 1
                changed = zip(sim.parameters(), news, snapshots, strict=True)
                sim.set_parameters([x + new - old for x, new, old in changed])
            snapshots = sim.parameters() if rounds is None or step - warm_up < rounds else []
            sim.backward(step)
        sim.optimize()
        yield


def of_all(sim, snapshots, round):
    return [sim.mean(snapshots)] * sim.n


def of_pairs(sim, snapshots, round):
    return [
        mean_over(sim, snapshots, (rank, shift_one(rank, sim.n, round))) if sim.n > 1 else snapshots[rank]
        for rank in range(sim.n)
    ]


def of_pairs_by_differences(codec, sim, snapshots, round):
    """x_i + m - C(d_i), with d_i the difference to the pair's last mean and m the mean of both C(d)."""
    code = sim.state.setdefault("code", Coder(codec, sim.models[0]))
    known, found = sim.state.setdefault("known", {}), list(snapshots)
    first = sim.state.setdefault("first", snapshots[0])
    for low in range(sim.n // 2):
        exchange_differences(code, (low, shift_one(low, sim.n, round)), found, known, first)
    return found


def decode_error(world, step):
    return 1e-6 + (0.1 * 2 / 255 * (step + 1) if len(world.hosts) > 1 else 0.0)


HOW = {"replicas_equal": False, "train": step_and_wait}

CASES = [
    Case(
        "async",
        partial(AsyncModelAverageAlgorithm, sync_interval_ms=0),
        partial(averages, warm_up=0, mean=of_all),
        bytes_sent=share(1),  # of an exchange: here there is one in each step
        **HOW,
    ),
    Case(
        "async between exchanges",
        partial(AsyncModelAverageAlgorithm, sync_interval_ms=AN_HOUR_MS),
        partial(averages, warm_up=0, mean=of_all, rounds=1),
        bytes_sent=lambda world, model: 0.0,
        **HOW,
    ),
    Case(
        "async warm-up",
        partial(AsyncModelAverageAlgorithm, sync_interval_ms=0, warmup_steps=WARM_UP),
        partial(averages, warm_up=WARM_UP, mean=of_all),
        options={"do_flatten": False},
        **HOW,
    ),
    Case(
        "async shift_one",
        partial(AsyncModelAverageAlgorithm, "shift_one", sync_interval_ms=0),
        partial(averages, warm_up=0, mean=of_pairs),
        bytes_sent=model_per_rank,
        worlds=("1 rank", *EVEN_WORLDS),
        **HOW,
    ),
    Case(
        "async minmax8",
        partial(AsyncModelAverageAlgorithm, sync_interval_ms=0, codec="minmax8"),
        partial(averages, warm_up=0, mean=of_all),
        tolerance=decode_error,
        worlds=SEVERAL_RANKS,
        bytes_sent=share(1 / 4),
        **HOW,
    ),
    Case(
        "async shift_one int4 everywhere",
        partial(AsyncModelAverageAlgorithm, "shift_one", sync_interval_ms=0, codec="int4", everywhere=True),
        partial(averages, warm_up=0, mean=partial(of_pairs_by_differences, "int4")),
        worlds=EVEN_WORLDS,
        bytes_sent=lambda world, model: model_per_rank(world, model) / 8,
        slack=0.1,
        **HOW,
    ),
]
