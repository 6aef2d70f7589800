"""A rank with a GPU leg for the tests: ``python leg_rank.py '<json>'`` (see conftest.py). Prints JSON lines."""

import ctypes
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from leg_scripts.member import Member, say

from bagua.csrc import build


def load(name, path):
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path, loader=loader))
    loader.exec_module(module)
    return module


class Fakes:
    """Counters of the fake CUDA and NCCL in this process."""

    def __init__(self):
        self.cuda = ctypes.CDLL(os.environ["BAGUA_DEVICE_CUDART"])
        self.nccl = ctypes.CDLL(os.environ["BAGUA_DEVICE_NCCL"])
        for name in ("streams", "events", "allocated", "registered", "misuses", "host_synchronisations"):
            getattr(self.cuda, f"fake_cuda_{name}").restype = ctypes.c_uint64
        self.cuda.fake_cuda_first_misuse.restype = ctypes.c_char_p
        for name in ("communicators", "operations", "blocking", "misuses"):
            getattr(self.nccl, f"fake_nccl_{name}").restype = ctypes.c_uint64
        self.nccl.fake_nccl_first_misuse.restype = ctypes.c_char_p

    def stream(self):
        handle = ctypes.c_void_p()
        assert self.cuda.cudaStreamCreateWithPriority(ctypes.byref(handle), 1, 0) == 0
        return handle.value

    def drain(self, stream):
        self.cuda.fake_cuda_drain(ctypes.c_void_p(stream))

    def left(self):
        """Objects that exist on the device."""
        found = {
            name: getattr(self.cuda, f"fake_cuda_{name}")() for name in ("streams", "events", "allocated", "registered")
        }
        found["communicators"] = self.nccl.fake_nccl_communicators()
        found["threads"] = len(os.listdir("/proc/self/task"))
        return found

    def of_nccl(self):
        """Operations so far, and those of communicators that block."""
        return [self.nccl.fake_nccl_operations(), self.nccl.fake_nccl_blocking()]

    def misuse(self):
        found = []
        if self.cuda.fake_cuda_misuses():
            found.append(f"CUDA: {self.cuda.fake_cuda_first_misuse().decode()}")
        if self.nccl.fake_nccl_misuses():
            found.append(f"NCCL: {self.nccl.fake_nccl_first_misuse().decode()}")
        if self.cuda.fake_cuda_host_synchronisations():
            found.append(f"{self.cuda.fake_cuda_host_synchronisations()} waits of the host")
        return found


def main():
    task = json.loads(sys.argv[1])
    core = build._load(Path(task["core"]))
    device = load("bagua_device_native", task["device"])
    rank = core.Rank(data_socket=task["socket"], token=bytes.fromhex(task["token"]), rank=task["rank"])
    found = Fakes()
    test = Member(core, device, rank, found, task["rank"], task["hosts"])
    usual = dict(os.environ)
    for name, arguments, variables in task["cases"]:
        module, function = name.split(".")
        os.environ.update(variables)
        try:
            result = getattr(importlib.import_module(f"leg_scripts.{module}"), function)(test, **arguments)
            say(result=result, misuse=found.misuse())
        except Exception:
            say(raised=traceback.format_exc())
        for variable in variables:
            os.environ.pop(variable)
        os.environ.update(usual)
    sys.stdin.readline()  # the test ends it: nobody leaves while others still need it


if __name__ == "__main__":
    main()
