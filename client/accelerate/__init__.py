"""Hugging Face Accelerate and Trainer on backend "bagua" of ``torch.distributed``: ``import bagua.accelerate`` first.

Both know a closed list of backends, but take a process group that is up already. So the import of this module brings it
up, on the ranks that ``bagua run``, ``accelerate launch`` or torchrun has started. A script need not even be changed:

    bagua run --nproc-per-node 2 -m bagua.accelerate train.py
    accelerate launch --multi_gpu --num_processes 2 -m bagua.accelerate train.py
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import distributed

import bagua.c10d  # noqa: F401 - registers the backend: torch before 2.5 does not do so by itself
import bagua.torch_api as bagua_api
from bagua.base.errors import ConfigError

__all__ = ["BaguaReport", "begin"]

USE_CPU = "ACCELERATE_USE_CPU"
BACKEND = "bagua"


def begin() -> bool:
    """Initialises ``torch.distributed`` with backend "bagua" if a launcher has started this process as one of several
    ranks. Returns whether it is up now. Where there is no GPU, Accelerate is told to use processors: otherwise each
    rank would train alone.

    Raises ConfigError if ``torch.distributed`` is up with another backend, or the job has islands.
    """
    if bagua_api.get_island_size() > 1:
        raise ConfigError(
            "Accelerate and the Trainer shard over all ranks, and know no islands: leave --island-size out, or write "
            "the loop with fully_shard and with_bagua. [BG618]"
        )
    if distributed.is_initialized():
        found = str(distributed.get_backend_config())
        if BACKEND not in found:
            raise ConfigError(
                f"torch.distributed is up already, with backend {found}: import bagua.accelerate before Accelerate's "
                "PartialState, Accelerator or TrainingArguments are made. [BG410]"
            )
        return True
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return False
    if not torch.cuda.is_available():
        os.environ.setdefault(USE_CPU, "true")
        if os.environ[USE_CPU].lower() in ("false", "0", "no"):  # `accelerate launch` without --cpu says so
            os.environ[USE_CPU] = "true"
    distributed.init_process_group(BACKEND)
    return True


@functools.cache
def _report_callback() -> type[Any]:
    """``BaguaReport``, over the TrainerCallback of transformers."""
    from transformers import TrainerCallback

    class BaguaReport(TrainerCallback):  # type: ignore[misc]
        """Callback for ``Trainer(callbacks=[BaguaReport()])``. ``bagua run`` and ``bagua job show`` then display step,
        number of steps and what the Trainer logs.
        """

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
            bagua_api.report(state.global_step, state.max_steps, numbers)

    BaguaReport.__module__, BaguaReport.__qualname__ = __name__, "BaguaReport"
    return BaguaReport


def __getattr__(name: str) -> Any:
    """``BaguaReport``, made when it is asked for: transformers takes seconds to import."""
    if name != "BaguaReport":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _report_callback()


begin()
