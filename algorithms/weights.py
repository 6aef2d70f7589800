"""Helpers of algorithms that exchange weights, or have an optimizer of their own: buckets, and checks of optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from bagua.algorithms.base import Bucket, BucketLayout, DataParallel, ProcessGroup
from bagua.algorithms.codec import Codec
from bagua.algorithms.plan import WEIGHT

OptimizerType = TypeVar("OptimizerType", bound=torch.optim.Optimizer)

# Words for users of the library, and of a Trainer.
GIVE_IT = "give it to with_bagua or DistributedDataParallel(optimizers=...), or return it in configure_optimizers"


# Algorithms import nothing of torch_api: these two know shards (comm/shards.py) by their attributes alone.


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter of a bucket's tensor, which is this rank's part of it where the model is sharded."""
    found: torch.Tensor = getattr(tensor, "whole", tensor)
    return found


def part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, in the memory of it; the tensor itself where ranks hold no parts."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def wholes(bucket: Bucket) -> list[torch.Tensor]:
    """The parameters of which a bucket has this rank's parts, in its order."""
    return list(map(whole, bucket.tensors))


def one_bucket_per_dtype(groups: Sequence[Sequence[torch.Tensor]]) -> list[BucketLayout]:
    """Puts all tensors into one bucket, as in the original, or into one for each dtype if there are several."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for group in groups:
        for tensor in group:
            found.setdefault(tensor.dtype, []).append(tensor)
    return [BucketLayout(str(index), tuple(tensors)) for index, tensors in enumerate(found.values())]


def copy_weights(bucket: Bucket, slot: str) -> None:
    """Fills ``slot``, as long as the parameters together, with their present values."""
    torch._foreach_copy_(list(bucket.views(slot)), list(bucket.views(WEIGHT)))


def set_weights(bucket: Bucket, slot: str) -> None:
    """Fills the parameters with the values of ``slot``, as long as they are together."""
    torch._foreach_copy_(list(bucket.views(WEIGHT)), list(bucket.views(slot)))


def subtract(bucket: Bucket, minuend: str, subtrahend: str, difference: str) -> None:
    """``difference`` = ``minuend`` - ``subtrahend``, slots as long as the parameters together, in one pass."""
    parts = (bucket.views(name) for name in (minuend, subtrahend, difference))
    for one, other, out in zip(*parts, strict=True):
        torch.sub(one, other, out=out)


def expose(bucket: Bucket, **tensors: torch.Tensor) -> None:
    """Sets attributes of the bucket that programs for the original read."""
    for name, tensor in tensors.items():
        setattr(bucket, name, tensor)


def where_needed(codec: Codec | None, everywhere: bool, process_group: ProcessGroup) -> Codec | None:
    """The codec, if there is anything for it to encode: between hosts, or everywhere."""
    return codec if everywhere or len(process_group.hosts) > 1 else None


def fits(bucket: Bucket, codec: Codec | None) -> Codec | None:
    """The codec as far as it is meant for the bucket: codecs encode float32, other dtypes travel as they are."""
    return codec if bucket.dtype is torch.float32 else None


def codec_of_differences(codec: Codec | str | None) -> Codec | None:
    """The codec for differences of weights. A name stands for the codec with error feedback, whichever it is: what is
    lost of a weight would be lost for good. A ``Codec`` is taken as it is."""
    found = Codec.of(codec)
    return replace(found, error_feedback=True) if found is not None and isinstance(codec, str) else found


def check_optimizers(bagua_ddp: DataParallel, algorithm: str) -> None:
    """An algorithm that acts after optimizer steps needs all parameters in ``with_bagua``'s optimizers. Raises
    ValueError that says which are not, or that an optimizer is fused."""
    held: set[int] = set()
    for optimizer in bagua_ddp.bagua_optimizers:
        if hasattr(optimizer, "_bagua_fused_optimizer"):
            raise ValueError(
                f"{algorithm} can't work with a fused optimizer: pass with_bagua the optimizer itself. [BG305]"
            )
        # Ids: ``==`` of tensors compares elements.
        held.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    missing = [name for name, one in bagua_ddp.bagua_build_params() if id(whole(one)) not in held]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{algorithm} exchanges weights after optimizer steps, but no optimizer of the model holds "
            f"{', '.join(missing[:3])}{more}. Set requires_grad=False, or make one for all, and {GIVE_IT}. [BG305]"
        )


def find_optimizer(
    bagua_ddp: DataParallel, kind: type[OptimizerType], given: OptimizerType | None, alone: bool = False
) -> OptimizerType:
    """The model's optimizer of this kind: ``given``, or the only one. Raises ValueError if there is none, or, with
    ``alone``, if the model has others beside it."""
    held = bagua_ddp.bagua_optimizers
    found = [one for one in held if isinstance(one, kind) and (given is None or one is given)]
    if len(found) != 1 or (alone and len(held) != 1):
        names = ", ".join(type(optimizer).__name__ for optimizer in held) or "none"
        same = (
            f" The algorithm got another {kind.__name__} than the model: pass both the same."
            if given is not None
            else ""
        )
        raise ValueError(
            f"This algorithm needs one {kind.__name__}, and the model has {names}.{same} Make it for all "
            f"parameters{', and no other one' if alone else ''}; {GIVE_IT}. [BG305]"
        )
    return found[0]
