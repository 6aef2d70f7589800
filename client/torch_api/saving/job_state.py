"""The state of a whole job, as one rank sees it: what a checkpoint holds, and the way back.

Tensors lie in dictionaries in dictionaries; each has a key, its names with dots between them:

    model.0.weight                           of the first model that was wrapped; "model 2.model.…" of the second one
    optimizer.state.0.weight.exp_avg         as torch's get_optimizer_state_dict names it
    states.NAME.…                            of register_state
    slots.…, errors.…, algorithm.…           of the algorithm
    ranks.3.…                                of rank 3 alone

Plain data of all ranks is under "bagua.job", that of each rank under "bagua.ranks.3".
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bagua.base.errors import BaguaError
from bagua.torch_api.comm.checkpoint_state import Path, Tensors, keepers
from bagua.torch_api.comm.plain_data import decode, encode, tensor_paths
from bagua.torch_api.job.session import Session

JOB: Path = ("bagua", "job")
RANDOM = "random"
STATE = "state "


def of_rank(rank: int, path: Path) -> Path:
    """Returns the file of a rank's own state."""
    return ("ranks", str(rank), *path)


def document_of(rank: int) -> Path:
    """Returns the file of a rank's plain data."""
    return ("bagua", "ranks", str(rank))


def key(path: Path) -> str:
    """The name under which torch's format has it."""
    return ".".join(path)


@dataclass
class JobState:
    """``alike``: tensors of which each rank writes a share. ``mine``: those that this rank writes. ``documents``: plain
    data that it writes."""

    alike: Tensors = field(default_factory=dict)
    mine: Tensors = field(default_factory=dict)
    documents: dict[Path, Any] = field(default_factory=dict)


def collect(session: Session, rank: int) -> JobState:
    """The state now; tensors are the live ones. Raises BaguaError that names a part whose state can't be told."""
    found = JobState()
    job: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, keeper in keepers(session).all().items():
        try:
            kept = keeper.keep()
        except Exception as error:  # of the program's, too
            raise BaguaError(f"No checkpoint is written: the state of {name} can't be told. {error} [BG710]") from error
        job[name], own[name] = kept.document, kept.own
        found.alike |= _below(name, kept.alike)
        if rank == 0:
            found.mine |= _below(name, kept.of_first)
        # Rank 0's own stands for all that have none.
        only_here = {path: one for path, one in kept.of_rank.items() if rank or path not in kept.of_first}
        found.mine |= {of_rank(rank, path): one for path, one in _below(name, only_here).items()}
    tensors: list[torch.Tensor] = []
    own[RANDOM] = random_state(tensors)
    for path, one in zip(tensor_paths(own[RANDOM]), tensors, strict=True):
        found.mine[of_rank(rank, (RANDOM, *path))] = one
    found.documents[document_of(rank)] = own
    if rank == 0:
        found.documents[JOB] = job
    return found


def _below(name: str, tensors: Mapping[Path, torch.Tensor]) -> Tensors:
    """Paths in the whole state of those of the keeper of this name."""
    top: Path = (name,)
    if name == "model 1":  # checkpoints of one model have its names as they are
        top = ()
    elif name.startswith(STATE):
        top = ("states", name.removeprefix(STATE))
    return {(*top, *path): one for path, one in tensors.items()}


class Return:
    """The way back to the state of a checkpoint that ``ranks`` ranks have written."""

    def __init__(self, session: Session, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._keepers = keepers(session).all()
        self._random: RandomState | None = None

    def misfits(self, job: Mapping[str, Any]) -> str:
        """Words where the program is another one; empty if it is not. ``job``: of the checkpoint."""
        if job.keys() != self._keepers.keys():
            return (
                f"The checkpoint has {', '.join(job) or 'nothing'}, and this program has "
                f"{', '.join(self._keepers) or 'nothing'}. Wrap the same models, make the same samplers and register "
                "the same states before resume()."
            )
        for name, keeper in self._keepers.items():
            words = keeper.misfit(job[name])
            if words:
                return f"Its {name} differs. {words}"
        return ""

    def make_room(self, job: Mapping[str, Any], own: Mapping[str, Any] | None) -> list[tuple[list[Path], torch.Tensor]]:
        """Takes over plain data. Returns tensors to be filled, each with the places where it may be, best first.
        ``own``: plain data of this rank; None if it had no part in the checkpoint. All ranks call it together."""
        room: list[tuple[list[Path], torch.Tensor]] = []
        for name, keeper in self._keepers.items():
            found = keeper.make_room(job[name], None if own is None else own[name])
            room += [([path], one) for path, one in _below(name, found.alike).items()]
            for path, one in _below(name, {**found.of_first, **found.of_rank}).items():
                room.append(([of_rank(self._rank, path), path], one))  # a rank without a part of its own reads rank 0's
        if own is not None:
            self._random = RandomState(own[RANDOM])
            paths = tensor_paths(own[RANDOM])
            for path, one in zip(paths, self._random.tensors, strict=True):
                room.append(([of_rank(self._rank, (RANDOM, *path))], one))
        return room

    def filled(self) -> None:
        """Tensors are filled. All ranks call it together."""
        for keeper in self._keepers.values():
            keeper.filled(self._ranks)
        if self._random is not None:
            self._random.set()  # last: loading may draw random numbers


def random_state(tensors: list[torch.Tensor]) -> Any:
    """Returns the random generators of this process as plain data: torch's, Python's, and NumPy's where it is in use.
    Tensors in it go to ``tensors``."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")  # we need it for nothing else
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        # Plain numbers: NumPy need not be there when it is read.
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
