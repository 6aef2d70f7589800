"""A rank of a test of the GPU leg, and how it talks with the test."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def say(**values: Any) -> None:
    """Tells the test something."""
    print(json.dumps(values), flush=True)


def pause() -> None:
    """Says that it is ready, and waits until the test lets it go on."""
    say(ready=True)
    sys.stdin.readline()


class Member:
    """A rank, its leg, and a stream of the user's. Memory of numpy counts as the device's."""

    def __init__(self, core: Any, device: Any, rank: Any, fakes: Any, me: int, hosts: list[list[int]]) -> None:
        self.core, self.device, self.rank, self.fakes, self.me, self.hosts = core, device, rank, fakes, me, hosts
        self.world = sum(len(there) for there in hosts)
        self.leg: Any = None
        self.stream = fakes.stream()

    def open(self, route: str = "", device: int = 0) -> Any:
        self.leg = self.device.Leg(rank=self.rank, device=device, hosts=self.hosts, me=self.me, route=route)
        return self.leg

    def submit(self, kind: str, src: Any, dst: Any, count: int, stream: int | None = None, **more: Any) -> int:
        dtype = more.pop("dtype", None) or str((src if src is not None else dst).dtype)
        op = self.core.OPS[more.pop("op", "SUM")]
        ticket: int = self.leg.submit(
            comm=more.pop("comm", 0),
            kind=self.core.KINDS[kind],
            dtype=self.core.DTYPES[dtype],
            op=op,
            count=count,
            src=0 if src is None else src.ctypes.data,
            dst=0 if dst is None else dst.ctypes.data,
            stream=self.stream if stream is None else stream,
            **more,
        )
        return ticket

    def finish(self, *tickets: int) -> None:
        """Waits on the stream, then drains it by means of the fake."""
        for ticket in tickets:
            self.leg.wait(ticket, self.stream)
            self.leg.release(ticket)
        self.fakes.drain(self.stream)

    def await_end(self, ticket: int) -> None:
        """Returns when the operation is done. Raises the leg's first error."""
        while not self.leg.done(ticket):
            time.sleep(0.001)
        if words := self.leg.error():
            raise self.device.DeviceError(words)

    def call(self, kind: str, src: Any, dst: Any, count: int, **more: Any) -> None:
        self.finish(self.submit(kind, src, dst, count, **more))

    def close(self) -> dict[str, int]:
        counters: dict[str, int] = self.leg.counters()
        self.fakes.cuda.fake_cuda_unwatch_this_thread()
        self.leg.close()
        self.leg.close()
        return counters
