"""Helpers of all sections: their command line, time on a device, processes that run beside each other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

KEPT = "BAGUA_GPU_KEPT"
"""Variable of a rank: the folder for what it has found so far."""


def keep(found: Any) -> None:
    """Writes down what this rank has found until now: it counts if the rank does not come to its end in time."""
    path = Path(os.environ[KEPT], f"{os.environ['RANK']}.json")
    path.with_suffix(".new").write_text(json.dumps(found))
    os.replace(path.with_suffix(".new"), path)


def kept(folder: Path, ranks: int) -> list[Any]:
    """The results of all ranks; nothing if one rank has none."""
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files] if all(file.exists() for file in files) else []


def synchronize(device: torch.device) -> None:
    """Waits for all that the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_of(kind: str) -> torch.device:
    """The GPU that this process was given; ranks share it where there are fewer."""
    if kind == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def be_a_host_of_ones_own(rank: int) -> None:
    """NCCL refuses two ranks on one GPU of one host; with different names for the host it does not look, and goes
    through the network transport. Call it before NCCL is used."""
    os.environ["NCCL_HOSTID"] = f"host-{rank}"


def seconds_per_turn(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of one ``work`` in a row of ``repeats``, until the device is done."""
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - begun) / repeats


def repeats_for(seconds: float, wanted_s: float, most: int = 200) -> int:
    """How many turns of ``seconds`` fill ``wanted_s``."""
    return max(1, min(most, int(wanted_s / max(seconds, 1e-7))))


def median(values: Sequence[float]) -> float:
    """The median; rounds in which something else ran weigh nothing."""
    return statistics.median(values)


def free_port() -> int:
    """A TCP port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_beside(
    module: str, environment: Mapping[str, str], words: Sequence[Sequence[str]], limit_s: float, folder: Path
) -> list[str]:
    """Runs ``python -m <module>`` once for each list of words, all at the same time; returns their outputs.

    Raises RuntimeError, with the outputs, if one fails or the limit passes; then none is left."""
    started: list[tuple[subprocess.Popen[bytes], Path]] = []
    for index, arguments in enumerate(words):
        log = folder / f"{module.rpartition('.')[2]}-{index}.out"
        with log.open("wb") as output:
            command = [sys.executable, "-m", module, *arguments]
            process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=output, stderr=output, start_new_session=True
            )
        started.append((process, log))
    deadline = time.monotonic() + limit_s
    try:
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process, _ in started]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not over after {limit_s:.0f} s\n" + _tails(started)) from None
    finally:
        for process, _ in started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if any(codes):
        raise RuntimeError(f"exit codes {codes}\n" + _tails(started))
    return [log.read_text(errors="replace") for _, log in started]


def _tails(started: Sequence[tuple[Any, Path]]) -> str:
    return "\n".join(f"-- {log.name}\n{log.read_text(errors='replace')[-1200:]}" for _, log in started)
