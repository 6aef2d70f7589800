"""Hands buckets to the engine by their plans."""

from __future__ import annotations

import itertools

import torch

from bagua.base.errors import BaguaError
from bagua.torch_api.connection import AS_IT_IS, Encoding, Times
from bagua.torch_api.data_parallel.bucket import Bucket
from bagua.torch_api.session import Communicator, Session
from bagua.torch_api.transfer import DTYPES, ReduceOp


class EngineCarrier:
    """Submits buckets on one communicator of a session.

    Error feedback needs memory that lives as long as a bucket: each bucket with it gets a residual of its own, whose
    number is never used again on this communicator. All ranks make their buckets in the same order, and so agree.
    """

    def __init__(self, session: Session, communicator: Communicator) -> None:
        self._connection = session.connection
        self._communicator = communicator
        self._kind = self._connection.kinds["allreduce"]
        self._residuals = itertools.count(1)
        self._encodings: dict[Bucket, Encoding] = {}

    def adopt(self, buckets: list[Bucket]) -> None:
        """These buckets, whose plans are made, take the place of all earlier ones. Raises BaguaError without a plan."""
        self._encodings = {bucket: self._encoding(bucket) for bucket in buckets}

    def _encoding(self, bucket: Bucket) -> Encoding:
        """How the bucket crosses between hosts: what says who has a gradient must arrive as it is."""
        if bucket.plan is None:
            raise BaguaError(f"Bucket {bucket.name} has no plan: the algorithm's init_operations did not give it one.")
        codec = bucket.plan.steps[0].codec
        if codec is None or bucket.dtype is not torch.float32:
            return AS_IT_IS
        return Encoding(
            self._connection.codecs[codec.name],
            codec.density_units,
            residual=next(self._residuals) if codec.error_feedback else 0,
            exact=bucket.count - bucket.elements,
        )

    def submit(self, bucket: Bucket) -> int:
        """Starts the bucket's plan; returns the ticket of its last step."""
        assert bucket.plan is not None
        step = bucket.plan.steps[0]
        return self._connection.submit(
            self._kind,
            comm=self._communicator.id,
            dtype=self._connection.dtypes[DTYPES[bucket.dtype]],
            op=ReduceOp[step.op],
            count=bucket.count,
            src=bucket.place(step.src),
            dst=bucket.place(step.dst),
            label=bucket.label,
            encoding=self._encodings[bucket],
        )

    def wait(self, ticket: int) -> Times:
        """Waits for a submitted bucket."""
        return self._connection.wait(ticket)
