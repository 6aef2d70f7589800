"""Objects that ``append_...`` of a bucket returns: callers steer the operation through them."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Protocol

import torch

from bagua.algorithms.pairs import Pairs
from bagua.base.errors import BaguaError
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.groups import BaguaProcessGroup

MODES = ("all", "shift_one")


class Effective(Protocol):
    """A bucket with effective tensors."""

    elements: int

    def slot(self, name: str) -> torch.Tensor:
        """The flat tensor of a slot."""
        ...

    def flattened_tensor(self) -> torch.Tensor:
        """A copy of the effective tensors."""
        ...

    def write_effective(self, flat: torch.Tensor) -> None:
        """The effective tensors become the parts of ``flat``."""
        ...


class DecentralizedOperation:
    """Averages with peers into a tensor of its own, which ``copy_back_peer_weight`` makes the weights."""

    def __init__(self, bucket: Effective, peer_slot: str, group: BaguaProcessGroup, hierarchical: bool, mode: str):
        """Raises ValueError for an unknown mode, and for "shift_one" among an odd number."""
        if mode not in MODES:
            raise ValueError(f"peer_selection_mode is {mode!r}: choose one of {', '.join(map(repr, MODES))}. [BG302]")
        self._bucket = weakref.ref(bucket)
        self._peer_slot = peer_slot
        pairs = Pairs(group, hierarchical, private=True) if mode == "shift_one" else None
        # A host that is alone has no peer, and averages over its own ranks: over everyone.
        self.next_pair = pairs.everybody if pairs is not None and pairs.n > 1 else None
        """Called once per exchange: the ranks that average now. None: all of the group, each time."""

    def copy_back_peer_weight(self, backend_bucket: object = None) -> None:
        """The effective tensors become the mean. Call it when the exchange is over (``wait_pending_comm_ops``).

        ``backend_bucket`` is accepted for programs that pass ``bucket.backend_bucket``: the operation knows its own.
        """
        bucket = self._bucket()
        if bucket is None:
            raise BaguaError("The bucket of this operation is gone: the model was wrapped anew. [BG411]")
        bucket.write_effective(bucket.slot(self._peer_slot))


class AsynchronousOperation:
    """Averages weights while they are trained.

    ``lock_weight`` and ``unlock_weight`` keep it from writing weights in between; both may be called again and again.
    ``abort`` says that this rank wants no more; when all ranks have said so, an exchange changes nothing and
    ``get_status`` is False. A rank that has aborted goes on taking part until then: otherwise the others would wait.
    ``reset`` takes it back. None of them waits for another rank.
    """

    def __init__(self, shared_slot: str, group: BaguaProcessGroup) -> None:
        self._shared_slot = shared_slot
        self._own = group.new_communicator()
        self._lock = threading.RLock()
        self._aborted = False
        self._running = True
        self._snapshot = torch.empty(0)

    def communicator(self) -> Communicator:
        """Its own: exchanges come at other moments than those of gradients."""
        return self._own

    def lock_weight(self) -> None:
        """Keeps the operation from changing the weights until ``unlock_weight``."""
        self._lock.acquire()

    def unlock_weight(self) -> None:
        """Lets the operation change the weights again. Does nothing if this thread has not locked them."""
        with suppress(RuntimeError):
            self._lock.release()

    def abort(self) -> None:
        """Says that this rank wants no more averaging."""
        self._aborted = True

    def reset(self) -> None:
        """Says that this rank wants averaging again."""
        self._aborted = False
        self._running = True

    def get_status(self) -> bool:
        """Returns False when the last exchange found that all ranks had aborted."""
        return self._running

    # Both steps read and write the weights themselves, and not a copy of them in a slot: the copy would be taken and
    # written back without the lock, over what the optimizer has done meanwhile.

    def take_snapshot(self, bucket: Effective) -> None:
        """First step: takes the weights to be averaged, and this rank's wish to go on."""
        shared = bucket.slot(self._shared_slot)
        with self._lock:
            self._snapshot = bucket.flattened_tensor()
        shared[: bucket.elements] = self._snapshot
        shared[bucket.elements] = 1 if self._aborted else 0

    def apply(self, bucket: Effective) -> None:
        """Last step: adds the mean's difference to the snapshot."""
        shared = bucket.slot(self._shared_slot)
        self._running = bool(shared[bucket.elements] != 1)
        if self._running:
            difference = shared[: bucket.elements] - self._snapshot
            with self._lock:
                bucket.write_effective(bucket.flattened_tensor().add_(difference))
