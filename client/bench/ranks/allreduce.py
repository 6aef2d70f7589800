"""All-reduce: Bagua on memory of buckets or ordinary tensors, with and without codecs, Gloo and OpenMPI in turns."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.algorithms.codec import Codec
from bagua.base.errors import BaguaError
from bagua.bench.ranks import harness, openmpi
from bagua.bench.units import size_text
from bagua.csrc import load
from bagua.csrc.build_tool import build_tool
from bagua.tuning.network import Network

FLOOR = "floor"
OPENMPI = "openmpi"
TURN_S = 0.02  # operations that take less are repeated within a turn
MOST_REPEATS = 100
WRONG_ABOVE = 0.999  # relative L2 error of a codec's result above which it is no result


class System:
    """System that does the operation, on a vector of its own."""

    def __init__(self, memory: str, codec: str, count: int, dtype: torch.dtype) -> None:
        self.gloo = memory == harness.GLOO
        self.codec = codec
        self.tensor = bagua.empty(count, dtype=dtype) if memory == "bucket" else torch.zeros(count, dtype=dtype)
        self.repeats = 1
        torch.manual_seed(1)  # the same vector on all ranks
        # With AVG over equal vectors the result is the vector itself: it can be checked, and nothing overflows.
        self.start = torch.randn(count).to(dtype) if dtype.is_floating_point else torch.ones(count, dtype=dtype)

    def operate(self) -> None:
        if self.gloo:
            torch.distributed.all_reduce(self.tensor)
        else:
            codec = None if self.codec == "none" else self.codec
            bagua.allreduce_inplace(self.tensor, op=bagua.ReduceOp.AVG, codec=codec)

    def reset(self) -> None:
        """Fills the vector: equal on all ranks, zeros for Gloo, whose sums would grow without end."""
        if self.gloo:
            self.tensor.zero_()
        else:
            self.tensor.copy_(self.start)

    def check(self) -> None:
        """Raises BaguaError if the result of the last operation can't be right."""
        if self.gloo:
            return
        # Float32 would lose digits in sums of so many squares.
        wrong = (self.tensor.double() - self.start.double()).norm() / self.start.double().norm()
        bound = 1e-2 if self.codec == "none" else WRONG_ABOVE
        if not wrong.item() <= bound:  # "not": NaN is wrong, too
            raise BaguaError(
                f"The result of {self.codec} over {len(self.tensor)} elements is wrong: {wrong.item()}. [BG001]"
            )

    def turn(self) -> float:
        """Seconds per operation of the slowest rank."""
        self.reset()
        bagua.barrier()  # waiting for late ranks is no part of the time
        self._operate(openmpi.warm_ups(self.repeats))
        return harness.slowest(harness.seconds(lambda: self._operate(self.repeats)) / self.repeats)

    def _operate(self, repeats: int) -> None:
        for _ in range(repeats):
            self.operate()

    def warm_up(self) -> None:
        """Checks the operation once, and finds how many make a turn."""
        self.turn()
        self.check()
        # The second turn: in the first one everything is new.
        self.repeats = max(1, min(MOST_REPEATS, int(TURN_S / self.turn())))


class OtherProgram:
    """A program that measures beside the job, on vectors of its own. It reads lines ``BYTES REPEATS``, answers each
    with nanoseconds, and ends when its input ends."""

    def __init__(self, name: str, command: Sequence[str], inputs: Sequence[int] | None = None) -> None:
        """``inputs``: descriptors that lines are written to; None: its standard input."""
        self._name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        self._inputs = [self._process.stdin.fileno()] if inputs is None else list(inputs)
        self._own = inputs is not None

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BaguaError(f"The program that measures {self._name} ended with code {self._process.wait()}. [BG001]")
        return line.strip()

    def measure(self, nbytes: int, repeats: int) -> float:
        """Seconds per all-reduce of ``nbytes``, mean of ``repeats`` in a row."""
        for descriptor in self._inputs:
            os.write(descriptor, f"{nbytes} {repeats}\n".encode())
        return int(self._answer()) / 1e9

    def close(self) -> None:
        """Ends the program."""
        for descriptor in self._inputs if self._own else ():
            os.close(descriptor)
        self._process.communicate()  # closes its standard input


class MemoryFloor(OtherProgram):
    """Shared-memory floor: a native program (csrc/tools) with ``ranks`` threads and vectors of up to ``max_bytes``."""

    def __init__(self, ranks: int, max_bytes: int) -> None:
        super().__init__("the floor", [str(build_tool("memory_floor")), str(ranks), str(max_bytes)])
        self._answer()


class OpenMPI(OtherProgram):
    """Ranks of OpenMPI, asked through one named pipe each."""

    def __init__(self, ranks: int, dtype: str, max_bytes: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            pipes = [Path(folder) / str(rank) for rank in range(ranks)]
            for pipe in pipes:
                os.mkfifo(pipe)
            # Read as well, so that opening waits for nobody.
            inputs = [os.open(pipe, os.O_RDWR | os.O_CLOEXEC) for pipe in pipes]
            super().__init__("OpenMPI", openmpi.command(folder, ranks, dtype, max_bytes), inputs)
            self.measure(1, 1)  # all have opened their pipes


def measure_size(config: dict[str, Any], nbytes: int, others: Mapping[str, OtherProgram]) -> dict[str, float]:
    """Median seconds of every system and of the other programs. Rank 0 alone runs those; others report 0."""
    dtype = getattr(torch, config["dtype"])
    count = max(1, nbytes // dtype.itemsize)
    systems = {s["name"]: System(s["memory"], s["codec"], count, dtype) for s in ours(config)}
    for system in systems.values():
        system.warm_up()
    variants: dict[str, Callable[[], float]] = {name: system.turn for name, system in systems.items()}
    repeats = max(1, min(MOST_REPEATS, (64 << 20) // nbytes))

    def turn_of(name: str) -> float:
        # The other ranks stand in a barrier meanwhile.
        found = others[name].measure(count * dtype.itemsize, repeats) if others else 0.0
        bagua.barrier()
        return found

    for name in other_programs(config):
        variants[name] = functools.partial(turn_of, name)
    return harness.medians(harness.interleave(variants, config["seconds"], config["rounds"]))


def ours(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Systems that run in the ranks of the job."""
    return [system for system in config["systems"] if system["name"] != OPENMPI]


def other_programs(config: dict[str, Any]) -> list[str]:
    """Names of programs that measure beside the job, inside one host."""
    if config["nodes"] > 1:
        return []
    return [FLOOR, *(system["name"] for system in config["systems"] if system["name"] == OPENMPI)]


def wire_bytes(nbytes: int, codec: str, hosts: int) -> float:
    """Bytes that one host must send: 2(h-1)/h of the vector, as it is encoded."""
    whole = nbytes
    if codec != "none":
        core = load()
        whole = core.encoded_bytes(core.CODECS[codec], nbytes // 4, Codec(codec).density_units)
    return 2 * (hosts - 1) / hosts * whole


def measure(config: dict[str, Any]) -> dict[str, Any] | None:
    """Seconds and floors of every size and system."""
    if any(system["memory"] == harness.GLOO for system in config["systems"]):
        harness.start_gloo()
    sizes, hosts = config["sizes"], config["nodes"]
    ranks, network = bagua.get_world_size(), Network(config["rate"], config["delay_s"])
    makes: dict[str, Callable[[], OtherProgram]] = {
        FLOOR: lambda: MemoryFloor(ranks, max(sizes)),
        OPENMPI: lambda: OpenMPI(ranks, config["dtype"], max(sizes)),
    }
    with ExitStack() as stack:
        others: dict[str, OtherProgram] = {}
        for name in other_programs(config) if bagua.get_rank() == 0 else ():
            others[name] = stack.enter_context(closing(makes[name]()))
        rows = []
        for step, nbytes in enumerate(sizes):
            harness.progress(step, len(sizes), size_text(nbytes))
            found = measure_size(config, nbytes, others)
            memory_floor = found.pop(FLOOR, 0.0)
            for system in config["systems"]:
                bound = memory_floor
                if config["emulated"]:
                    bound = network.floor_s(wire_bytes(nbytes, system["codec"], hosts), 1)
                rows.append({"system": system["name"], "bytes": nbytes, "s": found[system["name"]], "floor_s": bound})
        harness.progress(len(sizes), len(sizes), "done")
    harness.stop_gloo()
    return {"rows": rows}


if __name__ == "__main__":
    harness.run(measure)
