"""Experts in checkpoints: each by its number among all ranks', so that another number of ranks can load them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bagua.base.errors import BaguaError, ConfigError
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.job import environment
from bagua.torch_api.layers.moe import MOELayer, members

States = dict[str, Any]


@dataclass(frozen=True)
class ExpertStates:
    """The experts of a model on this rank. False if it has none. ``layers``: beginnings of the names in their layers,
    and experts of each layer here. ``comm``: None where one process has all."""

    layers: Mapping[str, int]
    comm: Communicator | None

    @classmethod
    def of(cls, model: nn.Module) -> ExpertStates:
        """Raises ConfigError for layers with a process group of their own."""
        found = {name: one for name, one in model.named_modules() if isinstance(one, MOELayer)}
        comms = [members(one.group) for one in found.values()]
        if any(comm is not None and comm.nranks() != environment.get_world_size() for comm in comms):
            raise ConfigError(
                "Checkpoints have room for MoE layers of all ranks, and not for a part of the ranks. [BG710]"
            )
        # ``lstrip``: the model itself may be the layer.
        inside = {f"{name}.".lstrip(".") + "experts.bagua_experts.": one for name, one in found.items()}
        return cls({name: one.num_local_experts for name, one in inside.items()}, next(iter(comms), None))

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def rank(self) -> int:
        """Rank of this process; 0 if there is one process."""
        return 0 if self.comm is None else self.comm.rank()

    @property
    def ranks(self) -> int:
        """Number of processes that share the experts."""
        return 1 if self.comm is None else self.comm.nranks()

    def files(self, ranks: int | None) -> list[int]:
        """Numbers of the files with this rank's experts in a checkpoint of so many ranks. None: one by the original,
        whose layers all have equally many experts."""
        found = set()
        for local in self.layers.values():
            for number in range(self.rank * local, self.rank * local + local):
                if ranks is None:
                    found.add(number)
                else:
                    each, most = self.ranks * local // ranks, self.ranks * max(self.layers.values()) // ranks
                    found.add(number // each * most + number % each)
        return sorted(found)

    def _among_all(self, name: str) -> tuple[int, str] | None:
        """Returns (number of the expert here, name with its number among all) of a parameter or buffer; None if it
        belongs to no expert.
        """
        for beginning, local in self.layers.items():
            if name.startswith(beginning):
                index, _, rest = name.removeprefix(beginning).partition(".")
                return int(index), f"{beginning}{self.rank * local + int(index)}.{rest}"
        return None

    def _here(self, name: str) -> str | None:
        """The reverse; None if the expert is on another rank."""
        for beginning, local in self.layers.items():
            if name.startswith(beginning):
                number, _, rest = name.removeprefix(beginning).partition(".")
                index = int(number) - self.rank * local
                return f"{beginning}{index}.{rest}" if 0 <= index < local else None
        return None

    def split(self, states: Mapping[str, Any]) -> tuple[States, dict[int, States]]:
        """Returns what all ranks share, and the contents of each file of experts by its number. Experts of several
        layers share a file, which one rank writes; where layers have equally many experts, its number is theirs.
        """
        most = max(self.layers.values(), default=1)
        shared: States = {}
        experts: dict[int, States] = {}
        for name, value in states.items():
            found = self._among_all(name)
            if found is None:
                shared[name] = value
            else:
                index, among_all = found
                experts.setdefault(self.rank * most + index, {})[among_all] = value
        return shared, experts

    def join(self, files: Sequence[States]) -> States:
        """State of the experts here, under their names here."""
        found = ((self._here(name), value) for states in files for name, value in states.items())
        return {name: value for name, value in found if name is not None}

    def check(self, states: Mapping[str, Any], at: Path) -> None:
        """Raises BaguaError if the checkpoint has another number of experts."""
        ranks = self.ranks
        for beginning, local in self.layers.items():
            gate = states.get(beginning.removesuffix("experts.bagua_experts.") + "gate.wg.weight")
            if gate is not None and len(gate) != ranks * local:
                raise BaguaError(
                    f"{at} has {len(gate)} experts in {beginning}, and this model has {local} on each of {ranks} "
                    f"ranks. Choose ranks and num_local_experts so that they make {len(gate)}. [BG709]"
                )

    def _names(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
        """Returns names of the optimizer's parameters by their positions, with numbers among all."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        found = [names.get(one, "") for group in optimizer.param_groups for one in group["params"]]
        return [(self._among_all(name) or (0, name))[1] for name in found]

    def optimizer_states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> States:
        """The part that this rank writes. Rank 0 has what all ranks share."""
        names, states = self._names(model, optimizer), optimizer.state_dict()
        mine = {
            index: state
            for index, state in states["state"].items()
            if self.rank == 0 or self._here(names[index]) is not None
        }
        return {"optimizer": {**states, "state": mine}, "parameters": names}

    def join_optimizer(
        self, files: Sequence[States], model: nn.Module, optimizer: torch.optim.Optimizer, at: Path
    ) -> States:
        """State of this rank's optimizer from those that all ranks wrote. Raises BaguaError if that can't be."""
        if any("parameters" not in one for one in files):  # written by the original: each rank has all of its own
            if len(files) != self.ranks:
                raise BaguaError(
                    f"{at} was written by the original on {len(files)} ranks, without names of parameters: the state "
                    f"of its optimizers can be loaded by {len(files)} ranks alone. Load it with optimizer=None. "
                    "[BG709]"
                )
            return dict(files[self.rank]["optimizer"])
        known: States = {}
        for one in reversed(files):  # reversed: of what all have, rank 0's counts
            known |= {one["parameters"][index]: state for index, state in one["optimizer"]["state"].items()}
        names, mine = self._names(model, optimizer), optimizer.state_dict()["param_groups"]
        groups = files[0]["optimizer"]["param_groups"]
        if len(groups) != len(mine):
            raise BaguaError(f"{at} has an optimizer of {len(groups)} groups, and this one has {len(mine)}. [BG709]")
        return {
            "state": {index: known[name] for index, name in enumerate(names) if name in known},
            # Positions of parameters are those of this optimizer.
            "param_groups": [{**group, "params": own["params"]} for group, own in zip(groups, mine, strict=True)],
        }
