"""The end of averages that each rank begins at a moment of its own: all ranks meet, and have the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bagua.torch_api.comm.transfer import ReduceOp
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.train.bucket_layout import ModelBuckets

Work = Callable[[], None]


def settle(runner: Runner, layout: ModelBuckets, meanwhile: Work, finish: Work) -> None:
    with torch.no_grad():
        if not runner.vote.repeats:  # in an elastic job a loss may end any operation that is not part of a unit
            runner.session.connection.barrier(runner.everyone.id, meanwhile=meanwhile)
        runner.vote.together(layout.compare_starts)
        finish()
        layout.run_as_often()
        tensors = [tensor for bucket in layout.buckets for tensor in bucket.tensors]
        means = runner.vote.together(lambda: _means(tensors, runner))
        torch._foreach_copy_(tensors, means)


def _means(tensors: Sequence[torch.Tensor], runner: Runner) -> list[torch.Tensor]:
    means = [one.detach().clone(memory_format=torch.contiguous_format) for one in tensors]
    for mean in means:
        runner.everyone.allreduce_inplace(mean, ReduceOp.AVG)
    return means
