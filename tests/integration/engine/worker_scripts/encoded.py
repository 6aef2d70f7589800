"""Encoded messages between hosts, see csrc/core/collective/compressed.cpp."""

from __future__ import annotations

import functools
import hashlib
import itertools
from typing import Any

import numpy as np

from worker_scripts.rank import CODECS, Rank, core, pause, say

DENSITY = 655  # of 65536, for topk


def density_of(codec: str) -> int:
    return DENSITY if codec == "topk" else 0


def aligned(nbytes: int) -> np.ndarray:
    """Memory for a message: aligned to 64 bytes."""
    room = np.empty(nbytes + 64, np.uint8)
    return room[-room.ctypes.data % 64 :][:nbytes]


def through(codec: str, values: np.ndarray) -> np.ndarray:
    """Encodes ``values`` into a message and decodes it."""
    said = np.empty_like(values)
    message = aligned(core.encoded_bytes(CODECS[codec], len(values), density_of(codec)))
    core.transcode(CODECS[codec], len(values), raw=[values], message=message, decoded=[said], density=density_of(codec))
    return said


class Reference:
    """The plain mathematics of a compressed all-reduce: one block, one host after the other."""

    def __init__(self, codec: str, hosts: list[list[int]], count: int, feedback: bool) -> None:
        self.codec, self.hosts, self.count = codec, hosts, count
        self.residuals = [np.zeros(count, np.float32) for _ in hosts] if feedback else None

    def say(self, host: int, part: slice, values: np.ndarray) -> np.ndarray:
        """Encodes with what this host still owes, and notes what it owes now."""
        if self.residuals is None:
            return through(self.codec, values)
        owed = values + self.residuals[host][part]
        said = through(self.codec, owed)
        self.residuals[host][part] = owed - said
        return said

    def run(self, inputs: dict[int, np.ndarray], exact: int) -> np.ndarray:
        """The result for the sum of the ranks' inputs, of which the last ``exact`` elements cross as they are."""
        sums = [functools.reduce(np.add, (inputs[rank] for rank in ranks)) for ranks in self.hosts]
        result = functools.reduce(np.add, sums)
        unit = 16384 if self.codec == "topk" else 1024
        units, begin = -(-(self.count - exact) // unit), 0
        for owner in range(len(self.hosts)):
            mine = units // len(self.hosts) + (owner < units % len(self.hosts))
            part = slice(begin, min(begin + mine * unit, self.count - exact))
            begin = part.stop
            if part.start == part.stop:
                continue
            total = sums[owner][part]
            for host in range(len(self.hosts)):
                if host != owner:
                    total = total + self.say(host, part, sums[host][part])
            result[part] = self.say(owner, part, total)
        return result


def compressed(rank: Rank, hosts: list[list[int]], counts: list[int], steps: int) -> dict[str, Any]:
    """Several all-reduces with every codec; all results must have the reference's bits."""
    wrong, found, number = [], hashlib.sha256(), 0
    for codec, count, feedback in itertools.product(list(CODECS)[1:], counts, (False, True)):
        number += 1
        exact = min(count, 3) if feedback else 0
        reference = Reference(codec, hosts, count, feedback)
        for step in range(steps):
            inputs = {
                r: np.random.default_rng([step, number, r]).standard_normal(count).astype(np.float32)
                for r in range(rank.world)
            }
            in_place = step % 2 == 1
            rank.view(rank.src, "float32", count)[:] = inputs[rank.rank]
            rank.run(
                "allreduce", count=count, same=in_place, codec=CODECS[codec], density=density_of(codec),
                residual=number if feedback else 0, exact=exact,
            )  # fmt: skip
            got = rank.view(rank.src if in_place else rank.dst, "float32", count)
            found.update(got.tobytes())
            if got.tobytes() != reference.run(inputs, exact).tobytes():
                wrong.append(f"{codec}, {count} elements, feedback {feedback}, step {step}")
    return {"wrong": wrong[:5], "digest": found.hexdigest(), "residual_bytes": rank.native.counters()["residual_bytes"]}


def traffic(rank: Rank, count: int) -> dict[str, Any]:
    """Bytes that this host sent for one all-reduce of ``count`` elements, for each codec."""
    sent = {}
    for codec in CODECS:
        rank.run("barrier")
        before = rank.native.counters()["bytes_sent"]
        rank.run("allreduce", count=count, codec=CODECS[codec], density=density_of(codec))
        sent[codec] = rank.native.counters()["bytes_sent"] - before
    rank.run("barrier")
    return {"sent": sent}


def residuals(rank: Rank) -> dict[str, Any]:
    """Residuals of a communicator go with it."""
    rank.native.create_comm(1, list(range(rank.world)))
    rank.run("allreduce", comm=1, count=5000, codec=CODECS["onebit"], residual=7)
    held = rank.native.counters()["residual_bytes"]
    rank.run("barrier")
    rank.native.destroy_comm(1)
    say(held=held)
    pause()
    return {"held": rank.native.counters()["residual_bytes"]}
