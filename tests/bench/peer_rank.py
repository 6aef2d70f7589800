"""One rank of ``peers.py``: measures all-reduce (sum, float32, in place) of one system.

``peer_rank.py PEER RESULT SIZES``
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

WARM_UP = 3
FEWEST, MOST, BYTES_PER_SIZE = 7, 100, 256 << 20

Reduce = Callable[[], Any]
System = tuple[int, Callable[[int], Reduce], Callable[[], Any], Callable[[], Any]]
"""Rank, a function that makes the all-reduce of so many elements, a barrier, an end."""


def environment():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def bagua():
    import bagua.torch_api as bagua

    bagua.init_process_group()

    def make(count):
        tensor = bagua.empty(count)
        return lambda: bagua.allreduce_inplace(tensor)

    return bagua.get_rank(), make, bagua.barrier, bagua.destroy_process_group


def gloo():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def make(count):
        tensor = torch.zeros(count)
        return lambda: dist.all_reduce(tensor)

    return dist.get_rank(), make, dist.barrier, dist.destroy_process_group


def openmpi():
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def make(count):
        tensor = np.zeros(count, np.float32)
        return lambda: world.Allreduce(MPI.IN_PLACE, tensor)

    return world.Get_rank(), make, world.Barrier, lambda: None


def torchft():
    import torch
    from torch.distributed import TCPStore
    from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp
    from torchft.process_group import ProcessGroupGloo

    rank, world = environment()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=rank == 0, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=timedelta(seconds=60))
    group.configure(f"{address}:{port}/peers", "replica", rank, world)
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.SUM

    def make(count):
        tensor = torch.zeros(count)
        return lambda: group.allreduce([tensor], options).wait()

    barrier = make(1)
    return rank, make, barrier, lambda: store  # the store lives as long as the function


def horovod():
    import horovod.torch as hvd
    import torch

    hvd.init()

    def make(count):
        tensor = torch.zeros(count)
        return lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=f"t{count}")

    return hvd.rank(), make, make(1), hvd.shutdown


SYSTEMS = {"bagua": bagua, "gloo": gloo, "openmpi": openmpi, "torchft": torchft, "horovod": horovod}


def median_ms(reduce, barrier, nbytes):
    """Median of single operations, each after a barrier. All ranks do equally many, so the size says how many."""
    times = []
    for number in range(WARM_UP + max(FEWEST, min(MOST, BYTES_PER_SIZE // nbytes))):
        barrier()
        began = time.perf_counter()
        reduce()
        if number >= WARM_UP:
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def main():
    peer, result, sizes = sys.argv[1], Path(sys.argv[2]), [int(text) for text in sys.argv[3].split(",")]
    rank, make, barrier, end = SYSTEMS[peer]()
    found = {nbytes: median_ms(make(nbytes // 4), barrier, nbytes) for nbytes in sizes}
    if rank == 0:
        result.write_text(json.dumps(found))
    barrier()
    end()


if __name__ == "__main__":
    main()
