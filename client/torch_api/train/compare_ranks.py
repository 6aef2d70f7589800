"""Comparison of ranks before a wrapped model has buckets; they take over the state of rank 0."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import torch

from bagua.algorithms import Algorithm
from bagua.base.errors import BaguaError, ConfigError
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.groups import BaguaProcessGroup, _get_default_group, replicas_group
from bagua.torch_api.comm.shards import (
    is_shard,
    is_sharded,
    local_part,
    refuse_foreign_meshes,
    show_parts,
    spread_parts,
)
from bagua.torch_api.cuda.port import PORT
from bagua.torch_api.job import environment
from bagua.torch_api.job.session import current
from bagua.torch_api.step.parameters import canonical, check_descriptions, describe, shared_state
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.train.agreement import broadcast_tensors, gather_texts, raise_together
from bagua.torch_api.train.algorithm_choice import choose, describe_algorithm, reify
from bagua.torch_api.train.optimizer_state import broadcast_optimizers, check_optimizers
from bagua.torch_api.train.sparse_gradients import refuse_sparse
from bagua.torch_api.train.wrapped import Wrapped

IN_DDP: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[torch.nn.Module]] = weakref.WeakKeyDictionary()
"""Modules that torch's ``DistributedDataParallel`` wraps, and these wrappers, as far as we know of them."""


def model_group(module: torch.nn.Module, process_group: BaguaProcessGroup | None) -> BaguaProcessGroup:
    """``members_group`` for this model. Of a sharded one: the ranks that hold the same shards as this one. Raises
    BaguaError for it where no islands are, ConfigError if it gets a group of its own."""
    show_parts(module)
    if not is_sharded(module):
        return members_group(process_group)
    if current().membership.island_size == 1:
        raise BaguaError(
            "Ranks hold parts of this model (fully_shard, tensor parallelism), and this job has no islands, whose "
            "ranks hold one copy together. Start it with --island-size N (with torchrun: BAGUA_ISLAND_SIZE=N), and "
            "shard over torch.distributed's world, which is the island then. Without copies to keep alike leave "
            'with_bagua out, and train with init_process_group("bagua") of torch.distributed. [BG618]'
        )
    if process_group not in (None, _get_default_group()):
        raise ConfigError("A sharded model is trained by all islands: leave process_group out. [BG618]")
    if getattr(getattr(sys.modules.get("accelerate.state"), "PartialState", None), "_shared_state", None):
        raise ConfigError(
            "Accelerate is in use, which counts the ranks of torch.distributed, this island alone: its loaders would "
            "give islands the same samples. Write the loop without Accelerator and Trainer, with "
            "bagua.contrib.ElasticSampler. [BG701]"
        )
    refuse_foreign_meshes(module, current().membership.island_size)
    spread_parts(module)
    return replicas_group()


def members_group(process_group: BaguaProcessGroup | None) -> BaguaProcessGroup:
    """The group, or that of all ranks. Raises TypeError for other objects, ConfigError if this rank is no member."""
    if process_group is None:
        return _get_default_group()
    if not isinstance(process_group, BaguaProcessGroup):
        raise TypeError(
            f"process_group is a {type(process_group).__name__}: pass what bagua.communication.new_group() or "
            "from_torch_group() returned, or None for all ranks. [BG615]"
        )
    rank = current().membership.rank
    if rank not in process_group.ranks:
        raise ConfigError(
            f"Rank {rank} is no member of the process group {process_group.ranks}: only members wrap a model with it. "
            "[BG615]"
        )
    return process_group


def refuse_ddp(module: torch.nn.Module) -> None:
    """Raises BaguaError if torch exchanges gradients of the model or of a part of it already."""
    # Not imported here: a program that uses it has done so.
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for name, part in module.named_modules():
        kind = None
        if isinstance(part, torch.nn.parallel.DistributedDataParallel) or IN_DDP.get(part, _nobody)() is not None:
            kind = "DistributedDataParallel"
        elif isinstance(part, fsdp):
            kind = "FullyShardedDataParallel"
        if kind is not None:
            where = f"its part {name!r}" if name else "it"
            raise BaguaError(
                f"with_bagua() can't wrap this model: {where} is in a {kind} of torch, which exchanges the gradients "
                "already. Leave one of the two out. [BG615]"
            )


def _nobody() -> None:
    """No wrapper."""


def compare_ranks(model: Wrapped, algorithm: Algorithm | None, group: Communicator) -> None:
    """Sets the model's ``bagua_algorithm`` and its ``description``. Raises the same BaguaError on every rank if they
    don't fit. All are told a mistake of one rank."""

    def settings() -> dict[str, object]:
        chosen = choose(algorithm, speaks=group.rank() == 0)
        model.bagua_algorithm = reify(chosen, model.process_group)
        if is_sharded(model.module) and not model.bagua_algorithm.takes_shards:
            raise ConfigError(
                f"{type(chosen).__name__} can't train a sharded model, of which each rank has a part. Take any other "
                "of the library's: one that exchanges gradients, such as gradient_allreduce, or weights, such as "
                "local_sgd and streaming_diloco. [BG618]"
            )
        if is_sharded(model.module) and model.steps_in_backward:
            raise ConfigError("step_in_backward=True is for models that each rank holds whole: leave it out. [BG618]")
        check_optimizers(model.bagua_optimizers, model.module)
        refuse_ddp(model.module)
        model.check_replicas = environment.get_check_replicas()
        sparse = [name for name, _ in model.trained_beside_buckets()]
        refuse_sparse(sparse, model.bagua_algorithm, model.steps_in_backward)
        return {
            "sparse gradients": sparse,
            "algorithm": describe_algorithm(chosen),
            "bucket_bytes": model.bucket_bytes or environment.get_default_bucket_size(),
        }

    _compare(model, settings, group)


def compare_ranks_again(model: Wrapped, group: Communicator) -> None:
    """``compare_ranks`` when other parameters are trained than before."""
    before = model.description["settings"]
    assert isinstance(before, dict)
    _compare(model, lambda: before, group)


def _compare(model: Wrapped, settings: Callable[[], dict[str, object]], group: Communicator) -> None:
    mistake: Exception | None = None
    try:
        agreed = settings()
        model.description = describe(
            shared_state(model.module, model.parameters_to_ignore),
            [name for name, _ in model.trained()],
            model.bagua_optimizers,
            agreed,
        )
        # No part of the description: a checkpoint may be read with another setting.
        text = canonical({**model.description, "settings": {**agreed, "check_replicas": model.check_replicas}})
    except Exception as error:
        mistake = error
        text = canonical({"error": str(error)})
    texts = gather_texts(text, group)
    if mistake is not None:  # after the exchange: the others have the words
        raise mistake
    check_descriptions(texts, current().membership.island_size)


def find_device(model: Wrapped, runner: Runner) -> None:
    """A model on a CUDA device trains there. Raises on every rank if it can't on one."""
    parameters = model.trained()
    if not parameters or not PORT.cuda.holds(parameters[0][1]):
        return
    mistake: Exception | None = None
    try:
        runner.use_device_of(parameters[0][1])
    except Exception as error:
        mistake = error
    raise_together(mistake, runner.everyone)


def take_state_of_rank_0(model: Wrapped, runner: Runner) -> None:
    """Begins on all ranks with the parameters, buffers and optimizers of rank 0."""
    shared = [tensor for _, tensor in shared_state(model.module, model.parameters_to_ignore)]
    broadcast_tensors([one for one in shared if not is_shard(one)], runner.session, runner.voters)
    if parts := [local_part(one) for one in shared if is_shard(one)]:
        broadcast_tensors(parts, runner.session, runner.everyone)
    broadcast_optimizers(model.bagua_optimizers, runner.session, runner.everyone)
