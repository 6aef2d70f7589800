"""Makes twins for a device (``Members.twin``) of communicators that ranks use at moments of their own.

Members wait for each other as a twin is made. NCCL waits in ``submit`` while it connects them, for the first operation
of a kind and size. A rank that began an exchange alone, in a forward pass, would wait there for one that is in a
barrier. So both are done at a moment to which all ranks of the model come together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bagua.algorithms import AllReduce
from bagua.algorithms.weights import fits
from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.transfer import DTYPES, ReduceOp
from bagua.torch_api.cuda.connection import CudaConnection
from bagua.torch_api.job.connection import AS_IT_IS, Encoding, request
from bagua.torch_api.step.bucket import Allocate, PlanBucket

STAGED = "staged"  # the route on which nothing is connected in ``submit``
MOST_BYTES = 1 << 28  # from so many on NCCL does the same, whatever the size


def make_twins(
    device: CudaConnection, allocate: Allocate, communicators: Iterable[Members], buckets: Sequence[PlanBucket]
) -> None:
    """Makes the twins of communicators. All ranks call it together, each for its own, in an order in which none wait
    for each other in a circle. ``allocate``: makes memory of the device. Raises Regrouped, or CommunicationError."""
    for one in communicators:
        twin = one.twin(device)
        if device.route(twin.id) != STAGED:
            for bucket in buckets:
                _connect(device, allocate, twin, bucket)


def _connect(device: CudaConnection, allocate: Allocate, twin: Members, bucket: PlanBucket) -> None:
    """Reduces zeros as the bucket's plan all-reduces."""
    steps = bucket.plan.steps if bucket.plan is not None else ()
    for step in steps:
        if not isinstance(step, AllReduce):
            continue
        count = min(bucket.region(step.dst).flat.numel(), MOST_BYTES // bucket.dtype.itemsize)
        _, place = allocate(count, bucket.dtype)
        codec = fits(bucket, step.codec)
        zeros = request(
            device.kinds["allreduce"],
            comm=twin.id,
            dtype=device.dtypes[DTYPES[bucket.dtype]],
            count=count,
            op=ReduceOp[step.op],
            src=place,
            dst=place,
            label=bucket.label,
            encoding=AS_IT_IS if codec is None else Encoding(device.codecs[codec.name], codec.density_units),
        )
        device.wait(device.submit(zeros))
