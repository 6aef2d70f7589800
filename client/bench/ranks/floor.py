"""The shared-memory floor, measured beside the systems: a native program that rank 0 keeps (csrc/tools)."""

from __future__ import annotations

import subprocess
from types import TracebackType

from bagua.base.errors import BaguaError
from bagua.csrc.build_tool import build_tool


class MemoryFloor:
    """``memory_floor`` with ``ranks`` threads and vectors of up to ``max_bytes``."""

    def __init__(self, ranks: int, max_bytes: int) -> None:
        self._process = subprocess.Popen(
            [str(build_tool("memory_floor")), str(ranks), str(max_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BaguaError(f"The program that measures the floor ended with code {self._process.wait()}. [BG001]")
        return line.strip()

    def measure(self, nbytes: int, repeats: int) -> float:
        """Seconds per all-reduce of ``nbytes``, mean of ``repeats`` in a row."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{nbytes} {repeats}\n")
        self._process.stdin.flush()
        return int(self._answer()) / 1e9

    def close(self) -> None:
        """Ends the program that measures."""
        self._process.communicate()

    def __enter__(self) -> MemoryFloor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
