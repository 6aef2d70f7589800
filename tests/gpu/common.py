"""Helpers of all sections: time on a device, what ranks keep, a process that has a limit."""

import json
import os
import socket
import statistics
import time
from pathlib import Path

import torch

KEPT = "BAGUA_GPU_KEPT"
"""Variable of a rank: the folder for what it has found so far."""


def keep(found):
    """Writes down what this rank has found until now: it counts if the rank does not come to its end in time."""
    path = Path(os.environ[KEPT], f"{os.environ['RANK']}.json")
    path.with_suffix(".new").write_text(json.dumps(found))
    os.replace(path.with_suffix(".new"), path)


def kept(folder, ranks):
    """The results of all ranks; nothing if one rank has none."""
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files] if all(file.exists() for file in files) else []


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_of(kind):
    """The GPU that this process was given; ranks share it where there are fewer."""
    if kind == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def seconds_per_turn(work, repeats, device):
    """Seconds of one ``work`` in a row of ``repeats``, until the device is done."""
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - begun) / repeats


def repeats_for(seconds, wanted_s, most=200):
    return max(1, min(most, int(wanted_s / max(seconds, 1e-7))))


def median(values):
    return statistics.median(values)


def free_port():
    """A TCP port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        return port
