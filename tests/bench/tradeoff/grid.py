"""The grid of the study: every algorithm on every network with every number of hosts, predicted from step profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua.base.algorithm_choice import parse
from bagua.bench import accuracy
from bagua.tuning.advice import advise, predict
from bagua.tuning.exchanges import every_text, exchange_of
from bagua.tuning.network import HIGHEST_RATE, LOWEST_RATE, Network
from bagua.tuning.predict import Cluster

RATES = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)
DELAYS = (0.0, 0.001, 0.005, 0.020, 0.050)
HOSTS = (2, 4, 8, 16, 32, 128)

FULL = "gradient_allreduce"
FAMILIES = {
    "full gradients": (FULL,),
    "rounded gradients": ("fp16", "bf16", "fp8_e4m3", "bytegrad", "int4"),
    "sparse, low rank": ("top_k", "power_sgd"),
    "one-bit optimizers": ("qadam", "qadam_1bit", "one_bit_adam", "zero_one_adam"),
    "local steps": ("local_sgd", "diloco", "streaming_diloco"),
    "decentralized": ("decentralized", "shift_one", "low_precision_decentralized", "no_loco"),
    "asynchronous": ("async",),
}
"""Settings of ``bagua bench accuracy`` by the way in which they save communication. Their accuracy is known
(docs/accuracy.md). Not here: bytegrad without hierarchy, which is the same with one rank per host, and onebit on raw
gradients, which fails there."""

WARM_UP_KEYS = ("warmup_steps", "warmup_codec", "start_after")


def text_of(name):
    """The algorithm of a setting of ``bagua bench accuracy``, without its warm-up: predictions are for after it."""
    setting = next(one for one in accuracy.SETTINGS if one.name == name)
    algorithm, given = parse(setting.algorithm.format(tenth=1, quarter=1, half=1))
    kept = [f"{key}={_written(value)}" for key, value in given.items() if key not in WARM_UP_KEYS]
    return f"{algorithm}:{','.join(kept)}" if kept else algorithm


def _written(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


TEXTS = {name: text_of(name) for names in FAMILIES.values() for name in names}
"""Algorithms of the families, by the names of their settings."""


@dataclass(frozen=True)
class Grid:
    """The axes of a study. ``rates`` in bits per second, ``delays`` in seconds, one way."""

    rates: Sequence[float] = RATES
    delays: Sequence[float] = DELAYS
    hosts: Sequence[int] = HOSTS

    def networks(self):
        for delay in self.delays:
            for rate in self.rates:
                yield Network(rate, delay)


def texts_for(hosts):
    """Every algorithm and codec that ``bagua advise`` knows, and the settings of the families."""
    return list(dict.fromkeys([*every_text(hosts), *TEXTS.values()]))


def results(profiles, grid):
    """The document of the study, milliseconds and bytes of one host: ``cells`` with model, rate, delay, hosts, the
    advice, and for each algorithm [ms per step, exposed ms, bytes]."""
    cells = []
    for model, profile in profiles.items():
        for hosts in grid.hosts:
            for network in grid.networks():
                cells.append({"model": model, "hosts": hosts, **_cell(profile, network, hosts)})
    models = {
        name: {"bytes": one.bytes, "compute_ms": one.compute_s * 1e3, "cores": one.cores}
        for name, one in profiles.items()
    }
    axes = {"rates": list(grid.rates), "delays_ms": [delay * 1e3 for delay in grid.delays], "hosts": list(grid.hosts)}
    return {"models": models, **axes, "cells": cells}


def _cell(profile, network, hosts):
    advice = advise(profile, cluster_of(profile, network, hosts), texts_for(hosts))
    return {
        "network": network.name,
        "rate": network.rate,
        "delay_ms": network.delay_s * 1e3,
        "recommended": [row.exchange.text for row in advice.recommended],
        "steps": {
            row.exchange.text: [row.prediction.step_s * 1e3, row.prediction.exposed_s * 1e3, row.prediction.sent_bytes]
            for row in advice.rows
        },
    }


def cluster_of(profile, network, hosts):
    """Hosts of one rank each, with the cores of the machine that was recorded."""
    return Cluster.of(profile, network, hosts, ranks=1)


def step_ms(profile, network, hosts, text):
    return predict(profile, cluster_of(profile, network, hosts), exchange_of(text)).step_s * 1e3


def best_of(family, profile, network, hosts):
    """The fastest setting of a family: its name, ms per step."""
    found = {name: step_ms(profile, network, hosts, TEXTS[name]) for name in FAMILIES[family]}
    name = min(found, key=found.__getitem__)
    return name, found[name]


def best_family(profile, network, hosts, worth=0.1):
    """The family to take, and its step in ms: one that gives up more must save more than ``worth`` of the step of the
    one before it. Their order is that of FAMILIES."""
    chosen, step = "", float("inf")
    for family in FAMILIES:
        found = best_of(family, profile, network, hosts)[1]
        if found < (1 - worth) * step:
            chosen, step = family, found
    return chosen, step


def least_rate(profile, delay_s, hosts, text, slower=1.1):
    """Bits per second from which on a step takes at most ``slower`` times the one without communication; None if no
    wire is fast enough."""

    def enough(rate):
        return step_ms(profile, Network(rate, delay_s), hosts, text) <= slower * profile.compute_s * 1e3

    return _first(enough, LOWEST_RATE, HIGHEST_RATE)


def _first(enough, low, high):
    """Bisects between two positive numbers, to 1 %."""
    if not enough(high):
        return None
    if enough(low):
        return low
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
