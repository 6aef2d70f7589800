"""Low-precision decentralised SGD: a ring whose members hold replicas of their neighbours."""

from functools import partial

import torch
from contract.algorithms.case import Case, nbytes
from contract.algorithms.decentralized import mean_over
from contract.algorithms.exchange import Coder, everyones, units

import bagua.torch_api as bagua
from bagua.algorithms import LowPrecisionDecentralizedAlgorithm


def ring(sim, hierarchical, codec="minmax8", interval=1):
    """d = x + L/3 + R/3 - 5W/3; W += C(d), L += C(d_left), R += C(d_right), x = W; x is the mean of the host with
    ``hierarchical``, and all its ranks take W. When members have changed, all begin anew instead of the exchange."""
    code = Coder(codec, sim.models[0]) if codec is not None else None
    anew, changed = True, False
    for step in range(sim.steps):
        changed = sim.members_changed() or changed
        if anew:
            anew, members = False, units(sim, hierarchical)
            n, first = len(members), sim.parameters()[0]
            lost = [torch.zeros_like(first) if codec in ("int4", "int2", "onebit", "topk") else None for _ in members]
            replicas = [{name: first.clone() for name in "WLR"} for _ in members]
        sim.backward(step)
        sim.optimize()
        weights = sim.parameters()
        if step % interval == 0 and changed:
            sim.begin_anew()
            anew, changed = True, False
        elif step % interval == 0:
            now = [mean_over(sim, weights, ranks) for ranks in members]
            if n > 1:
                now = exchange(now, replicas, code, lost)
            for unit, ranks in enumerate(members):
                for rank in ranks:
                    weights[rank] = now[unit]
            sim.set_parameters(weights)
        yield


def exchange(now, replicas, code, lost):
    """One exchange of all; returns the new weights."""
    n, sent = len(now), []
    for x, own, missed in zip(now, replicas, lost, strict=True):
        d = x.clone().add_(own["L"], alpha=1 / 3).add_(own["R"], alpha=1 / 3).add_(own["W"], alpha=-5 / 3)
        if missed is not None:
            missed.add_(d)
            d = missed.clone()
        message = code(d) if code is not None else d
        if missed is not None:
            missed.sub_(message)
        sent.append(message)
    for unit, own in enumerate(replicas):
        own["W"] = own["W"] + sent[unit]
        own["L"] = own["L"] + sent[(unit - 1) % n]
        own["R"] = own["R"] + sent[(unit + 1) % n]
    return [own["W"] for own in replicas]


def neighbours_are_known(model, step):
    """Replicas equal their owners' weights, bit for bit."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for bucket in model.bagua_buckets:
        weights = everyones(bucket._weight)
        if n > 1:
            assert bool((weights[(rank - 1) % n] == bucket._left_peer_weight).all())
            assert bool((weights[(rank + 1) % n] == bucket._right_peer_weight).all())
            parameters = torch.cat([tensor.detach().flatten() for tensor in bucket.tensors])
            assert bool((parameters == bucket._weight).all())


def one_message(ratio, world, model):
    return ratio * nbytes(model) if len(world.hosts) > 1 else 0.0


OWN_WAY = {"replicas_equal": False}

CASES = [
    Case(
        "low_precision_decentralized",
        LowPrecisionDecentralizedAlgorithm,
        partial(ring, hierarchical=True),
        bytes_sent=partial(one_message, 1 / 4),
        **OWN_WAY,
    ),
    Case(
        "low_precision_decentralized ranks",
        partial(LowPrecisionDecentralizedAlgorithm, hierarchical=False),
        partial(ring, hierarchical=False),
        check=neighbours_are_known,
        **OWN_WAY,
    ),
    Case(
        "low_precision_decentralized full precision, interval",
        partial(LowPrecisionDecentralizedAlgorithm, communication_interval=2, codec=None),
        partial(ring, hierarchical=True, codec=None, interval=2),
        options={"do_flatten": False},
        bytes_sent=partial(one_message, 1 / 2),
        period=2,
        **OWN_WAY,
    ),
    Case(
        "low_precision_decentralized onebit",
        partial(LowPrecisionDecentralizedAlgorithm, hierarchical=False, codec="onebit"),
        partial(ring, hierarchical=False, codec="onebit"),
        check=neighbours_are_known,
        **OWN_WAY,
    ),
]
