"""Settings of a model: which there are, and how they are applied between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from bagua.algorithms import AlgorithmImpl, Codec
from bagua.proto.common_pb2 import TuneDimension
from bagua.torch_api.train.bucket_layout import ModelBuckets
from bagua.torch_api.train.grouping import group_tensors
from bagua.torch_api.train.rebucket import Cuts
from bagua.torch_api.train.runner import Runner
from bagua.torch_api.tune.options import NO_CODEC
from bagua.tuning.decision import Setting

SMALLEST_KIB, LARGEST_KIB = 256, 64 << 10
CHUNKS_KIB = ("128", "256", "512", "1024", "2048")


class Tuned(Protocol):
    """A wrapped model, as settings use it."""

    bagua_algorithm: AlgorithmImpl

    def recut(self, cuts: Cuts) -> bool: ...


class Settings:
    """Settings of one model. Their names:

    - ``bucket_kib``: bytes of a bucket, as BAGUA_DEFAULT_BUCKET_SIZE; or
    - ``cuts``: how many parameters each bucket has, in the order of gradients;
    - ``chunk_kib``: KiB of a chunk between hosts;
    - ``codec``: of algorithms that have one, if the user lists codecs.
    """

    def __init__(self, model: Tuned, layout: ModelBuckets, runner: Runner) -> None:
        self._model = model
        self._layout = layout
        self._runner = runner
        self._codec: Any = getattr(model.bagua_algorithm, "codec", None)  # that of the program

    def space(self, given: Mapping[str, Sequence[str]], hosts: int) -> list[TuneDimension]:
        """The values that a search tries. ``given``: values of the user's."""
        total = sum(tensor.nbytes for tensor in self._layout.in_order())
        sizes = [str(kib) for kib in _doubled(SMALLEST_KIB, min(LARGEST_KIB, max(SMALLEST_KIB, total >> 10)))]
        found = [TuneDimension(name="bucket_kib", choices=given.get("bucket_kib", sizes), ordered=True)]
        if hosts > 1:
            found.append(TuneDimension(name="chunk_kib", choices=given.get("chunk_kib", CHUNKS_KIB), ordered=True))
        if "codec" in given and hasattr(self._model.bagua_algorithm, "codec"):
            found.append(TuneDimension(name="codec", choices=given["codec"]))
        return found

    def cuts(self, setting: Setting) -> list[list[str]]:
        """Names of parameters, bucket by bucket."""
        if "cuts" in setting:
            names, found, begin = self._layout.arrival, [], 0
            for count in map(int, setting["cuts"].split(",")):
                found.append(names[begin : begin + count])
                begin += count
            if begin != len(names) or not all(found):
                raise ValueError(f"{setting['cuts']} does not cut {len(names)} parameters.")
            return found
        if "bucket_kib" in setting:
            return self._layout.names_of(self._groups(int(setting["bucket_kib"]) << 10))
        return self._layout.names_of(self._layout.default_groups())

    def _groups(self, limit: int) -> list[list[torch.Tensor]]:
        return group_tensors(self._layout.in_order(), limit)

    def apply(self, setting: Setting) -> bool:
        """Applies a setting. All ranks call it between the same two steps. False: buckets can't be cut anew now. Raises
        ValueError for a setting that does not fit this model.
        """
        cuts = self.cuts(setting)
        if not self._layout.may_be_cut or self._runner.on_device:
            return False
        self.prepare(setting)
        return self._model.recut(cuts)

    def prepare(self, setting: Setting) -> None:
        """Sets what buckets take over that are made next."""
        self._runner.chunk_kib = int(setting.get("chunk_kib", "0"))
        codec = setting.get("codec")
        if hasattr(self._model.bagua_algorithm, "codec"):
            wanted = self._codec if codec is None else Codec.of(None if codec == NO_CODEC else codec)
            self._model.bagua_algorithm.codec = wanted


def _doubled(least: int, most: int) -> list[int]:
    """Powers of two times ``least``, up to the first that is at least ``most``."""
    found = [least]
    while found[-1] < most:
        found.append(found[-1] * 2)
    return found
