"""The allocator's thresholds of a rank that no daemon started."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest

CODE = """
import ctypes, pathlib, sys, types
import bagua

package = types.ModuleType("bagua.torch_api")  # in place of the real one, which takes two seconds to import torch
package.__path__ = [str(pathlib.Path(bagua.__file__).with_name("torch_api"))]
sys.modules[package.__name__] = package
from bagua.torch_api.join.malloc import keep_memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
keep_memory()
before = libc.mallinfo2().hblks
libc.malloc.restype = ctypes.c_void_p
libc.malloc(ctypes.c_size_t(100 << 20))
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc")
@pytest.mark.parametrize(
    ("setting", "mapped"),
    [({}, 0), ({"MALLOC_MMAP_THRESHOLD_": "1000000"}, 1), ({"BAGUA_KEEP_MEMORY": "0"}, 1)],
    ids=["ours", "the user's", "off"],
)
def test_large_blocks_come_from_the_heap_unless_the_user_says_otherwise(setting: dict[str, str], mapped: int) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={**clean, **setting}, capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) == mapped
