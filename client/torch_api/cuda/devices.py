"""The GPUs that this rank communicates from, by number."""

from __future__ import annotations

import torch

from bagua.torch_api.cuda.connection import CudaConnection
from bagua.torch_api.cuda.port import PORT
from bagua.torch_api.job.session import Session


class Devices:
    """Connections of one session, each made when the first tensor of its device comes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: dict[int, CudaConnection] = {}
        session.close_first(self._close)  # before the connection, on which the leg depends

    def of(self, tensor: torch.Tensor) -> CudaConnection:
        """The connection for tensors of this one's device. Raises BuildError or BaguaError that names a
        missing part."""
        index = PORT.cuda.index(tensor.device)
        found = self._open.get(index)
        if found is None:
            found = self._open[index] = CudaConnection(self._session.connection, index, self._session.statistics)
            if self._session.elastic:
                self._session.renew_with(found)
        return found

    def all(self) -> list[CudaConnection]:
        """Returns the connections that were made."""
        return list(self._open.values())

    def await_results(self) -> None:
        """Waits for results of all devices. Does nothing in jobs that are not elastic, or if no tensor of a device has
        come.
        """
        if self._session.elastic:
            for device in self._open.values():
                device.await_results()

    def part(self) -> None:
        for device in self._open.values():
            device.part()

    def settle(self) -> None:
        """Counts all steps in the statistics, once they are over."""
        for device in self._open.values():
            device.steps.settle(wait=True)

    def _close(self) -> None:
        for device in self._open.values():
            device.close()


def devices(session: Session) -> Devices:
    """Returns the devices of this session, the same object each time."""
    return session.keep(Devices)
