"""A rank: joins an engine and does what the lines on its standard input say; one JSON line answers each.

``python rank.py '<json>'`` with {"core" (path), "socket", "token" (hex), "rank", "world", "hosts"}. Commands are
methods of ``Rank`` whose names begin with ``do_``.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # whatever PYTHONSAFEPATH says

import numpy as np

from bagua.csrc import build
from plane import codecs, reference
from plane.cases import EDGE, GETS_ALL, GIVES_ALL, REDUCING
from plane.reference import SIZE, STORED

DEADLINE_S = 120.0
BLOCK = 1 << 20  # elements that are compared at once
WHOLE = 1 << 16  # elements up to which every rank checks all of a result; of more, each rank its share
GUARD = 0xA5


class Rank:
    def __init__(self, task):
        # The core of the starting process: sources that change meanwhile must not make every rank build.
        self.core = build._load(Path(task["core"]))
        self.rank = task["rank"]
        self.world = task["world"]
        self.hosts = task["hosts"]
        self.native = self.core.Rank(
            data_socket=task["socket"], token=bytes.fromhex(task["token"]), rank=self.rank, timeout_s=30.0
        )
        self.src = None
        self.dst = None
        self.stop = threading.Event()

    # ---- memory

    def do_alloc(self, nbytes):
        """Two segments in place of the two before; their numbers."""
        self.do_free()
        self.src, self.dst = self.native.alloc(nbytes), self.native.alloc(nbytes)
        return {"segments": [self.src.id, self.dst.id]}

    def do_free(self):
        for segment in (self.src, self.dst):
            if segment is not None:
                self.native.free(segment.id)
        self.src = self.dst = None
        return {}

    def view(self, segment, dtype, count, offset):
        return np.frombuffer(segment, dtype=STORED[dtype], count=count, offset=offset)

    # ---- operations

    def submit(self, kind, dtype="float32", *, op="SUM", **more):
        if "codec" in more:
            more["codec"] = self.core.CODECS[more["codec"]]
        return self.native.submit(
            comm=0, kind=self.core.KINDS[kind], dtype=self.core.DTYPES[dtype], op=self.core.OPS[op], **more
        )

    def wait(self, ticket):
        assert self.native.wait(ticket, DEADLINE_S) is not None, f"an operation took more than {DEADLINE_S} s"

    def do_cases(self, cases, check=True):
        """Runs the cases in order: what is wrong, the digest of every result, the largest share of a bound used."""
        wrong = []
        digests = []
        share = 0.0
        for case in cases:
            text, digest, used = Operation(self, case).run(check)
            wrong += [text] if text else []
            digests.append(digest)
            share = max(share, used)
        return {"wrong": wrong[:5], "digests": digests, "share": share}

    # ---- load until a line ends it

    def do_load(self, nbytes, depth=4):
        """All-reduces of ``nbytes``, ``depth`` in flight, until this or another rank was told to stop; every result is
        checked. Answers {"began": true} when the first is done, and at the end how many there were."""
        self.do_alloc(depth * nbytes + 4096)
        values = reference.table("int32", "SUM", False)
        count, done, wrong, told = nbytes // 4, 0, 0, False
        sources = [self.view(self.src, "int32", count, slot * nbytes) for slot in range(depth)]
        results = [self.view(self.dst, "int32", count, slot * nbytes) for slot in range(depth)]
        want = np.zeros(count, np.int32)
        for rank in range(self.world):
            want += reference.window(0, count, rank, 0, values)
        for source in sources:
            reference.fill(source, 0, self.rank, 0, values)
        self.stop.clear()
        listener = threading.Thread(target=self.stop_after_a_line, daemon=True)
        listener.start()
        while not told:
            tickets = [
                self.submit(
                    "allreduce", "int32", count=count, src=(self.src.id, slot * nbytes),
                    dst=(self.dst.id, slot * nbytes), label=f"load {done + slot}",
                )
                for slot in range(depth)
            ]  # fmt: skip
            for slot, ticket in enumerate(tickets):
                while self.native.wait(ticket, 1.0) is None:
                    pass
                wrong += not np.array_equal(results[slot], want)
                results[slot][:: max(1, count // 64)] = 0
            done += depth
            if done == depth:
                say(began=True)
            told = self.agreed()
        listener.join()  # every rank gets its line
        return {"done": done, "wrong": int(wrong)}

    def stop_after_a_line(self):
        sys.stdin.readline()
        self.stop.set()

    def agreed(self):
        """True on all ranks if one of them was told to stop."""
        place = self.src.nbytes - 64
        flag = self.view(self.src, "uint8", 1, place)
        flag[0] = self.stop.is_set()
        ticket = self.submit(
            "allreduce", "uint8", op="MAX", count=1, src=(self.src.id, place), dst=(self.src.id, place)
        )
        while self.native.wait(ticket, 1.0) is None:
            pass
        return bool(flag[0])

    def do_leave(self):
        self.do_free()
        self.native.close()
        return {}


class Operation:
    """One case at one rank."""

    def __init__(self, rank, case):
        self.rank, self.case = rank, case
        self.kind, self.dtype, self.op = case["kind"], case["dtype"], case["op"]
        self.n, self.me = rank.world, rank.rank
        self.count, self.seed, self.root = case["count"], case["seed"], case["root"]
        self.values = reference.table(self.dtype, self.op, case["special"])
        at_root = self.root in (-1, self.me)
        one_gives = self.kind not in ("broadcast", "scatter") or at_root
        one_gets = self.kind not in ("reduce", "gather") or at_root
        self.gives = (self.n if self.kind in GIVES_ALL else 1) * one_gives * self.count
        self.gets = (self.n if self.kind in GETS_ALL else 1) * one_gets * self.count
        self.place()

    def place(self):
        """Where source and result lie, as (segment, byte offset)."""
        rank, case, block = self.rank, self.case, self.me * self.count * SIZE[self.dtype]
        self.src_at, self.dst_at = case["src_at"], case["dst_at"]
        self.target = rank.dst
        if case["in_place"]:
            self.target = rank.src
            self.dst_at = self.src_at
            if self.gets > self.gives > 0 and self.kind in GETS_ALL:
                self.src_at += block
            elif self.gives > self.gets > 0 and self.kind in GIVES_ALL:
                self.dst_at += block

    def run(self, check):
        """(what is wrong, digest of the result, largest error as a share of its bound)."""
        rank, nbytes = self.rank, self.gets * SIZE[self.dtype]
        source = rank.view(rank.src, self.dtype, self.gives, self.src_at)
        result = rank.view(self.target, self.dtype, self.gets, self.dst_at)
        begin, end = self.dst_at - EDGE, self.dst_at + nbytes + EDGE
        apart = not self.case["in_place"]
        if apart:
            edges = [rank.view(self.target, "uint8", EDGE, at) for at in (begin, end - EDGE)]
            result.view(np.uint8)[:] = GUARD
            for edge in edges:
                edge[:] = GUARD
        reference.fill(source, 0, rank.rank, self.seed, self.values)
        self.execute()
        digest = rank.core.crc32c(result.view(np.uint8)) if self.gets else 0
        text, share = self.check(result) if check else ("", 0.0)
        if apart and not all((edge == GUARD).all() for edge in edges):
            text = text or "bytes beside the result were written"
        if apart and check and not self.unchanged(source):
            text = text or "the source was changed"
        return (f"{self.case}: rank {rank.rank}: {text}" if text else ""), digest, share

    def execute(self):
        rank = self.rank
        common = {"count": self.count, "shape": (self.count,), "label": f"case {self.seed}"}
        src, dst = (rank.src.id, self.src_at), (self.target.id, self.dst_at)
        if self.kind == "ring":
            tickets = [
                rank.submit("send", self.dtype, src=src, root=(self.me + 1) % self.n, **common),
                rank.submit("recv", self.dtype, dst=dst, root=(self.me - 1) % self.n, **common),
            ]
        else:
            coded = {key: self.case[key] for key in ("codec", "density", "exact") if key in self.case}
            tickets = [
                rank.submit(self.kind, self.dtype, op=self.op, root=self.root, src=src, dst=dst, **common, **coded)
            ]
        for ticket in tickets:
            rank.wait(ticket)

    def unchanged(self, source):
        first, last = self.share_of(self.gives)
        was = reference.window(first, last - first, self.rank.rank, self.seed, self.values)
        return bool(np.array_equal(source[first:last].view(np.uint8), was.view(np.uint8)))

    def share_of(self, length):
        """The part of a long vector that this rank checks: others check the rest, and digests must be equal."""
        if length <= WHOLE:
            return 0, length
        return length * self.me // self.n, length * (self.me + 1) // self.n

    def check(self, result):
        shared = self.kind in ("allreduce", "broadcast", "allgather")
        first, last = self.share_of(self.gets) if shared else (0, self.gets)
        largest = 0.0
        for begin in range(first, last, BLOCK):
            end = min(last, begin + BLOCK)
            want, allowed = self.expect(begin, end)
            got = reference.from_bits(result[begin:end], self.dtype)
            index, share = reference.compare(got, want, allowed)
            largest = max(largest, share)
            if index >= 0:
                return f"element {begin + index} is {got[index]!r}, not {want[index]!r}", largest
        return "", largest

    def expect(self, begin, end):
        """The right elements [begin, end) of this rank's result, and how far from them they may lie."""
        if self.case.get("codec") and len(self.rank.hosts) > 1:
            return self.expect_coded(begin, end)
        if self.kind in REDUCING:
            shift = self.me * self.count if self.kind == "reduce_scatter" else 0
            parts = [reference.window(begin + shift, end - begin, r, self.seed, self.values) for r in range(self.n)]
            want, magnitude = reference.reduced(parts, self.op, self.dtype)
            return want, reference.bound(self.dtype, self.op, self.n, len(self.rank.hosts), want, magnitude)
        bits = np.empty(end - begin, STORED[self.dtype])
        for at, length, rank, first in self.moved():
            low, high = max(at, begin), min(at + length, end)
            if low < high:
                reference.fill(bits[low - begin : high - begin], first + low - at, rank, self.seed, self.values)
        return reference.from_bits(bits, self.dtype), np.zeros(end - begin)

    def expect_coded(self, begin, end):
        """The same for what crosses between hosts encoded; its last ``exact`` elements cross as they are."""
        low, high = max(0, begin - codecs.WIDEST), min(self.count, end + codecs.WIDEST)
        parts = [reference.window(low, high - low, r, self.seed, self.values) for r in range(self.n)]
        want, magnitude = reference.reduced(parts, self.op, self.dtype)
        allowed = reference.bound(self.dtype, self.op, self.n, len(self.rank.hosts), want, magnitude)
        partials = [np.sum([parts[rank].astype(np.float64) for rank in host], axis=0) for host in self.rank.hosts]
        coded = self.count - self.case.get("exact", 0) - low  # so many of the window
        divisor = self.n if self.op == "AVG" else 1
        allowed[:coded] += codecs.all_reduce_bound(self.case["codec"], [part[:coded] for part in partials], divisor)
        return want[begin - low : end - low], allowed[begin - low : end - low]

    def moved(self):
        """Where a result comes from that is only moved: (index, length, rank, index in that rank's source)."""
        count, me = self.count, self.me
        if self.kind == "broadcast":
            return [(0, count, self.root, 0)]
        if self.kind == "scatter":
            return [(0, count, self.root, me * count)]
        if self.kind == "ring":
            return [(0, count, (me - 1) % self.n, 0)]
        shift = me * count if self.kind == "alltoall" else 0
        return [(i * count, count, i, shift) for i in range(self.n)]


def say(**values):
    print(json.dumps(values), flush=True)


def main():
    core_error = RuntimeError
    try:
        rank = Rank(json.loads(sys.argv[1]))
        say(ready=True)
        while line := sys.stdin.readline():
            command = json.loads(line)
            if command["do"] == "end":
                rank.do_leave()
                say()
                return
            say(**getattr(rank, f"do_{command.pop('do')}")(**command))
    except core_error as error:
        say(error=str(error), at=time.monotonic())
        sys.stdin.readline()
        os._exit(3)


if __name__ == "__main__":
    main()
