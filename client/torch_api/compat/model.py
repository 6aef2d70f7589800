"""The wrapped model that ``with_bagua`` makes: with tensors, buckets and operations of the original as its guest."""

from __future__ import annotations

from bagua.torch_api.compat.backend import Backend
from bagua.torch_api.compat.registered_tensors import RegisteredTensors
from bagua.torch_api.compat.torch_join import JoinableModel
from bagua.torch_api.data.torch_samplers import follow
from bagua.torch_api.train.model import DistributedModel


class BaguaDistributedDataParallel(DistributedModel, JoinableModel):
    __doc__ = DistributedModel.__doc__
    _guest: RegisteredTensors

    def _model(self) -> DistributedModel:
        return self

    def _new_guest(self) -> RegisteredTensors:
        follow(self._session)
        return RegisteredTensors(self, self._runner)

    @property
    def _bagua_backend(self) -> Backend:
        """The scheduler of buckets of registered tensors."""
        return self._guest.backend
