"""A block: parameters of one kind that an optimizer steps as the rows of one tensor."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch

from bagua.torch_api.optim.lanes import Lane


class Block:
    """Parameters of one group, of one kind (``rules.kind``), at least two.

    State tensors of the parameters' shape are rows of a ``Lane``. Those without dimensions (``step``) lie side by side
    in one tensor. So the optimizer's own ``state`` always holds each parameter's state, and anybody may read it.

    ``home``: parameters lie in the block's lane. Otherwise their memory is somebody else's: it is used where it lies at
    equal distances, and copied there and back where it does not.
    """

    def __init__(
        self, group: int, parameters: Sequence[torch.Tensor], states: Mapping[torch.Tensor, dict[str, Any]], home: bool
    ) -> None:
        self.group = group
        self.parameters = list(parameters)
        self.home = home
        self.states = [states[one] if one in states else {} for one in parameters]
        self.per_parameter: dict[str, Lane] = {}
        self._gradients: Lane | None = None
        self._kept: list[int] = []  # where the first and the last gradient lay in the step before
        self._rows: dict[str, Lane] = {}
        self._scalars: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._plain: list[str] = []
        self._held: dict[str, list[Any]] = {}  # the tensors that belong into states
        first = parameters[0]
        self.weights = Lane(parameters, first.dtype, first.device)
        with torch.no_grad():
            self._move_in()
        self._places = [one.data_ptr() for one in self.parameters]
        self._leaves: dict[tuple[int, int], torch.Tensor] = {}

    def _move_in(self) -> None:
        if self.home:
            self.weights.fill([one.detach() for one in self.parameters])
            for one, row in zip(self.parameters, self.weights.rows, strict=True):
                one.data = row
        first = self.states[0]
        for name, value in first.items():
            if not isinstance(value, torch.Tensor):
                self._plain.append(name)
                continue
            values = [state[name] for state in self.states]
            if value.dim():
                lane = self._rows[name] = Lane(self.parameters, value.dtype, value.device)
                lane.fill(values)
                self._held[name] = lane.rows
            else:
                self._scalars[name] = torch.stack(values)
                self._held[name] = list(self._scalars[name].unbind())
            for state, kept in zip(self.states, self._held[name], strict=True):
                state[name] = kept

    def intact(self) -> bool:
        """True if parameters, and tensors of their states, are still those that the block holds."""
        if list(map(torch.Tensor.data_ptr, self.parameters)) != self._places:
            return False
        names = len(self._plain) + len(self._held)
        if list(map(len, self.states)).count(names) < len(self.states):
            return False
        try:
            return all(
                all(map(is_, map(operator.itemgetter(name), self.states), kept)) for name, kept in self._held.items()
            )
        except KeyError:
            return False

    def runs(self, gradients: Sequence[torch.Tensor | None], whole: bool) -> list[tuple[int, int]]:
        """Rows from and to which go together: each has a gradient, and scalars of their states are equal.

        ``whole``: all have a dense gradient."""
        if whole and self._scalars_equal():
            return [(0, len(gradients))]
        dense = [getattr(one, "layout", None) is torch.strided for one in gradients]
        values = {name: scalars.tolist() for name, scalars in self._scalars.items()}
        keys = [
            (present, *(found[number] for found in values.values()), *(state[name] for name in self._plain))
            for number, (present, state) in enumerate(zip(dense, self.states, strict=True))
        ]
        found, begin = [], 0
        for key, same in itertools.groupby(keys):
            end = begin + len(list(same))
            if key[0]:
                found.append((begin, end))
            begin = end
        return found

    def _scalars_equal(self) -> bool:
        for name in self._plain:
            values = [state[name] for state in self.states]
            if values.count(values[0]) < len(values):
                return False
        for name, scalars in self._scalars.items():
            if scalars._version != self._versions.get(name):  # no look at values that nobody has changed
                if not torch.equal(scalars, scalars[0].expand_as(scalars)):
                    return False
                self._versions[name] = scalars._version
        return True

    def take_gradients(
        self, gradients: Sequence[torch.Tensor], begin: int, places: list[int] | None = None
    ) -> torch.Tensor:
        """Gradients of the rows from ``begin`` on as one tensor: their own memory, or a copy. ``places``: their
        addresses, if somebody knows them.

        Gradients that stay where they are from step to step (``set_to_none=False``) move into the copy's memory, so
        that the next one is not needed."""
        found = self.weights.seen(gradients, begin, places)
        if found is not None:
            return found
        if self._gradients is None:
            # One operand with gaps is enough: weights or state have one already.
            self._gradients = Lane(
                self.parameters, gradients[0].dtype, gradients[0].device, gap=not (self.home or self._rows)
            )
        lane, end = self._gradients, begin + len(gradients)
        rows = lane.rows[begin:end]
        if all(map(is_, gradients, rows)):  # of different sizes: ``seen`` does not look at them
            return lane.flat[begin:end]
        lane.fill(gradients, begin)
        places = [gradients[0].data_ptr(), gradients[-1].data_ptr()]
        if places == self._kept:
            for parameter, row in zip(self.parameters[begin:end], rows, strict=True):
                parameter.grad = row
        self._kept = places
        return lane.flat[begin:end]

    def take_beside(self, name: str, values: Sequence[torch.Tensor], begin: int) -> torch.Tensor:
        """Tensors of the parameters' shapes that the optimizer keeps beside its state, as one tensor. They are
        copied where they don't lie side by side."""
        found = self.weights.seen(values, begin)
        if found is None:
            lane = self.per_parameter.setdefault(name, Lane(self.parameters, values[0].dtype, values[0].device))
            lane.fill(values, begin)
            found = lane.flat[begin : begin + len(values)]
        return found

    def leaf(self, begin: int, end: int) -> torch.Tensor:
        """The parameters of these rows as one: their own memory, or a copy that ``give_back`` returns."""
        if self.home:
            if (begin, end) not in self._leaves:
                self._leaves[begin, end] = self.weights.flat[begin:end].detach().requires_grad_()
            return self._leaves[begin, end]
        own = [one.detach() for one in self.parameters[begin:end]]
        found = self.weights.seen(own, begin)
        if found is None:
            self.weights.fill(own, begin)
            found = self.weights.flat[begin:end]
        return found.detach().requires_grad_()

    def state(self, begin: int, end: int) -> dict[str, Any]:
        """The state of these rows as that of one parameter."""
        first = self.states[begin]
        return {name: self._rows[name].flat[begin:end] if name in self._rows else first[name] for name in first}


class Part:
    """Rows of a block in one step."""

    def __init__(
        self, block: Block, begin: int, end: int, gradients: Sequence[torch.Tensor], places: list[int] | None = None
    ) -> None:
        self.block = block
        self.begin = begin
        self.end = end
        self.leaf = block.leaf(begin, end)
        self.leaf.grad = block.take_gradients(gradients, begin, places)
        self.state = block.state(begin, end)
        self._given = dict(self.state)
        self._memory = self.leaf.data_ptr()

    @property
    def parameters(self) -> list[torch.Tensor]:
        return self.block.parameters[self.begin : self.end]

    def finish(self) -> bool:
        """Gives each parameter, and its state, the new values after the optimizer's step. False if the optimizer has
        made or dropped state, so that blocks are to be made anew."""
        self.leaf.grad = None
        block, begin, end = self.block, self.begin, self.end
        if self.leaf.data_ptr() != self._memory:  # the optimizer has set .data
            block.weights.flat[begin:end].copy_(self.leaf.detach())
        if not block.home and (
            # Rows were copied in, or the optimizer made others: parameters get them back.
            self._memory == block.weights.flat[begin].data_ptr() or self.leaf.data_ptr() != self._memory
        ):
            block.weights.spread([one.detach() for one in self.parameters], begin)
        for name, value in self._given.items():
            if name in self.state:
                self._keep(name, value, self.state[name])
        made = self.state.keys() - self._given.keys()
        for name in made:
            self._share_out(name, self.state[name])
        dropped = self._given.keys() - self.state.keys()
        for name in dropped:
            for state in block.states[begin:end]:
                del state[name]
        return not (made or dropped)

    def _keep(self, name: str, given: Any, now: Any) -> None:
        block, begin, end = self.block, self.begin, self.end
        if name in block._rows:
            if now is not given:
                given.copy_(now)
        elif name in block._scalars:
            side_by_side = block._scalars[name][begin:end]
            if now is not given:
                given.fill_(now)
            side_by_side.fill_(given)
            # All rows are equal now, if all took part.
            block._versions[name] = block._scalars[name]._version if end - begin == len(block.states) else -1
        elif now is not given:
            for state in block.states[begin:end]:
                state[name] = now

    def _share_out(self, name: str, value: Any) -> None:
        """State that the optimizer has made in this step."""
        rows = isinstance(value, torch.Tensor) and value.shape == self.leaf.shape
        for number, (state, parameter) in enumerate(
            zip(self.block.states[self.begin : self.end], self.parameters, strict=True)
        ):
            if rows:
                # In the strides of the parameter, as the optimizer would have made it.
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(
                    value[number].as_strided(parameter.shape, parameter.stride())
                )
            else:
                state[name] = value.clone() if isinstance(value, torch.Tensor) else value
