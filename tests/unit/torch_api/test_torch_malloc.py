"""The allocator's thresholds of a rank that no daemon started."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest

PRELUDE = """
import ctypes, pathlib, sys, types
import bagua

package = types.ModuleType("bagua.torch_api")  # in place of the real one, which takes two seconds to import torch
package.__path__ = [str(pathlib.Path(bagua.__file__).with_name("torch_api"))]
sys.modules[package.__name__] = package
from bagua.torch_api.job.malloc import HeapTrimmer, keep_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
"""
THRESHOLDS = """
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc.mallinfo2.restype = Info
keep_memory()
before = libc.mallinfo2().hblks
libc.malloc(ctypes.c_size_t(100 << 20))
print(libc.mallinfo2().hblks - before)
"""
HOLES = """
MIB = 1 << 20
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def block(mebibytes):
    address = libc.malloc(ctypes.c_size_t(mebibytes * MIB))
    libc.memset(address, 1, mebibytes * MIB)
    return address

keep_memory()
trimmer = HeapTrimmer()
trimmer.NS_PER_BYTE = 0
trimmer.after_pass()
before = trimmer._resident()
freed = block(100)
above = block(1)
libc.free(freed)  # a hole
trimmer.after_pass()
print("unused", (trimmer._resident() - before) // MIB)
for _ in range(trimmer.TRIES + 2):
    used = block(90)
    libc.free(used)  # the same hole, in use by each pass
    held = trimmer._resident()
    trimmer.after_pass()
    print("used", (held - trimmer._resident()) // MIB)
"""
needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc"
)


def run(code, setting):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PRELUDE + code]
    return subprocess.run(
        command, env={**clean, **setting}, stdout=subprocess.PIPE, text=True, timeout=120, check=True
    ).stdout


@needs_glibc
@pytest.mark.parametrize(
    ("setting", "mapped"),
    [({}, 0), ({"MALLOC_MMAP_THRESHOLD_": "1000000"}, 1), ({"BAGUA_KEEP_MEMORY": "0"}, 1)],
    ids=["ours", "the user's", "off"],
)
def test_large_blocks_come_from_the_heap_unless_the_user_says_otherwise(setting, mapped):
    assert int(run(THRESHOLDS, setting)) == mapped


@needs_glibc
def test_a_hole_goes_back_and_one_in_use_stays():
    lines = [line.split() for line in run(HOLES, {}).splitlines()]
    unused, *used = [int(mebibytes) for _, mebibytes in lines]
    assert unused < 20
    assert all(mebibytes > 70 for mebibytes in used[:3]) and used[-1] < 20, used
