"""Makes the name "bagua" known to ``torch.distributed``.

torch calls ``register`` at the end of its own import (entry point in the group ``torch.backends``, since torch 2.5).
This is a package of its own, and imports nothing of ``bagua`` before a group is made: the folder of a program may have
a ``bagua.py`` or a folder ``bagua``, which Python takes for ours, and ``import torch`` must not end there. Nothing
heavy is imported, and torch only within functions: this may be what imports torch.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

NAME = "bagua"  # the backend's name, and that of the package which has it


class Devices(Sequence[str]):
    """Kinds of devices whose tensors the backend carries, as they are when torch makes a group: to ask for GPUs at the
    end of ``import torch`` would begin CUDA in programs that only fork."""

    def _found(self) -> list[str]:
        import torch

        return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

    def __getitem__(self, index: Any) -> Any:
        return self._found()[index]

    def __len__(self) -> int:
        return len(self._found())


def register() -> None:
    """Registers the backend once. Nothing where this torch has no ``torch.distributed``."""
    from torch import distributed

    if not distributed.is_available() or NAME.upper() in distributed.Backend._plugins:
        return
    distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    distributed.Backend.backend_capability[NAME] = Devices()  # type: ignore[assignment]
    _mend_default()


def _create(options: Any, backend_options: Any = None) -> Any:
    other = in_the_way()
    if other is not None:
        raise ImportError(
            f'The backend "{NAME}" can\'t be used: Python finds {other} where it looks for the package {NAME}. Rename '
            "it, or start the program from another folder. [BG213]"
        )
    from bagua.c10d.backend import create

    return create(options, backend_options)


def in_the_way() -> str | None:
    """Path of what Python takes for the package ``bagua`` if that is not ours. It is not run."""
    loaded = sys.modules.get(NAME)
    spec = getattr(loaded, "__spec__", None) if loaded is not None else importlib.util.find_spec(NAME)
    places = getattr(loaded, "__path__", None) or getattr(spec, "submodule_search_locations", None) or []
    if any(os.path.isfile(os.path.join(place, "c10d", "backend.py")) for place in places):
        return None
    return str(getattr(loaded, "__file__", None) or getattr(spec, "origin", None) or next(iter(places), "nothing"))


def _mend_default() -> None:
    """Has torch choose a default backend for groups of "cpu:bagua" and "cpu:gloo". Where any backend is registered from
    outside, torch before 2.14 chooses none, warns "No backend of type 0", and counts no operations."""
    from torch.distributed import distributed_c10d

    make = getattr(distributed_c10d, "_new_process_group_helper", None)  # private, and may move: a test tells
    if make is not None:
        distributed_c10d._new_process_group_helper = _choosing(make)


def _choosing(make: Callable[..., Any]) -> Callable[..., Any]:
    from torch import distributed

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        found = make(*args, **options)
        group = found[0]
        if type(group) is distributed.ProcessGroup and group.name() == "undefined":
            config = distributed.distributed_c10d.BackendConfig(distributed.Backend(distributed.get_backend(group)))
            first = next(iter(config.get_device_backend_map().values()))
            group._set_default_backend(distributed.Backend.backend_type_map[first])
        return found

    return made
