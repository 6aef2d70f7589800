"""Bandwidth and latency between node daemons, by send and recv of one rank on each: the path that gradients take."""

from __future__ import annotations

import statistics
from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.bench.ranks import harness

PING_BYTES = 8
MOST_PINGS = 200


class Pair:
    """Pair of ranks that talk while the others wait. Both call the same methods."""

    def __init__(self, source: int, target: int, nbytes: int) -> None:
        self.source, self.target = source, target
        self.sends = bagua.get_rank() == source
        self.ping = bagua.empty(PING_BYTES, dtype=torch.uint8)
        self.message = bagua.empty(nbytes, dtype=torch.uint8)

    def _pass(self, tensor: torch.Tensor) -> None:
        if self.sends:
            bagua.send(tensor, self.target)
        else:
            bagua.recv(tensor, self.source)

    def _return(self, tensor: torch.Tensor) -> None:
        if self.sends:
            bagua.recv(tensor, self.target)
        else:
            bagua.send(tensor, self.source)

    def exchange_s(self, message: torch.Tensor) -> float:
        """Seconds of a message and its answer of 8 bytes: ``send`` may return before the message has arrived."""

        def both() -> None:
            self._pass(message)
            self._return(self.ping)

        return harness.seconds(both)

    def agree(self, number: int) -> int:
        """The source's number, on both."""
        text = torch.tensor([number], dtype=torch.int64)
        self._pass(text)
        return int(text.item())


def measure_pair(source: int, target: int, config: dict[str, Any]) -> tuple[float, float]:
    """Returns (seconds of one way, bits per second) of one direction of one pair, as medians of the source's clock."""
    pair = Pair(source, target, config["size"])
    warm = min(pair.exchange_s(pair.ping) for _ in range(3))
    # Both must pass equally many.
    pings = pair.agree(max(config["rounds"], min(MOST_PINGS, int(config["seconds"] / 4 / max(warm, 1e-6)))))
    latency = statistics.median(pair.exchange_s(pair.ping) for _ in range(pings)) / 2  # there and back
    pair.exchange_s(pair.message)  # a first time, uncounted
    once = pair.exchange_s(pair.message)
    rounds = pair.agree(harness.rounds_within(config["seconds"], once, config["rounds"]))
    passage = statistics.median(pair.exchange_s(pair.message) for _ in range(rounds))
    # Noise must not make a small message infinitely fast.
    return latency, config["size"] * 8 / max(passage / 10, passage - 2 * latency)


def measure(config: dict[str, Any]) -> dict[str, Any] | None:
    """Rows of all pairs, both directions, one after the other."""
    size = bagua.get_world_size()
    pairs = [(source, target) for source in range(size) for target in range(size) if source != target]
    rows = []
    for step, (source, target) in enumerate(pairs):
        harness.progress(step, len(pairs), f"node {source} to node {target}")
        figures = torch.zeros(2, dtype=torch.float64)
        if bagua.get_rank() in (source, target):
            figures = torch.tensor(measure_pair(source, target, config), dtype=torch.float64)
        bagua.broadcast(figures, src=source)  # all others wait here, and leave the wire to the pair
        latency, bits = figures.tolist()
        rows.append({"source": source, "target": target, "latency_s": latency, "bits_per_s": bits})
    harness.progress(len(pairs), len(pairs), "done")
    return {"rows": rows}


if __name__ == "__main__":
    harness.run(measure)
