"""A rank with a GPU leg for the tests: ``python leg_rank.py '<json>'`` (see conftest.py). Prints JSON lines."""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from leg_scripts.member import Member, say

from bagua.csrc import build

TASK: dict[str, Any] = {}


def load(name: str, path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Fakes:
    """Counters of the fake CUDA and NCCL in this process."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL(os.environ["BAGUA_DEVICE_CUDART"])
        self.nccl = ctypes.CDLL(os.environ["BAGUA_DEVICE_NCCL"]) if os.environ["BAGUA_DEVICE_NCCL"] else None
        for name in ("streams", "events", "allocated", "registered", "contexts", "misuses", "host_synchronisations"):
            getattr(self.cuda, f"fake_cuda_{name}").restype = ctypes.c_uint64
        self.cuda.fake_cuda_first_misuse.restype = ctypes.c_char_p
        if self.nccl is not None:
            for name in ("communicators", "aborted", "operations", "blocking", "misuses"):
                getattr(self.nccl, f"fake_nccl_{name}").restype = ctypes.c_uint64
            self.nccl.fake_nccl_first_misuse.restype = ctypes.c_char_p

    def stream(self) -> int:
        handle = ctypes.c_void_p()
        assert self.cuda.cudaStreamCreateWithPriority(ctypes.byref(handle), 1, 0) == 0
        assert handle.value is not None
        return handle.value

    def drain(self, stream: int) -> None:
        self.cuda.fake_cuda_drain(ctypes.c_void_p(stream))

    def left(self) -> dict[str, int]:
        """Objects that exist on the device."""
        found = {
            name: getattr(self.cuda, f"fake_cuda_{name}")() for name in ("streams", "events", "allocated", "registered")
        }
        found["communicators"] = self.nccl.fake_nccl_communicators() if self.nccl else 0
        found["threads"] = len(os.listdir("/proc/self/task"))
        return found

    def of_nccl(self) -> dict[str, int]:
        """Operations so far, and those of communicators that block."""
        if self.nccl is None:
            return {}
        return {f"nccl_{name}": getattr(self.nccl, f"fake_nccl_{name}")() for name in ("operations", "blocking")}

    def misuse(self) -> list[str]:
        found = []
        if self.cuda.fake_cuda_misuses():
            found.append(f"CUDA: {self.cuda.fake_cuda_first_misuse().decode()}")
        if self.nccl is not None and self.nccl.fake_nccl_misuses():
            found.append(f"NCCL: {self.nccl.fake_nccl_first_misuse().decode()}")
        if self.cuda.fake_cuda_host_synchronisations():
            found.append(f"{self.cuda.fake_cuda_host_synchronisations()} waits of the host")
        return found


def main() -> None:
    TASK.update(json.loads(sys.argv[1]))
    module, function = TASK["script"].split(".")
    script = getattr(importlib.import_module(f"leg_scripts.{module}"), function)
    core = build._load(Path(TASK["core"]))
    device = load("bagua_device_native", TASK["device"])
    rank = core.Rank(data_socket=TASK["socket"], token=bytes.fromhex(TASK["token"]), rank=TASK["rank"])
    found = Fakes()
    try:
        test = Member(core, device, rank, found, TASK["rank"], TASK["hosts"])
        result = script(test, **TASK["arguments"])
        say(result=result, misuse=found.misuse())
    except Exception:
        say(raised=traceback.format_exc())
    sys.stdin.readline()  # the test ends it: nobody leaves while others still need it


if __name__ == "__main__":
    main()
