"""Checkpoints in the original's layout: a folder for each, and a file that names the newest one.

    latest_checkpointed_iteration.txt
    iter_0000100/mp_rank_00_model_states.pt
    iter_0000100/expert_3_mp_rank_00_model_states.pt                    with experts: one for each
    iter_0000100/expert_parallel_rank_1_mp_rank_00_optim_states.pt      with experts: one for each rank

A checkpoint is written into a folder with the ending ``.new``, which gets its name when it is whole. So a process that
is killed at any moment leaves the last one as it was. Files are read as plain data (``weights_only``): no code in them
is run.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bagua.base.disk import replace_file
from bagua.base.errors import BaguaError
from bagua.torch_api.comm.plain_data import with_plain_numbers
from bagua.torch_api.comm.shards import is_sharded
from bagua.torch_api.job import environment
from bagua.torch_api.saving.expert_states import ExpertStates
from bagua.torch_api.saving.folder import replace_folder
from bagua.torch_api.train.agreement import raise_together

LATEST = "latest_checkpointed_iteration.txt"
MODEL = "mp_rank_00_model_states.pt"
EXPERT = "expert_{}_mp_rank_00_model_states.pt"
OPTIMIZER = "expert_parallel_rank_{}_mp_rank_00_optim_states.pt"


def save_checkpoint(
    iteration: int,
    checkpoints_path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
) -> None:
    """Writes a checkpoint, and names it the newest one.

    Without experts rank 0 writes, and others return at once. With experts (``MoE``) all ranks call it, into the same
    folder, and return when it is whole. Raises BaguaError where it can't be written, with experts on all ranks; the
    last one stays.
    """
    model = _plain(model)
    _refuse_shards(model)
    experts = ExpertStates.of(model)
    if not experts and environment.get_rank() != 0:
        return
    folder = Path(checkpoints_path)
    new = folder / f"{_name(iteration)}.new"
    first = experts.rank == 0
    states, of_experts = experts.split(model.state_dict())
    document: dict[str, Any] = {"iteration": iteration, "model": states, "ranks": experts.ranks}
    if lr_scheduler is not None:
        document["lr_scheduler"] = lr_scheduler.state_dict()

    def begin() -> None:
        shutil.rmtree(new, ignore_errors=True)  # left by a process that was killed
        new.mkdir(parents=True)

    def write() -> None:
        if optimizer is not None and not experts:
            document["optimizer"] = optimizer.state_dict()
        elif optimizer is not None:
            _write(experts.optimizer_states(model, optimizer), new / OPTIMIZER.format(experts.rank))
        for number, found in of_experts.items():
            _write(found, new / EXPERT.format(number))
        if first:
            _write(document, new / MODEL)

    def publish() -> None:
        target = folder / _name(iteration)
        replace_folder(new, target, old=target.with_name(f"{target.name}.old"))
        replace_file(folder / LATEST, f"{iteration}", mode=0o666)  # the newest is named when it is whole

    # In three parts: the folder is there before ranks write, and published when all have.
    _together(experts, folder, begin if first else None)
    _together(experts, folder, write)
    _together(experts, folder, publish if first else None)


def load_checkpoint(
    checkpoints_path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    strict: bool = True,
) -> int:
    """Loads the newest checkpoint, and returns its iteration; 0, and nothing is changed, if there is none.

    Every rank calls it, before ``with_bagua``. A model with experts may be on another number of ranks than the one that
    was saved, with as many experts in all. ``strict``: as in ``torch.nn.Module.load_state_dict``. Raises BaguaError for
    files that are damaged or missing, and for a checkpoint of another model.
    """
    folder = Path(checkpoints_path)
    try:
        text = (folder / LATEST).read_text(errors="replace").strip()
    except FileNotFoundError:
        return 0
    if not text.isdecimal():
        raise BaguaError(f"{folder / LATEST} holds {text[:40]!r}: it must be the number of an iteration. [BG708]")
    model, at = _plain(model), _folder(folder, int(text))
    _refuse_shards(model)
    experts = ExpertStates.of(model)
    document = _read(at / MODEL)
    states = dict(_part(document, "model", at))
    experts.check(states, at)
    states |= experts.join([_read(at / EXPERT.format(number)) for number in experts.files(document.get("ranks"))])
    try:
        model.load_state_dict(states, strict=strict)
    except RuntimeError as error:
        raise BaguaError(f"{at} is a checkpoint of another model. {error} [BG709]") from None
    if optimizer is not None:
        optimizer.load_state_dict(_optimizer_states(document, at, experts, model, optimizer))
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(_part(document, "lr_scheduler", at))
    return int(text)


def _refuse_shards(model: nn.Module) -> None:
    if is_sharded(model):
        raise BaguaError(
            "A file holds one rank's parts of a sharded model: write and read it with torch.distributed.checkpoint, by "
            "the lines of docs/howto/checkpoints.md#a-sharded-model. [BG710]"
        )


def _optimizer_states(
    document: dict[str, Any], at: Path, experts: ExpertStates, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    if not experts:
        found: dict[str, Any] = _part(document, "optimizer", at)
        return found
    files: list[dict[str, Any]] = []
    while (path := at / OPTIMIZER.format(len(files))).exists():
        files.append(_read(path))
    if not files:
        raise BaguaError(f"{at} has no state of an optimizer: load it with optimizer=None. [BG709]")
    return experts.join_optimizer(files, model, optimizer, at)


def _part(document: Any, name: str, at: Path) -> Any:
    if not isinstance(document, dict) or name not in document:
        what = "of the model" if name == "model" else f"of {name}: load it with {name}=None"
        raise BaguaError(f"{at} has no state {what}. [BG709]")
    return document[name]


def _plain(model: nn.Module) -> nn.Module:
    """Returns the model inside DistributedDataParallel."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) and hasattr(model, "inner") else model


def _name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def _folder(folder: Path, iteration: int) -> Path:
    at = folder / _name(iteration)
    before = at.with_name(f"{at.name}.old")  # a process was killed while it replaced this one
    return before if before.is_dir() and not at.is_dir() else at


def _together(experts: ExpertStates, folder: Path, part: Callable[[], None] | None) -> None:
    """Runs a part, and waits until all ranks have done theirs. If one fails, all raise. None: another rank does it."""
    mistake: BaguaError | None = None
    try:
        if part is not None:
            part()
    except (OSError, RuntimeError) as error:
        mistake = BaguaError(f"No checkpoint was written into {folder}: {error} [BG710]")
    if experts.comm is not None:
        raise_together(mistake, experts.comm)
    elif mistake is not None:
        raise mistake


class _ForeignStateError(RuntimeError):
    """State of these types could not be loaded again."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(
            f"a state holds {', '.join(sorted(names))}, and load_checkpoint reads plain data alone: it could not load "
            "this again. Leave it out of state_dict(), or keep it there as numbers, strings or tensors."
        )


def _write(document: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(with_plain_numbers(document), file)
        file.flush()
        os.fsync(file.fileno())  # a crash of the machine must not leave a name without content
    find_foreign = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)  # torch 2.5 has none
    with _numbers_of_numpy():
        names = find_foreign(path) if find_foreign is not None else ()
    if names:
        # Told when it is written: a checkpoint that can't be read would be found too late.
        raise _ForeignStateError(names)


def _read(path: Path) -> dict[str, Any]:
    try:
        with _numbers_of_numpy():
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise BaguaError(f"{path} is missing: the checkpoint is not whole. {_advice(path)} [BG708]") from None
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BaguaError(f"{path} can't be read, it may have been cut off: {words}. {_advice(path)} [BG708]") from None
    return found


def _numbers_of_numpy() -> AbstractContextManager[object]:
    """Files of the original, which wrote states as they were, may hold numbers of NumPy, such as a learning rate."""
    allow = getattr(torch.serialization, "safe_globals", None)  # torch 2.4 has none
    numpy = sys.modules.get("numpy")  # torch imports it where it is there, and does without it
    if allow is None or numpy is None:
        return nullcontext()
    dtypes = [numpy.dtype(one) for one in ("bool", "int32", "int64", "float16", "float32", "float64")]
    rebuild = numpy.float64(0).__reduce__()[0]
    old = (rebuild, "numpy.core.multiarray.scalar")  # its name before NumPy 2
    new = (rebuild, "numpy._core.multiarray.scalar")
    made: AbstractContextManager[object] = allow([old, new, numpy.dtype, *{type(one) for one in dtypes}])
    return made


def _advice(path: Path) -> str:
    return f"Write the number of an older one into {path.parent.parent / LATEST}, or train anew."
