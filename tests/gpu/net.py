"""Section: NCCL's all-reduce between two ranks over Bagua-Net, beside NCCL's own sockets, in turns."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bagua.csrc
from bagua.base.net_plugin import NAME, variables
from gpu.common import free_port, median, run_beside
from gpu.findings import Findings, section
from gpu.net_rank import MARK
from gpu.section_options import options

SIZES = [1 << power for power in range(10, 29)]  # 1 KiB to 256 MiB
REHEARSED = [1 << 10, 1 << 16]
TURNS = 2
LARGE = 8 << 20
TARGET_LARGE, TARGET = 1.3, 1.0
TABLE = "all-reduce, 2 ranks on one card"
OneTurn = Callable[[dict[str, str], str, list[int], float], tuple[dict[str, Any], str]]
TARGETS = f"Targets: {TARGET} times at every size, {TARGET_LARGE} at 8 MiB and above."


def one_turn(environment: dict[str, str], device: str, sizes: list[int], limit_s: float) -> tuple[dict[str, Any], str]:
    """The measurements of both ranks (the slower one's time counts) and their output."""
    port = str(free_port())
    common = ["--port", port, "--device", "cuda" if device == "cuda" else "cpu"]
    common += ["--seconds", f"{limit_s:.0f}", "--sizes", *map(str, sizes)]
    with tempfile.TemporaryDirectory() as folder:
        outputs = run_beside(
            "gpu.net_rank",
            environment,
            [["--rank", str(rank), *common] for rank in range(2)],
            limit_s + 15,
            Path(folder),
        )
    found = [json.loads(text.partition(MARK)[2].splitlines()[0]) for text in outputs]
    seconds = {int(size): max(one["seconds"][size] for one in found) for size in found[0]["seconds"]}
    return {"right": all(one["right"] for one in found), "seconds": seconds}, "\n".join(outputs)


def networks(device: str) -> dict[str, dict[str, str]]:
    """A program's environment variables for each network."""
    if device != "cuda":
        return {"NCCL's sockets": {}, "Bagua-Net": {}}  # Gloo and the fakes know one network
    common = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "lo"}
    return {
        "NCCL's sockets": {**common, "NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"},
        "Bagua-Net": {**common, **variables(bagua.csrc.net_plugin(), os.environ)},
    }


def in_turns(findings: Findings, given: Any, table: str, turn: OneTurn) -> None:
    """Both networks in turns; ``turn`` measures one of them once."""
    begun = time.monotonic()
    sizes = SIZES if given.device == "cuda" else REHEARSED
    taken: dict[str, dict[int, list[float]]] = {}
    missed: list[str] = []
    for number in range(TURNS):
        for name, environment in networks(given.device).items():
            left = given.seconds - (time.monotonic() - begun)
            if number and left < given.seconds / 2 / TURNS:
                findings.note("Time sufficed for one turn only.")
                continue
            with findings.guarded(f"{name}, turn {number}"):
                found, words = turn(environment, given.device, sizes, max(10.0, left / 2))
                findings.check(f"{name}: the sum is right", found["right"])
                if found.get("stopped"):
                    findings.check(f"{name}: goes to its end", False, found["stopped"])
                if given.device == "cuda":
                    wanted = NAME if name == "Bagua-Net" else "Socket"
                    findings.check(f"{name}: NCCL uses it", f"Using network {wanted}" in words, words[-600:])
                for size, seconds in found["seconds"].items():
                    taken.setdefault(name, {}).setdefault(size, []).append(seconds)
        missed = compare(findings, table, taken)  # after each turn: a section that is stopped keeps its figures
    findings.note(f"{TARGETS} Missed: {missed or 'none'}.")


def compare(findings: Findings, table: str, taken: dict[str, dict[int, list[float]]]) -> list[str]:
    """A row for each size that both have, in the place of earlier ones; returns which targets were missed."""
    own, ours = taken.get("NCCL's sockets", {}), taken.get("Bagua-Net", {})
    missed = []
    findings.forget(table)
    for size in sorted(own.keys() & ours.keys()):
        before, now = median(own[size]), median(ours[size])
        target = TARGET_LARGE if size >= LARGE else TARGET
        if before / now < target:
            missed.append(f"{size} B: {before / now:.2f}")
        findings.row(
            table,
            bytes=size,
            **{"sockets us": before * 1e6, "Bagua-Net us": now * 1e6, "GB/s": size / now / 1e9, "times": before / now},
            target="met" if before / now >= target else "missed",
        )
    return missed


def work(findings: Findings, given: Any) -> None:
    """Both networks in turns, a process for each rank."""
    in_turns(findings, given, TABLE, one_turn)


if __name__ == "__main__":
    sys.exit(section("net", work, options(__doc__)))
