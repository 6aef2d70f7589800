"""Steps that average weights, over all ranks or in pairs: as they are, or as differences through a codec.

After the steps slot ``PEER`` holds what this rank's weights become if nothing else happened meanwhile; with
``keep_snapshot`` slot ``SNAPSHOT`` holds the weights that the steps began with.

Weights never travel through a codec. What travels is a difference to what both ends hold, so that its size, and with it
the error, is that of recent changes. Over all ranks that is the last common mean R: R += mean(C(x_i - R)), and what C
loses is fed back. In a pair it is R_ij, on which the two agreed when they last met: with d_i = x_i - R_ij and m = w_i
C(d_i) + w_j C(d_j), R_ij += m and x_i += m - C(d_i), where w are the shares of the two in their ranks. The loss of C
then stays in x_i, and so in the next difference; the mean of x_i and x_j, weighted by w, is kept exactly. (Koloskova et
al., "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication", ICML 2019, has the
idea.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bagua.algorithms.base import Bucket, Communicator
from bagua.algorithms.codec import Codec
from bagua.algorithms.pairs import Pairs
from bagua.algorithms.plan import (
    COPY,
    EVERYONE,
    HOST,
    SCRATCH,
    WEIGHT,
    AllReduce,
    Broadcast,
    Local,
    Neighbours,
    Over,
    Step,
)
from bagua.algorithms.weights import copy_weights, fits, subtract

PEER = "peer_weight"
SNAPSHOT = "snapshot"
DIFFERENCE = "difference"
ARRIVED = "arrived"


def mean_of_all(
    bucket: Bucket,
    codec: Codec | None = None,
    everywhere: bool = False,
    over: Over = EVERYONE,
    keep_snapshot: bool = False,
) -> tuple[Step, ...]:
    """Steps for the mean over all ranks of ``over``; adds the slots that they need. After them, and on every rank the
    same bits, ``PEER`` is the mean, or the reference R that stands for it."""
    codec = fits(bucket, codec)
    if codec is not None:
        return _mean_by_differences(bucket, codec, everywhere, over, keep_snapshot)
    bucket.add_slot(PEER, on_change=SCRATCH)  # SCRATCH: each exchange fills it anew
    if not keep_snapshot:
        return (_snapshot(PEER), AllReduce("AVG", PEER, PEER, over=over))
    bucket.add_slot(SNAPSHOT, on_change=SCRATCH)
    return (_snapshot(SNAPSHOT), AllReduce("AVG", SNAPSHOT, PEER, over=over))


def mean_of_pair(
    bucket: Bucket, pairs: Pairs, codec: Codec | None = None, everywhere: bool = False, keep_snapshot: bool = False
) -> tuple[Step, ...]:
    """Steps for the mean with this round's peer; adds the slots that they need. One unit (rank or host) alone
    averages over its own ranks."""
    if pairs.n == 1:
        return mean_of_all(bucket, over=HOST if pairs.hierarchical else EVERYONE, keep_snapshot=keep_snapshot)
    codec = fits(bucket, codec)
    if codec is None:
        return mean_of_all(bucket, over=pairs.everybody, keep_snapshot=keep_snapshot)
    return _PairByDifferences(bucket, pairs, codec, everywhere, keep_snapshot).steps()


def _snapshot(slot: str) -> Local:
    return Local(lambda bucket: copy_weights(bucket, slot), f"weights to {slot}", reads=(WEIGHT,), writes=(slot,))


def _mean_by_differences(
    bucket: Bucket, codec: Codec, everywhere: bool, over: Over, keep_snapshot: bool
) -> tuple[Step, ...]:
    bucket.add_slot(DIFFERENCE, on_change=SCRATCH)
    bucket.add_slot(PEER, communicated=False, on_change=COPY)  # R itself never travels, and all ranks have the same
    copy_weights(bucket, PEER)
    if keep_snapshot:
        bucket.add_slot(SNAPSHOT, communicated=False, on_change=SCRATCH)

    def begin(bucket: Bucket) -> None:
        if keep_snapshot:
            copy_weights(bucket, SNAPSHOT)
        subtract(bucket, WEIGHT, PEER, DIFFERENCE)

    def end(bucket: Bucket) -> None:
        bucket.slot(PEER).add_(bucket.slot(DIFFERENCE))

    written = (DIFFERENCE, SNAPSHOT) if keep_snapshot else (DIFFERENCE,)
    return (
        Local(begin, "difference to the last mean", reads=(WEIGHT, PEER), writes=written),
        AllReduce("AVG", DIFFERENCE, DIFFERENCE, codec=codec, everywhere=everywhere, over=over),
        Local(end, "the last mean moves", reads=(DIFFERENCE, PEER), writes=(PEER,)),
    )


class _PairByDifferences:
    """The steps of a pair with a codec. Pairs inside a host average as they are, unless ``everywhere``. With hosts as
    units their first ranks exchange the host's mean."""

    def __init__(self, bucket: Bucket, pairs: Pairs, codec: Codec, everywhere: bool, keep_snapshot: bool) -> None:
        self._pairs = pairs
        self._everywhere = everywhere
        self._keep_snapshot = keep_snapshot
        self._codec = replace(codec, error_feedback=False)  # what is lost stays in the weights
        # The first rank of a host exchanges for it.
        self._references = [peer for peer in pairs.partners if pairs.leader and self._encodes(peer)]
        bucket.add_slot(PEER, on_change=SCRATCH)
        bucket.add_slot(DIFFERENCE, on_change=SCRATCH)
        bucket.add_slot(ARRIVED, on_change=SCRATCH)
        if keep_snapshot:
            bucket.add_slot(SNAPSHOT, communicated=False, on_change=SCRATCH)
        for peer in self._references:
            bucket.add_slot(_reference(peer), communicated=False)  # KEEP, the default: references are a pair's own
            copy_weights(bucket, _reference(peer))

    def steps(self) -> tuple[Step, ...]:
        peers = tuple(_reference(peer) for peer in self._references)
        written: Sequence[str] = (PEER, DIFFERENCE, SNAPSHOT) if self._keep_snapshot else (PEER, DIFFERENCE)
        exchange = Neighbours(DIFFERENCE, DIFFERENCE, ARRIVED, ARRIVED, codec=self._codec, over=self._far)
        end = Local(self._end, "towards the mean", (PEER, DIFFERENCE, ARRIVED, *peers), (PEER, *peers))
        if self._pairs.hierarchical:
            return (
                _snapshot(PEER),
                AllReduce("AVG", PEER, PEER, over=HOST),
                Local(self._differ, "difference to the pair's last mean", (PEER, *peers), (DIFFERENCE,)),
                exchange,
                end,
                Broadcast(PEER, over=HOST),
            )
        begin = Local(self._begin, "difference to the pair's last mean", (WEIGHT, *peers), tuple(written))
        if self._everywhere:
            return (begin, exchange, end)
        return (begin, AllReduce("AVG", PEER, PEER, over=self._near), exchange, end)

    def _encodes(self, peer: int) -> bool:
        return not self._pairs.is_absent(peer) and (self._everywhere or self._pairs.is_far(peer))

    def _near(self) -> Communicator | None:
        return None if self._encodes(self._pairs.peer) else self._pairs.everybody()

    def _far(self) -> Communicator | None:
        if self._everywhere or self._encodes(self._pairs.peer):
            return self._pairs.leaders()  # which knows, too, that a unit rests
        return None

    def _begin(self, bucket: Bucket) -> None:
        for slot in (PEER, SNAPSHOT) if self._keep_snapshot else (PEER,):
            copy_weights(bucket, slot)
        self._differ(bucket)

    def _differ(self, bucket: Bucket) -> None:
        if self._pairs.leader and self._encodes(self._pairs.peer):
            torch.sub(bucket.slot(PEER), bucket.slot(_reference(self._pairs.peer)), out=bucket.slot(DIFFERENCE))

    def _end(self, bucket: Bucket) -> None:
        # ``met``: the exchange may have counted the round up.
        if not (self._pairs.leader and self._encodes(self._pairs.met)):
            return
        own = bucket.slot(DIFFERENCE)
        mean = self._pairs.mean(own, bucket.slot(ARRIVED))
        bucket.slot(_reference(self._pairs.met)).add_(mean)
        bucket.slot(PEER).add_(mean).sub_(own)


def _reference(peer: int) -> str:
    return f"reference_{peer}"
