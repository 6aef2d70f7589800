"""The trade-off study: its grid makes sense, its table finds the accuracy of each setting, and (--full) it runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tradeoff.grid import FAMILIES, FULL, TEXTS, Grid, best_family, cluster_of, least_rate, results, step_ms, texts_for
from tradeoff.many import compare
from tradeoff.table import accuracies

from bagua.bench import accuracy
from bagua.tuning.advice import advise
from bagua.tuning.exchanges import BACKGROUND, exchange_of
from bagua.tuning.network import Network
from bagua.tuning.profile import Gradient, StepProfile

HERE = Path(__file__).parent
MS = 1_000_000
PROFILE = StepProfile(
    tuple(Gradient(f"p{number}", "float32", 1 << 20, (number + 1) * 10 * MS, rows=1024) for number in range(8)),
    *(50 * MS, 80 * MS, 10 * MS),
    cores=4,
)
RATES = (1e7, 1e8, 1e9, 1e10)
DELAYS = (0.0, 0.005, 0.050)
HOSTS = (2, 3, 8, 128)


def test_the_grid_has_every_algorithm_everywhere() -> None:
    grid = Grid(RATES[:2], DELAYS[:2], (2, 8))
    found = json.loads(json.dumps(results({"m": PROFILE}, grid)))
    assert [(cell["hosts"], cell["network"]) for cell in found["cells"]] == [
        (hosts, network) for hosts in (2, 8) for network in ("10mbit", "100mbit", "10mbit,5ms", "100mbit,5ms")
    ]
    for cell in found["cells"]:
        assert set(cell["steps"]) == set(texts_for(cell["hosts"]))
        assert FULL in cell["steps"] and cell["recommended"][0] in cell["steps"]
        assert all(step >= found["models"]["m"]["compute_ms"] * 0.999 for step, _, _ in cell["steps"].values())


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_slower_network_is_never_faster(hosts: int) -> None:
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


@pytest.mark.parametrize("hosts", HOSTS)
def test_more_bytes_are_never_faster(hosts: int) -> None:
    double = tuple(dataclasses.replace(one, numel=2 * one.numel) for one in PROFILE.parameters)
    larger = dataclasses.replace(PROFILE, parameters=double)
    for text in TEXTS.values():
        for network in (Network(1e8), Network(1e9, 0.005)):
            if exchange_of(text).when != BACKGROUND:
                less, more = (step_ms(one, network, hosts, text) for one in (PROFILE, larger))
                assert more >= less - 1e-6, (text, network.name)


def test_what_to_take() -> None:
    """On a fast wire what keeps the result; on a slow one what saves more."""
    assert best_family(PROFILE, Network(1e11), 2)[0] == "full gradients"
    order = list(FAMILIES)
    assert order.index(best_family(PROFILE, Network(1e8, 0.02), 8)[0]) > order.index("rounded gradients")


def test_the_least_rate() -> None:
    found = least_rate(PROFILE, 0.0, 2, FULL, 1.5)
    assert found is not None
    compute_ms = PROFILE.compute_s * 1e3
    assert (
        step_ms(PROFILE, Network(found), 2, FULL) <= 1.5 * compute_ms < step_ms(PROFILE, Network(found / 1.1), 2, FULL)
    )
    more = least_rate(PROFILE, 0.0, 8, FULL, 1.5)
    assert more is not None and more > found
    assert least_rate(PROFILE, 0.050, 128, FULL, 1.5) is None  # the ring's trips alone take longer


def test_every_setting_has_its_accuracy() -> None:
    known = accuracies()
    assert set(known) == {setting.name for setting in accuracy.SETTINGS}
    assert known[FULL][0] == "+0.00 points" and known["onebit"][0] == "-1.76 points"
    assert known["qadam"] != known["qadam_1bit"]
    assert {name for names in FAMILIES.values() for name in names} <= set(known)


def test_reports_of_many_hosts_are_compared() -> None:
    rows = [
        {"network": "2mbit,100ms", "bytes": 1 << 20, "system": name, "ms": 10_000.0} for name in ("bagua", "bagua fp16")
    ]
    found = list(compare({"settings": {"nnodes": 4}, "rows": rows}, PROFILE.speeds))
    assert [row["codec"] for row in found] == ["none", "fp16"]
    assert found[0]["predicted_ms"] > 1.5 * found[1]["predicted_ms"] > 0
    assert found[0]["error"] == found[0]["predicted_ms"] / 10_000 - 1


@pytest.mark.full  # matplotlib draws five pictures
def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-P", str(HERE / "study.py"), "--small", "--models", "tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == [f"study-{name}.png" for name in ("best", "hosts", "limit", "measured", "speedup")]
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found["cells"]) == 3 * 2 * 2 and found["measured"]
    assert "| 4 |" in (tmp_path / "many.md").read_text()
    assert (tmp_path / "table.md").read_text().count("\n") == 2 + len(TEXTS)


@pytest.mark.full  # ranks train: half a minute
def test_profiles_are_recorded(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    mine = tmp_path / "mine"
    words = ("--small", "--models", "tiny", "--out", tmp_path / "out", "--record", "--profiles", mine)
    command = [sys.executable, "-P", HERE / "study.py", *words]
    done = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert StepProfile.load(mine / "tiny.json").compute_s > 0
