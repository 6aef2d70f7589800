"""The trade-off study computes plausible figures everywhere. ``e2e/pages/test_pages.py`` runs it."""

import dataclasses
import itertools

import pytest
from tradeoff.grid import FAMILIES, TEXTS, cluster_of, step_ms, texts_for
from tradeoff.table import accuracies

from bagua.bench import accuracy
from bagua.tuning.advice import advise
from bagua.tuning.exchanges import BACKGROUND, exchange_of
from bagua.tuning.network import Network
from bagua.tuning.profile import Gradient, StepProfile

MS = 1_000_000
PROFILE = StepProfile(
    tuple(Gradient(f"p{number}", "float32", 1 << 20, (number + 1) * 10 * MS, rows=1024) for number in range(8)),
    *(50 * MS, 80 * MS, 10 * MS),
    cores=4,
)
RATES = (1e7, 1e8, 1e9, 1e10)
DELAYS = (0.0, 0.005, 0.050)


@pytest.mark.parametrize("hosts", [2, pytest.param(3, marks=pytest.mark.full), 8])
def test_a_slower_network_and_more_bytes_are_never_faster(hosts):
    """Except for what goes on in the background: there, exchanges are rarer, and cost less of a step."""
    texts = [text for text in texts_for(hosts) if exchange_of(text).when != BACKGROUND]
    steps = {}
    for rate, delay in itertools.product(RATES, DELAYS):
        rows = advise(PROFILE, cluster_of(PROFILE, Network(rate, delay), hosts), texts).rows
        steps[rate, delay] = {row.exchange.text: row.prediction.step_s for row in rows}
    for text in texts:
        for delay, (slow, fast) in itertools.product(DELAYS, itertools.pairwise(RATES)):
            assert steps[slow, delay][text] >= steps[fast, delay][text] - 1e-9, (text, slow, delay)
        for rate, (near, far) in itertools.product(RATES, itertools.pairwise(DELAYS)):
            assert steps[rate, far][text] >= steps[rate, near][text] - 1e-9, (text, rate, far)
    double = tuple(dataclasses.replace(one, numel=2 * one.numel) for one in PROFILE.parameters)
    larger = dataclasses.replace(PROFILE, parameters=double)
    for text, network in itertools.product(TEXTS.values(), (Network(1e8), Network(1e9, 0.005))):
        if exchange_of(text).when != BACKGROUND:
            less, more = (step_ms(one, network, hosts, text) for one in (PROFILE, larger))
            assert more >= less - 1e-6, (text, network.name)


def test_every_setting_has_its_accuracy():
    known = accuracies()
    assert set(known) == {setting.name for setting in accuracy.SETTINGS}
    assert {name for names in FAMILIES.values() for name in names} <= set(known)
