"""Hands buckets to the engine by their plans."""

from __future__ import annotations

from bagua.base.errors import BaguaError
from bagua.torch_api.connection import Times
from bagua.torch_api.data_parallel.bucket import Bucket
from bagua.torch_api.session import Communicator, Session
from bagua.torch_api.transfer import DTYPES, ReduceOp


class EngineCarrier:
    """Submits buckets on one communicator of a session."""

    def __init__(self, session: Session, communicator: Communicator) -> None:
        self._connection = session.connection
        self._communicator = communicator
        self._kind = self._connection.kinds["allreduce"]

    def submit(self, bucket: Bucket) -> int:
        """Starts the bucket's plan; returns the ticket of its last step."""
        if bucket.plan is None:
            raise BaguaError(f"Bucket {bucket.name} has no plan: the algorithm's init_operations did not give it one.")
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
        )

    def wait(self, ticket: int) -> Times:
        """Waits for a submitted bucket."""
        return self._connection.wait(ticket)
