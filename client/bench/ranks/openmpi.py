"""All-reduce of OpenMPI, a peer inside a host: ``mpirun`` starts this file once for each rank, beside the job.

A rank reads lines ``BYTES REPEATS`` from a pipe of its own and sleeps between them: ranks of OpenMPI that wait for each
other keep their cores busy. Rank 0 answers each line with nanoseconds per operation, of the slowest rank.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import time
from pathlib import Path

LIBRARY = "libmpi.so.40"  # of OpenMPI 3 to 5
DATATYPES = {
    "float32": ("float", 4),
    "float64": ("double", 8),
    "int32": ("int32_t", 4),
    "int64": ("int64_t", 8),
    "uint8": ("uint8_t", 1),
}
"""Names of MPI by ours, and bytes; it has no float16 and no bfloat16."""
FEW = 20  # repeats; fewer take so long that the first ones do not matter
IN_PLACE = ctypes.c_void_p(1)


def warm_ups(repeats: int) -> int:
    """The number of operations that come before so many that are timed, as in OSU's benchmarks: ranks that have just
    been woken share a core for a while, though another one is free."""
    return 2 * repeats if repeats >= FEW else 0


def missing() -> str:
    """Says which part of OpenMPI this machine lacks; empty if it is installed."""
    if shutil.which("mpirun") is None:
        return "there is no mpirun: install OpenMPI (apt install openmpi-bin)"
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return f"{error}: install OpenMPI (apt install openmpi-bin)"
    return ""


def command(folder: str, ranks: int, dtype: str, max_bytes: int) -> list[str]:
    """The command line that starts the ranks; ``folder`` holds a named pipe ``0``, ``1`` ... for each."""
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    return ["mpirun", *options, sys.executable, "-P", __file__, folder, dtype, str(max_bytes)]


def main(folder: str, dtype: str, max_bytes: str) -> None:
    """Serves one rank until its pipe is closed."""
    mpi = ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)

    def handle(name: str) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, f"ompi_mpi_{name}")))

    mpi.MPI_Init(None, None)
    world, total, most = handle("comm_world"), handle("op_sum"), handle("op_max")
    name, width = DATATYPES[dtype]
    datatype, int64 = handle(name), handle("int64_t")
    vector = ctypes.create_string_buffer(max(width, int(max_bytes)))
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    with Path(folder, str(rank)).open() as lines:
        for line in lines:
            nbytes, repeats = map(int, line.split())
            mpi.MPI_Barrier(world)
            started = 0
            for number in range(-warm_ups(repeats), repeats):
                if number == 0:
                    started = time.perf_counter_ns()
                mpi.MPI_Allreduce(IN_PLACE, vector, nbytes // width, datatype, total, world)
            took = ctypes.c_int64((time.perf_counter_ns() - started) // repeats)
            mpi.MPI_Allreduce(IN_PLACE, ctypes.byref(took), 1, int64, most, world)
            if rank == 0:
                print(took.value, flush=True)
    mpi.MPI_Finalize()


if __name__ == "__main__":
    main(*sys.argv[1:])
