"""A short soak, and that a long one would notice a leak."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.trend import growth

HERE = Path(__file__).parent


@pytest.mark.full
def test_smoke():
    command = [HERE / "soak.py", "--minutes", "0.03", "--max-bytes", str(4 << 20), "--seed", "3", "--output", "json"]
    command += ["--nproc-per-node", "1"]
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["operations"] > 0 and found["groups"] > 0
    assert [row["process"] for row in found["rows"]] == ["daemon 0", "daemon 1", *(f"rank {r}" for r in range(2))]


def test_trend():
    """A leak of 0.1 a second is seen through waves of 30 and bursts; waves and bursts alone are no growth."""
    draw = random.Random(7)
    times = [0.5 * index for index in range(1200)]
    waves = [
        200 + 15 * math.sin(2 * math.pi * t / 7) + draw.uniform(0, 5) + 100 * (draw.random() < 0.05) for t in times
    ]
    assert abs(growth(times, waves)) < 6
    leaking = [value + 0.1 * time for time, value in zip(times, waves, strict=True)]
    assert 20 < growth(times, leaking) < 60  # 45 are added after the warm-up


def test_trend_of_a_warm_up():
    """Memory that reaches its working size at the beginning does not leak."""
    times = [float(index) for index in range(100)]
    assert growth(times, [min(time, 20.0) for time in times]) == growth([], []) == 0.0


def service(*arguments, timeout_s):
    """The report of ``service.py``."""
    command = [sys.executable, str(HERE / "service.py"), "--seed", "11", "--output", "json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    found = json.loads(done.stdout)
    assert found["ok"] and found["jobs"] > 0
    return found


@pytest.mark.full
def test_a_service_for_some_seconds():
    service("--minutes", "0.1", "--pause", "1.5", timeout_s=280)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_service_for_five_minutes():
    found = service("--minutes", "5", timeout_s=1100)
    assert len(found["faults"]) == 8, found["faults"]
