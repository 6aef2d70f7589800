"""Random generators of this process as plain data and tensors: torch's, Python's, NumPy's where it is in use."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from bagua.torch_api.comm.plain_data import decode, encode


def random_state(tensors: list[torch.Tensor]) -> Any:
    """Plain data; tensors in it go to ``tensors``."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")  # we need it for nothing else
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), int(position), int(has_gauss), float(cached))
    return encode(state, tensors)


class RandomState:
    """State of random generators that was taken earlier: ``tensors`` are filled, then it is set."""

    def __init__(self, document: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self._state = decode(document, self.tensors)

    def set(self) -> None:
        """Generators go on from there. Those of GPUs that are no more, or were not there, stay as they are."""
        random.setstate(self._state["python"])
        torch.set_rng_state(self._state["torch"])
        if torch.cuda.is_available():
            for device, one in enumerate(self._state.get("cuda", [])[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(one, device)
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in self._state:
            numpy.random.set_state(self._state["numpy"])
