"""The machine that the GPU tests run on: the card, what Python has, programs of NVIDIA's."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

NEEDED = ("torch", "numpy", "grpc", "google.protobuf", "ninja", "pytest")
_PROBE = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "card": "", "arch": "", "nccl": ""}
if torch.cuda.is_available():
    found["card"] = torch.cuda.get_device_name(0)
    found["arch"] = "%d.%d" % torch.cuda.get_device_capability(0)
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""


class NoMachine(RuntimeError):
    """The tests can't run here. The message says why."""


def _has(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def find(gpu=True):
    """Versions, and name and architecture ("9.0") of the card, "" without one. Raises NoMachine."""
    missing = [name for name in NEEDED if not _has(name)]
    if missing:
        raise NoMachine(f"{sys.executable} has no {', '.join(missing)}.")
    # A process of its own: it would hold a context on the card.
    found = json.loads(subprocess.check_output([sys.executable, "-c", _PROBE], text=True, timeout=600))
    if gpu and not found["card"]:
        kind = f"was built for CUDA {found['cuda']}" if found["cuda"] else "was built without CUDA"
        raise NoMachine(f"No GPU can be used here. torch {found['torch']} {kind} and sees no GPU.")
    return found


def _nvidia_smi(query):
    """Its answer; empty where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def memory_used_mib():
    """MiB in use on the first card, by whatever process. None where nvidia-smi does not say."""
    first = _nvidia_smi("memory.used").strip().splitlines()[:1]
    return int(first[0]) if first and first[0].strip().isdigit() else None


def state():
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


def sanitizer():
    """The program compute-sanitizer: on the PATH, or in the CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [str(Path(home) / folder) for home in homes if home for folder in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places))
