"""Decentralised SGD: the mean of weights, over all or in pairs, replaces them before the optimizer's step."""

from functools import partial

import torch
from contract.algorithms.case import EVEN_WORLDS, Case, nbytes
from contract.algorithms.exchange import Coder, everyones, exchange_differences, pairs_of_round, share, shift_one, units

import bagua.torch_api as bagua
from bagua.algorithms import DecentralizedAlgorithm


def mean_of_weights(sim, passes=lambda step: ()):
    """x_i = mean of all x_j - lr g_i(x_i); of several ``passes`` the last one exchanges."""
    for step in range(sim.steps):
        sim.backward(step, passes(step))
        sim.set_parameters([sim.mean(sim.parameters())] * sim.n)
        sim.optimize()
        yield


def mean_of_pairs(sim, hierarchical, interval=1):
    round = 0
    for step in range(sim.steps):
        members = units(sim, hierarchical)
        sim.backward(step)
        if step % interval == 0:
            weights = sim.parameters()
            for ranks in pairs_of_round(members, round):
                mean = mean_over(sim, weights, ranks)
                for rank in ranks:
                    weights[rank] = mean
            sim.set_parameters(weights)
            round += 1
        sim.optimize()
        yield


def mean_over(sim, values, ranks):
    there = [values[rank] if rank in ranks else torch.zeros_like(values[rank]) for rank in range(sim.n)]
    return sim.sum(there) / len(ranks)


def pairs_by_differences(sim, codec):
    """Ranks in pairs, C of the difference to the pair's last mean, wherever they are. When members have changed, all
    begin anew instead of the exchange."""
    code, known, first = Coder(codec, sim.models[0]), {}, sim.parameters()[0]
    for step in range(sim.steps):
        sim.backward(step)
        half = sim.n // 2
        if sim.members_changed():
            sim.begin_anew()
            known, first, half = {}, sim.parameters()[0], 0
        weights = sim.parameters()
        for low in range(half):
            exchange_differences(code, (low, shift_one(low, sim.n, step)), weights, known, first)
        sim.set_parameters(weights)
        sim.optimize()
        yield


def pairs_of_hosts(sim, codec):
    """Both hosts' means, C of the difference to the last mean, weighted by ranks. One host: its mean. When members have
    changed, all begin anew instead of the exchange."""
    if len(sim.world.hosts) == 1:
        yield from mean_of_weights(sim)
        return
    code, known = Coder(codec, sim.models[0]), sim.parameters()[0]
    for step in range(sim.steps):
        sim.backward(step)
        if sim.members_changed():
            sim.begin_anew()
            known = sim.parameters()[0]
            sim.optimize()
            yield
            continue
        shares = [len(ranks) / sim.n for ranks in sim.world.hosts]
        weights = sim.parameters()
        means = [mean_over(sim, weights, ranks) for ranks in sim.world.hosts]
        sent = [code(mean - known) for mean in means]
        mean = (sent[0] * shares[0]).add_(sent[1], alpha=shares[1])
        known = known + mean
        for host, ranks in enumerate(sim.world.hosts):
            for rank in ranks:
                weights[rank] = means[host] + mean - sent[host]
        sim.set_parameters(weights)
        sim.optimize()
        yield


def peers_agree(model, step):
    """After an exchange in pairs of ranks both hold the same mean."""
    found = everyones(model.bagua_buckets[0]._peer_weight)
    rank, n = bagua.get_rank(), bagua.get_world_size()
    if n > 1:
        assert bool((found[rank] == found[shift_one(rank, n, step)]).all())


def all_agree(model, step):
    found = everyones(model.bagua_buckets[0]._peer_weight)
    assert bool((found == found[0]).all())


def decode_error(size):
    """Weights move by about 0.1 per step; codecs err by ``size`` of that."""
    return lambda world, step: 1e-6 + 0.1 * size * (step + 1) if len(world.hosts) > 1 else 0.0


def accumulate(model, optimizers, loss, rank, step):
    """A step of two passes, the first of them under no_sync."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    with model.bagua_ddp.no_sync():
        loss(model, rank, step).backward()
    loss(model, rank, step + 50).backward()
    for optimizer in optimizers:
        optimizer.step()


def accumulated(step):
    return (step, step + 50)


def model_per_host(world, model):
    """One model to the other host, whatever the ranks there are."""
    return nbytes(model) if len(world.hosts) > 1 else 0.0


def model_per_rank(world, model):
    """One model of each rank to its peer, which "shift_one" chooses on the other of two hosts with as many ranks."""
    return nbytes(model) * len(world.hosts[0]) if len(world.hosts) > 1 else 0.0


OWN_WAY = {"replicas_equal": False}
EVEN_OR_ONE = ("1 rank", *EVEN_WORLDS)

CASES = [
    Case("decentralized", DecentralizedAlgorithm, mean_of_weights, check=all_agree, bytes_sent=share(1), **OWN_WAY),
    Case(
        "decentralized accumulation",
        DecentralizedAlgorithm,
        partial(mean_of_weights, passes=accumulated),
        train=accumulate,
        **OWN_WAY,
    ),
    Case(
        "decentralized shift_one",
        partial(DecentralizedAlgorithm, hierarchical=False, peer_selection_mode="shift_one"),
        partial(mean_of_pairs, hierarchical=False),
        worlds=EVEN_OR_ONE,
        check=peers_agree,
        bytes_sent=model_per_rank,
        **OWN_WAY,
    ),
    Case(
        "decentralized shift_one hosts",
        partial(DecentralizedAlgorithm, peer_selection_mode="shift_one", communication_interval=2),
        partial(mean_of_pairs, hierarchical=True, interval=2),
        bytes_sent=lambda world, model: model_per_host(world, model) / 2,
        period=2,
        **OWN_WAY,
    ),
    Case(
        "decentralized minmax8",
        partial(DecentralizedAlgorithm, codec="minmax8"),
        mean_of_weights,
        tolerance=decode_error(2 / 255),
        check=all_agree,
        bytes_sent=share(1 / 4),
        **OWN_WAY,
    ),
    *(
        Case(
            f"decentralized shift_one {codec} everywhere",
            partial(DecentralizedAlgorithm, False, "shift_one", codec=codec, everywhere=True),
            partial(pairs_by_differences, codec=codec),
            worlds=EVEN_WORLDS,
            **OWN_WAY,
        )
        for codec in ("minmax8", "onebit", "topk")
    ),
    Case(
        "decentralized shift_one hosts int4",
        partial(DecentralizedAlgorithm, peer_selection_mode="shift_one", codec="int4"),
        partial(pairs_of_hosts, codec="int4"),
        bytes_sent=lambda world, model: model_per_host(world, model) / 8,
        slack=0.1,
        **OWN_WAY,
    ),
]
