"""The machine that the GPU tests run on: which Python has a torch that sees a GPU, and what else is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROBE_DEADLINE_S = 120.0
_PROBE = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "card": "", "arch": "", "nccl": ""}
if torch.cuda.is_available():
    found["card"] = torch.cuda.get_device_name(0)
    found["arch"] = "%d.%d" % torch.cuda.get_device_capability(0)
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
import grpc, google.protobuf, numpy
found["grpc"], found["protobuf"] = grpc.__version__, google.protobuf.__version__
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Machine:
    """``python``: the interpreter to use; ``card`` and ``arch`` ("9.0") of the GPU, "" without one."""

    python: str
    torch: str
    cuda: str
    card: str
    arch: str
    nccl: str
    grpc: str
    protobuf: str


class NoMachine(RuntimeError):
    """The tests can't run here. The message says why."""


def candidates() -> list[str]:
    """Interpreters that may have torch: this one, then those on the PATH."""
    names = (shutil.which(name) for name in ("python3", "python"))
    return list(dict.fromkeys([sys.executable, *(name for name in names if name)]))


def find(pythons: Sequence[str], gpu: bool = True) -> Machine:
    """The first Python that has torch, grpcio, protobuf and numpy (and sees a GPU). Raises NoMachine."""
    reasons = []
    for python in pythons:
        try:
            done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_DEADLINE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{python}: {error}")
            continue
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            reasons.append(f"{python}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
            continue
        machine = Machine(python, **json.loads(lines[-1]))
        if machine.card or not gpu:
            return machine
        kind = f"was built for CUDA {machine.cuda}" if machine.cuda else "was built without CUDA"
        reasons.append(f"{python}: torch {machine.torch} {kind} and sees no GPU")
    raise NoMachine("No GPU can be used here. " + "; ".join(reasons))


def memory_used_mib() -> int | None:
    """MiB in use on the card, by whatever process. None where nvidia-smi does not say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_memory(done.stdout)


def parse_memory(text: str) -> int | None:
    """The first card's number in what nvidia-smi printed."""
    first = text.strip().splitlines()[:1]
    return int(first[0]) if first and first[0].strip().isdigit() else None


def sanitizer() -> str | None:
    """The program compute-sanitizer: on the PATH, or in the CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [str(Path(home) / folder) for home in homes if home for folder in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places))
