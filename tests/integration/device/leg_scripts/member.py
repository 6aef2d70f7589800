"""A rank of a test of the GPU leg, and how it talks with the test."""

import json
import sys
import time


def say(**values):
    """Tells the test something."""
    print(json.dumps(values), flush=True)


def pause():
    """Says that it is ready, and waits until the test lets it go on."""
    say(ready=True)
    sys.stdin.readline()


class Member:
    """A rank, its leg, and a stream of the user's. Memory of numpy counts as the device's."""

    def __init__(self, core, device, rank, fakes, me, hosts):
        self.core, self.device, self.rank, self.fakes, self.me, self.hosts = core, device, rank, fakes, me, hosts
        self.world = sum(len(there) for there in hosts)
        self.leg = None
        self.stream = fakes.stream()

    def open(self, route="", device=0):
        self.leg = self.device.Leg(rank=self.rank, device=device, hosts=self.hosts, me=self.me, route=route)
        return self.leg

    def submit(self, kind, src, dst, count, stream=None, **more):
        dtype = more.pop("dtype", None) or str((src if src is not None else dst).dtype)
        places = {"src": 0 if src is None else src.ctypes.data, "dst": 0 if dst is None else dst.ctypes.data}
        return self.leg.submit(
            comm=more.pop("comm", 0),
            kind=self.core.KINDS[kind],
            dtype=self.core.DTYPES[dtype],
            op=self.core.OPS[more.pop("op", "SUM")],
            count=count,
            stream=self.stream if stream is None else stream,
            **places,
            **more,
        )

    def finish(self, *tickets):
        """Waits on the stream, then drains it by means of the fake."""
        for ticket in tickets:
            self.leg.wait(ticket, self.stream)
            self.leg.release(ticket)
        self.fakes.drain(self.stream)

    def await_end(self, ticket):
        """Returns when the operation is done. Raises the leg's first error."""
        while not self.leg.done(ticket):
            time.sleep(0.001)
        if words := self.leg.error():
            raise self.device.DeviceError(words)

    def words_of(self, call):
        """The words of the leg's error; empty if there is none."""
        try:
            call()
        except self.device.DeviceError as error:
            return str(error)
        return ""

    def call(self, kind, src, dst, count, **more):
        self.finish(self.submit(kind, src, dst, count, **more))

    def close(self):
        counters = self.leg.counters()
        self.fakes.cuda.fake_cuda_unwatch_this_thread()
        self.leg.close()
        self.leg.close()
        return counters
