"""State of a job that a checkpoint holds: who has it, and under which names."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from bagua.torch_api.job.session import Session

Path = tuple[str, ...]
"""Where a tensor lies in the checkpoint: keys of dictionaries in dictionaries."""
Tensors = dict[Path, torch.Tensor]


@dataclass
class Kept:
    """State of one keeper on this rank.

    ``document``: plain data, of which rank 0's counts. ``own``: plain data of this rank. ``alike``: tensors that are
    the same on all ranks. ``of_first``: those of rank 0 stand for all ranks that have none ``of_rank`` under the same
    name. ``of_rank``: this rank's own.
    """

    document: Any
    own: Any = None
    alike: Tensors = field(default_factory=dict)
    of_first: Tensors = field(default_factory=dict)
    of_rank: Tensors = field(default_factory=dict)


class Keeper(Protocol):
    """Has state that a checkpoint holds."""

    def keep(self) -> Kept:
        """The state now. Tensors are the live ones. Raises TypeError if it can't be told."""
        ...

    def misfit(self, document: Any) -> str:
        """Says for people why the state in a checkpoint does not fit; empty if it does."""
        ...

    def make_room(self, document: Any, own: Any) -> Kept:
        """Takes over plain data, and returns the tensors that are to be filled. ``own``: this rank's; None if it had no
        part in the checkpoint. All ranks call it together."""
        ...

    def filled(self, ranks: int) -> None:
        """The tensors are filled from a checkpoint of so many ranks. All ranks call it together."""
        ...


class Keepers:
    """Holders of state of one session, each as long as somebody else holds it."""

    def __init__(self, _: Session) -> None:
        # By keeper, in the order in which they were made: kind, name.
        self._all: weakref.WeakKeyDictionary[Any, tuple[str, str]] = weakref.WeakKeyDictionary()

    def add(self, kind: str, keeper: Keeper, name: str = "") -> None:
        """Adds a holder. Holders of one ``kind`` have a ``name``, or are made in the same order on all ranks."""
        self._all[keeper] = kind, name

    def forget(self, keeper: Keeper) -> None:
        """Checkpoints hold it no more."""
        self._all.pop(keeper, None)

    def all(self) -> dict[str, Keeper]:
        """By name, in the order in which they were made."""
        found: dict[str, Keeper] = {}
        counts: Counter[str] = Counter()
        for keeper, (kind, name) in list(self._all.items()):
            counts[kind] += 1
            found[f"{kind} {name or counts[kind]}"] = keeper
        return found


def keepers(session: Session) -> Keepers:
    """Returns the object of this session."""
    return session.keep(Keepers)
