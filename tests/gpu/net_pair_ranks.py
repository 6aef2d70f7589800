"""Both ranks of the section ``net_pair``: NCCL's all-reduce over the environment's network, without torch. Prints a
JSON line.

Kernels of two processes take turns on a card, a time slice each; those of one process run at the same time, so that
what is measured is the network. NCCL takes two ranks on one card for hosts if their NCCL_HOSTID differs, and remembers
it for the process (since 2.25): each rank has a copy of the library of its own.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import queue
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np

from gpu.kernel_card import CudaMemory

MARK = "RESULT "
RANKS = 2
ROUNDS = 5
TURN_S = 0.03
MOST_REPEATS = 200
FLOAT, SUM = 7, 0
PATIENCE_S = 20.0
"""For all that comes before the first figure."""


class UniqueId(ctypes.Structure):
    """NCCL's, passed by value."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class Nccl:
    """A copy of NCCL in a file of its own. Raises RuntimeError with NCCL's words."""

    def __init__(self, original, folder):
        copied = folder / Path(original).name
        shutil.copyfile(original, copied)
        # Nothing of the other copy's (or of torch's, were it here) may stand in for a symbol of this one.
        self._library = ctypes.CDLL(str(copied), mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def call(self, name, *arguments):
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {self._library.ncclGetErrorString(code).decode()}")

    def unique_id(self):
        """For a new communicator."""
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return made

    def communicator(self, id, ranks, rank):
        """Returns when all ranks are there."""
        made = ctypes.c_void_p()
        self.call("ncclCommInitRank", ctypes.byref(made), ranks, id, rank)
        return made

    def remember_host(self, name):
        """It is this host from now on: a first communicator looks."""
        os.environ["NCCL_HOSTID"] = name
        self.end(self.communicator(self.unique_id(), 1, 0))

    def end(self, communicator):
        """Returns when all ranks have called it."""
        self.call("ncclCommFinalize", communicator)
        self.call("ncclCommDestroy", communicator)


def nccl_path():
    """The library that torch uses, or the system's. Raises RuntimeError."""
    places = [os.environ.get("BAGUA_DEVICE_NCCL", "")]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        places += map(str, Path(folder).glob("nccl/lib/libnccl.so.2"))
    places += map(str, Path("/usr/lib").glob("*-linux-gnu/libnccl.so.2"))
    found = [place for place in places if place and Path(place).is_file()]
    if not found:
        raise RuntimeError("No NCCL (libnccl.so.2) was found; name its file in BAGUA_DEVICE_NCCL.")
    return found[0]


class Pair:
    def __init__(self, folder):
        self.card = CudaMemory()
        original = nccl_path()
        self.copies = []
        for rank in range(RANKS):
            (folder / str(rank)).mkdir()
            self.copies.append(Nccl(original, folder / str(rank)))
            self.copies[rank].remember_host(f"host-{rank}")
        self.streams = [self.card.stream() for _ in range(RANKS)]
        self._meet = threading.Barrier(RANKS)
        id = self.copies[0].unique_id()
        self.communicators = self.both(lambda rank: self.copies[rank].communicator(id, RANKS, rank), PATIENCE_S)

    def both(self, work, limit_s):
        """``work`` of both ranks at the same time; what they return. Raises RuntimeError: one failed, or is not over
        in time, after which the process can only end."""
        came = queue.Queue()

        def body(rank):
            try:
                self.card.here()
                self._meet.wait(limit_s)
                came.put((rank, work(rank), None))
            except Exception as error:  # whatever it is: the other rank waits for this one
                came.put((rank, None, error))

        for rank in range(RANKS):
            threading.Thread(target=body, args=(rank,), daemon=True).start()
        until = time.monotonic() + limit_s
        results = {}
        while len(results) < RANKS:
            try:
                rank, value, error = came.get(timeout=max(0.1, until - time.monotonic()))
            except queue.Empty:
                late = min({*range(RANKS)} - {*results})
                raise RuntimeError(f"rank {late} is not over after {limit_s:.0f} s") from None
            if error is not None:
                raise RuntimeError(f"rank {rank}: {error}") from error
            results[rank] = value
        return [results[rank] for rank in range(RANKS)]

    def allreduce(self, rank, data, count):
        address = ctypes.c_void_p(data[rank])
        which = (self.communicators[rank], self.streams[rank])
        self.copies[rank].call("ncclAllReduce", address, address, ctypes.c_size_t(count), FLOAT, SUM, *which)

    def seconds(self, data, count, repeats, limit_s):
        """Of one all-reduce in a row, until both streams are done."""

        def row(rank):
            begun = time.perf_counter()
            for _ in range(repeats):
                self.allreduce(rank, data, count)
            self.card.wait(self.streams[rank])
            return (time.perf_counter() - begun) / repeats

        return max(self.both(row, limit_s))


def measure(pair, sizes, until):
    """Seconds of an all-reduce of so many bytes, and why it ended too early. Sizes for which there is no time are left
    out."""
    data = [pair.card.put(np.zeros(max(sizes) // 4, np.float32)) for _ in range(RANKS)]
    found = {}
    for size in sizes:
        left = max(1.0, until - time.monotonic())
        try:
            pair.seconds(data, size // 4, 2, left)
            once = pair.seconds(data, size // 4, 2, left)
            repeats = max(1, min(MOST_REPEATS, int(TURN_S / max(once, 1e-7))))
            if time.monotonic() + ROUNDS * repeats * once > until:
                break
            found[size] = float(np.median([pair.seconds(data, size // 4, repeats, left) for _ in range(ROUNDS)]))
        except RuntimeError as error:
            return found, f"{size} B: {error}"
    return found, ""


def right(pair):
    count = 1000
    data = [pair.card.put((rank + 1) * np.arange(count, dtype=np.float32)) for rank in range(RANKS)]
    pair.seconds(data, count, 1, PATIENCE_S)
    wanted = RANKS * (RANKS + 1) / 2 * np.arange(count)
    return all(bool((pair.card.get(address, np.float32, count) == wanted).all()) for address in data)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes")
    parser.add_argument("--folder", type=Path, required=True, help="for copies of NCCL")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    code = 1
    try:
        pair = Pair(options.folder)
        good = right(pair)
        seconds, stopped = measure(pair, options.sizes, until)
        print(MARK + json.dumps({"right": good, "seconds": seconds, "stopped": stopped}), flush=True)
        if not stopped:
            pair.both(lambda rank: pair.copies[rank].end(pair.communicators[rank]), PATIENCE_S)
        code = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)  # a thread that still waits, or a kernel, would keep the process from its end


if __name__ == "__main__":
    main()
