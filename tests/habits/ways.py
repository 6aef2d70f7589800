"""The ways of making a model distributed that programs are run under; the first is the oracle."""

from __future__ import annotations

import functools

import torch.distributed as dist
from habits.case import Way
from torch.nn.parallel import DistributedDataParallel

from bagua.torch_api import data_parallel
from bagua.torch_api.algorithms import Algorithm


class OverGloo(Way):
    """torch's DistributedDataParallel on Gloo."""

    backend: str = "gloo"

    def wrap(self, net, *optimizers, **options):
        return DistributedDataParallel(net, process_group=group(self.backend), **options)

    def no_sync(self, model):
        found = model.no_sync()
        return found


class OverBagua(OverGloo):
    """torch's DistributedDataParallel on backend "bagua"."""

    backend = "bagua"


class Ours(Way):
    """``net.with_bagua`` with an algorithm."""

    def __init__(self, rank, size, algorithm="gradient_allreduce", **arguments):
        super().__init__(rank, size)
        self._algorithm = functools.partial(Algorithm.init, algorithm, **arguments)
        self.exact = algorithm == "gradient_allreduce"
        self._inner = []

    def wrap(self, net, *optimizers, **options):
        found = net.with_bagua(list(optimizers), self._algorithm())
        self._inner.append(found.bagua_ddp)
        return found

    def no_sync(self, model):
        found = model.bagua_ddp.no_sync()
        return found

    def close(self):
        for inner in self._inner:
            inner.close()


class OurDDP(Ours):
    """Our DistributedDataParallel."""

    def wrap(self, net, *optimizers, **options):
        found = data_parallel.DistributedDataParallel(
            net, optimizers=optimizers, algorithm=self._algorithm(), **options
        )
        self._inner.append(found.inner)
        return found

    def no_sync(self, model):
        found = model.no_sync()
        return found


@functools.cache
def group(backend):
    """All ranks, over this backend."""
    return dist.new_group(backend=backend)


ORACLE = "gloo"
WAYS = {
    ORACLE: OverGloo,
    "backend": OverBagua,
    "with_bagua": Ours,
    "our_ddp": OurDDP,
    "elastic": Ours,
    "two_hosts": Ours,
    "bytegrad": functools.partial(Ours, algorithm="bytegrad"),
    "local_sgd": functools.partial(Ours, algorithm="local_sgd", interval=2),
    "decentralized": functools.partial(Ours, algorithm="decentralized"),
    "async": functools.partial(Ours, algorithm="async", sync_interval_ms=0),
}
ELASTIC = {"elastic"}
"""Ways in an elastic job."""
HOSTS = {"two_hosts": ([0], [1])}
"""Ranks of every host, where not all are on one."""
NEAR = {"bytegrad", "local_sgd", "decentralized", "async"}
"""Ways that give no averages of gradients: a program must end well, and its words and truth values be the oracle's."""
EQUAL = {"bytegrad"}
"""Those of them after whose steps all replicas are the same."""
RARE = {"backend", "our_ddp", "two_hosts", "bytegrad", "decentralized", "async"}
"""Ways that run with --full alone where a program of kind 1 does not name them: others stand for them. Those in
``CALLED`` run with programs of other kinds."""
CALLED = {"backend", "our_ddp"}
"""Ways in which the program calls another object than its own model."""
