"""A rank that joined an engine."""

import json
import sys
from pathlib import Path

import numpy as np

from bagua.csrc import build

# The core of the test's process: sources that change meanwhile must not make every rank build.
core = build._load(Path(json.loads(sys.argv[1])["core"]))
SEGMENT = 4 << 20


def say(**values):
    print(json.dumps(values), flush=True)


def pause():
    sys.stdin.readline()


class Rank:
    """A joined rank with one segment for sources and one for destinations."""

    def __init__(self, task):
        self.rank = task["rank"]
        self.native = core.Rank(data_socket=task["socket"], token=bytes.fromhex(task["token"]), rank=self.rank)
        self.src, self.dst = self.native.alloc(SEGMENT), self.native.alloc(SEGMENT)

    def view(self, segment, count):
        return np.frombuffer(segment, dtype=np.float32, count=count)

    def start(self, kind, dtype="float32", **more):
        return self.native.submit(
            comm=more.pop("comm", 0), kind=core.KINDS[kind], dtype=core.DTYPES[dtype],
            op=core.OPS[more.pop("op", "SUM")], count=more.pop("count", 0), src=(self.src.id, more.pop("src", 0)),
            dst=(self.dst.id, 0), **more,
        )  # fmt: skip

    def run(self, kind, dtype="float32", **more):
        times = self.native.wait(self.start(kind, dtype, **more), 60.0)
        assert times is not None, f"{kind} took more than 60 s"
        return tuple(times)
