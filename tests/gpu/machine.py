"""The machine that the GPU tests run on: which Python has a torch that sees a GPU, and what else is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PROBE_DEADLINE_S = 120.0
_PROBE = """
import importlib, json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "card": "", "arch": "", "nccl": ""}
if torch.cuda.is_available():
    found["card"] = torch.cuda.get_device_name(0)
    found["arch"] = "%d.%d" % torch.cuda.get_device_capability(0)
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
for name, module in {"grpc": "grpc", "protobuf": "google.protobuf", "numpy": "numpy", "pytest": "pytest"}.items():
    try:
        found[name] = importlib.import_module(module).__version__
    except Exception:
        found[name] = ""
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Machine:
    """``python``: the interpreter to use; ``card`` and ``arch`` ("9.0") of the GPU, "" without one; versions, "" for
    what is not there. ``blind``: why torch does not see the card, "" if it does."""

    python: str
    torch: str
    cuda: str
    card: str
    arch: str
    nccl: str
    grpc: str
    protobuf: str
    numpy: str
    pytest: str
    blind: str = ""

    def lacking(self) -> dict[str, str]:
        """Requirements of sections that this machine does not have, and why."""
        missing = [name for name in ("grpc", "protobuf", "numpy", "pytest") if not getattr(self, name)]
        found = {name: f"{self.python} has no {name}" for name in missing}
        return {**found, "torch with CUDA": self.blind} if self.blind else found


class NoMachine(RuntimeError):
    """The tests can't run here. The message says why."""


def candidates() -> list[str]:
    """Interpreters that may have torch: this one, then those on the PATH."""
    names = (shutil.which(name) for name in ("python3", "python"))
    return list(dict.fromkeys([sys.executable, *(name for name in names if name)]))


def find(pythons: Sequence[str], gpu: bool = True) -> Machine:
    """The Python that has torch (which sees a GPU), and of the rest the most. Raises NoMachine.

    Where no torch sees a GPU that is there, some sections can run all the same."""
    reasons, found = [], []
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
        one = Machine(python, **json.loads(lines[-1]))
        if gpu and not one.card:
            kind = f"was built for CUDA {one.cuda}" if one.cuda else "was built without CUDA"
            one = replace(one, blind=f"{python}: torch {one.torch} {kind} and sees no GPU")
            reasons.append(one.blind)
        if (one.card or not gpu) and not one.lacking():
            return one
        found.append(one)
    card, arch = ("", "") if not gpu or any(one.card for one in found) else card_of_the_driver()
    found = [replace(one, card=card, arch=arch) if one.blind and card else one for one in found]
    fit = [one for one in found if one.card or not gpu]
    if not fit:
        raise NoMachine("No GPU can be used here. " + "; ".join(reasons))
    return min(fit, key=lambda one: len(one.lacking()) + 10 * bool(one.blind))


def _nvidia_smi(query: str) -> str:
    """Its answer; empty where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def card_of_the_driver() -> tuple[str, str]:
    """Name and architecture of the first card as nvidia-smi says them; empty without one."""
    first = (_nvidia_smi("name,compute_cap").strip().splitlines() or [""])[0]
    name, comma, arch = (part.strip() for part in first.rpartition(","))
    return (name, arch) if comma else ("", "")


def memory_used_mib() -> int | None:
    """MiB in use on the card, by whatever process. None where nvidia-smi does not say."""
    return parse_memory(_nvidia_smi("memory.used"))


def state() -> dict[str, str]:
    """Free memory of host and card, and the card's clocks: figures depend on them."""
    _, _, available = Path("/proc/meminfo").read_text().partition("MemAvailable:")
    found = {"host memory free": f"{int(available.split()[0]) >> 10} MiB"}
    said = (_nvidia_smi("memory.free,memory.total,clocks.sm,clocks.max.sm,driver_version").splitlines() or [""])[0]
    values = [part.strip() for part in said.split(",")]
    if len(values) == 5:
        free, total, clock, most, driver = values
        found["card memory free"] = f"{free} of {total} MiB"
        found["SM clock at the start"] = f"{clock} of {most} MHz"
        found["driver"] = driver
    return found


def parse_memory(text: str) -> int | None:
    """The first card's number in what nvidia-smi printed."""
    first = text.strip().splitlines()[:1]
    return int(first[0]) if first and first[0].strip().isdigit() else None


def sanitizer() -> str | None:
    """The program compute-sanitizer: on the PATH, or in the CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [str(Path(home) / folder) for home in homes if home for folder in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places))
