"""Files of the engine include files of their own room and of rooms below it."""

import re
from pathlib import Path

ENGINE = Path(__file__).resolve().parents[3] / "csrc" / "core" / "engine"
ROOMS = ["values", "local", "remote", "job"]
"""From below."""


def test_includes_go_down():
    files = sorted(path for path in ENGINE.rglob("*") if path.suffix in (".h", ".cpp"))
    assert {path.parent.name for path in files} == set(ROOMS)
    up = [
        f"{path.name} includes {room}"
        for path in files
        for room in re.findall(r'#include "engine/(\w+)/', path.read_text())
        if ROOMS.index(room) > ROOMS.index(path.parent.name)
    ]
    assert not up
