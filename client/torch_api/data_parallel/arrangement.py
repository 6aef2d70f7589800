"""Cuts what an algorithm exchanges into buckets: in the algorithm's order at first, then in the order of arrival."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from bagua.algorithms import AlgorithmImpl, BucketLayout
from bagua.base.errors import BaguaError
from bagua.torch_api import env
from bagua.torch_api.communication import barrier, broadcast
from bagua.torch_api.data_parallel.agreement import raise_together
from bagua.torch_api.data_parallel.bucket import BUFFERS, Bucket, elements_needed
from bagua.torch_api.data_parallel.carrier import EngineCarrier
from bagua.torch_api.data_parallel.grouping import bucket_bytes, group_tensors
from bagua.torch_api.session import Communicator, Session

if TYPE_CHECKING:
    from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel


class Arrangement:
    """The buckets of one wrapped model, the same on all ranks."""

    def __init__(self, ddp: BaguaDistributedDataParallel, session: Session, group: Communicator) -> None:
        self._ddp = ddp
        self._session = session
        self._group = group
        self.carrier = EngineCarrier(session, group)
        self.buckets: list[Bucket] = []
        self._names: dict[torch.Tensor, str] = {}
        self._tensors: list[torch.nn.Parameter] = []  # in the order of buckets
        self._arrival: list[str] = []  # rank 0's order, once it is known

    @property
    def _algorithm(self) -> AlgorithmImpl:
        return self._ddp.bagua_algorithm

    def make(self) -> None:
        """Buckets with memory and plans, in the order of arrival where that is known.

        Raises BaguaError on every rank if memory is short on one.
        """
        if self.buckets:  # made again
            self.release()
            barrier(self._group)  # what the ranks of this host gave back is there for all of them
        self._names = {parameter: name for name, parameter in self._ddp.bagua_build_params()}
        self._tensors = list(self._algorithm.init_tensors(self._ddp))
        if self._algorithm.follows_arrival:
            place = {name: number for number, name in enumerate(self._arrival)}
            self._tensors.sort(key=lambda tensor: place.get(self._names[tensor], len(place)))
        layouts = self._layouts()
        with self._together():
            self._session.memory.require(sum(_bytes_needed(layout.tensors) for layout in layouts))
        self._fill(layouts)

    def wants_arrival(self) -> bool:
        """Whether the order of arrival is still to be learned."""
        return self._algorithm.follows_arrival and not self._arrival and len(self._tensors) > 1

    def follow(self, arrivals: Sequence[str]) -> list[Bucket] | None:
        """Buckets in the order in which gradients came on rank 0, which tells it to all; None if it is the order that
        they have. Parameters that got no gradient there come last. Called by all ranks at the end of a pass."""
        place = {self._names[tensor]: number for number, tensor in enumerate(self._tensors)}
        came = [place[name] for name in arrivals]
        order = torch.tensor([*came, *sorted(set(place.values()) - set(came))])
        broadcast(order, 0, self._group)
        numbers = order.tolist()
        if sorted(numbers) != sorted(place.values()):
            raise BaguaError("Rank 0 told an order of gradients that does not fit this rank's parameters.")
        self._tensors = [self._tensors[number] for number in numbers]
        self._arrival = [self._names[tensor] for tensor in self._tensors]
        if numbers == sorted(numbers):
            return None
        self.release()
        self._fill(self._layouts())
        return self.buckets

    def release(self) -> None:
        """Gives the memory back, but for gradients that somebody holds."""
        for bucket in self.buckets:
            bucket.release()
        self.buckets = []

    def _layouts(self) -> list[BucketLayout]:
        total = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)
        explicit = "BAGUA_DEFAULT_BUCKET_SIZE" in os.environ
        groups = group_tensors(self._tensors, bucket_bytes(total, env.get_default_bucket_size(), explicit))
        return self._algorithm.tensors_to_buckets(groups, self._ddp.gradient_as_bucket_view)

    def _fill(self, layouts: Sequence[BucketLayout]) -> None:
        with self._together():
            for layout in layouts:
                parameters = [(self._names[tensor], tensor) for tensor in layout.tensors]
                self.buckets.append(Bucket(layout.name, parameters, self._session.memory.place_empty))
        for bucket in self.buckets:
            self._algorithm.init_operations(self._ddp, bucket)
        self.carrier.adopt(self.buckets)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """If the block fails on one rank, all give their memory back and raise."""
        mistake: Exception | None = None
        try:
            yield
        except BaguaError as error:
            mistake = error
        try:
            raise_together(mistake, self._group)
        except BaguaError:
            self.release()
            raise


def _bytes_needed(tensors: Sequence[torch.Tensor]) -> int:
    """Shared memory, in whole pages, for a bucket with gradients of these tensors."""
    bytes_of_one = elements_needed(tensors) * tensors[0].element_size()
    return BUFFERS * -(-bytes_of_one // mmap.PAGESIZE) * mmap.PAGESIZE
