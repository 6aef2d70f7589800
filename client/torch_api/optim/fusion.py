"""Steps an optimizer over tensors that its parameters share."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch

from bagua.torch_api.optim.block import Block, Part
from bagua.torch_api.optim.elementwise_check import Witness
from bagua.torch_api.optim.lanes import addresses, lies_alone
from bagua.torch_api.optim.rules import (
    ALONE,
    CACHED_ELEMENTS,
    SERIAL_ELEMENTS,
    calls_closure_once,
    is_elementwise,
    kind,
    refuse_group,
    refuse_optimizer,
    refuse_parameter,
)
from bagua.torch_api.train.optimizer_code import Exchange, own_code, step_with

LOG = logging.getLogger("bagua")


class Fusion:
    """``count``: parameters that the last ``step`` moved as rows of shared tensors. ``steps_of_groups``: one for each
    step of each group in which it moved any, and for the steps before, which made their state. ``reasons``: why others
    are not fused, and how many for each reason.

    The trick is the original's: the optimizer's own step runs over other parameters, each of which is many. It is the
    same object with the same groups, so that learning rates, flags, hooks, schedulers and attributes of its own count.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, do_flatten: bool = True, check_flatten: bool = True) -> None:
        self.optimizer = optimizer
        self.count = 0
        self.steps_of_groups = 0
        self._prepared: Counter[int] = Counter()  # by group, steps that have made states alone
        self.reasons: Counter[str] = Counter()
        self.blocks: list[Block] = []
        self._moves = do_flatten
        self._checks = check_flatten
        self._exchange = Exchange(optimizer)
        self._order: list[torch.Tensor] = []  # of the optimizer's parameters when blocks were made
        self._states: list[dict[str, Any]] = []  # likewise
        self._alone: list[list[torch.Tensor]] = []  # by group, parameters outside of blocks
        self._stepped: set[int] = set()  # ids of parameters that have made a plain step
        self._own: set[int] = set()  # memory of blocks in which parameters lie
        self._threads = 0  # of torch, when blocks were made: their bound follows from it
        self._stale = True
        self._refused = ""  # for good
        self._steps = 0
        self._parts: list[Part] = []
        self._rest: list[torch.Tensor] = []
        self._beside: dict[str, tuple[dict[torch.Tensor, Any], dict[torch.Tensor, Any]]] = {}
        self._entered = False
        self._witness: Witness | None = None
        self._told = ""
        optimizer.register_load_state_dict_post_hook(self._forget)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups with fused tensors in place of the parameters that they stand for."""
        found = [{**group, "params": list(alone)} for group, alone in zip(self._groups, self._alone, strict=False)]
        for block in self.blocks:
            found[block.group]["params"].append(block.weights.flat)
        return found

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def explain(self) -> str:
        """Says in one sentence how many parameters are fused, and why the others are not."""
        total = sum(len(group["params"]) for group in self._groups)
        rows = sum(len(block.parameters) for block in self.blocks)
        text = (
            f"{rows} of {total} parameters of {type(self.optimizer).__name__} are fused (tensors: {len(self.blocks)})"
        )
        why = "; ".join(f"{number}: {words}" for words, number in self.reasons.most_common())
        return f"{text}. Not fused: {why}." if why else f"{text}."

    def _forget(self, _: torch.optim.Optimizer) -> None:
        """Forgets the blocks after a state was loaded."""
        self._stale = True
        self._stepped.clear()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step of the optimizer, with its hooks. Returns what ``closure`` or the optimizer's step
        returned.
        """
        self.count = 0
        if closure is not None and not calls_closure_once(self.optimizer):
            return self._step_plainly("a closure was given, and only the optimizer knows when it calls it", closure)
        if getattr(self.optimizer, "_bagua_steps_in_backward", False):
            return self._step_plainly("with_bagua(..., step_in_backward=True) steps it in parts", closure)
        refused = self._refused or refuse_optimizer(self.optimizer)
        if refused:
            return self._step_plainly(refused, closure)
        loss: Any = None

        def enter() -> None:
            nonlocal loss
            if closure is not None:
                with torch.enable_grad():  # step() runs without gradients
                    loss = closure()
            with torch.no_grad():
                self._enter()

        returned = step_with(self.optimizer, enter, self._leave)
        return returned if closure is None else loss

    def _step_plainly(self, why: str, closure: Callable[[], Any] | None) -> Any:
        self._refuse(why)
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def _refuse(self, why: str) -> None:
        self.blocks, self._stale = [], True
        self.reasons = Counter({why: sum(len(group["params"]) for group in self._groups)})
        self._tell()

    # Within the optimizer's step

    def _enter(self) -> None:
        if self._stale or self._threads != torch.get_num_threads() or (self._checks and not self._known()):
            self._arrange()
        lists = self._take_all(self._checks)
        if lists is None:
            self._arrange()
            lists = self._take_all(False)  # just arranged: no look is needed
        assert lists is not None
        self._rest = [one for alone in self._alone for one in alone if one.grad is not None]
        states: dict[torch.Tensor, dict[str, Any]] = {}
        for part in self._parts:
            lists[part.block.group].append(part.leaf)
            states[part.leaf] = part.state
        self._witness = None
        # Zero or a power of two: later steps are tried less and less.
        if self._parts and not is_elementwise(self.optimizer) and self._steps & (self._steps - 1) == 0:
            self._witness = Witness(self.optimizer, self._parts)
            for number, parameter, state in self._witness.parameters:
                lists[number].append(parameter)
                states[parameter] = state
        self._change_beside()
        self._exchange.put(lists, states)
        self._entered = True

    def _take_all(self, checks: bool) -> list[list[torch.Tensor]] | None:
        """Makes the parts of this step. Returns, by group, parameters that make it alone; None if a block is not what
        it was. A block is looked at right before it is used, while it is in the cache."""
        lists: list[list[torch.Tensor]] = [list(alone) for alone in self._alone]
        self._parts = []
        tables = [table for table in self._tables().values() if table]
        for block in self.blocks:
            if checks and not block.intact():
                return None
            # Some of a block's parameters in a table: it can't become one tensor.
            if any(0 < sum(one in table for one in block.parameters) < len(block.parameters) for table in tables):
                lists[block.group] += block.parameters
            else:
                lists[block.group] += self._take_rows(block)
        return lists

    def _tables(self) -> dict[str, dict[torch.Tensor, Any]]:
        """Returns tables of the optimizer with a tensor for each parameter, beside its state."""
        return {name: getattr(self.optimizer, name) for name in getattr(self.optimizer, "per_parameter", ())}

    def _take_rows(self, block: Block) -> list[torch.Tensor]:
        """Makes parts of this step. Returns parameters of the block that make the step alone, or none."""
        gradients = [one.grad for one in block.parameters]
        places = addresses(gradients)
        end, left = 0, []
        for begin, following in block.runs(gradients, places is not None):
            if following - begin > 1:
                left += block.parameters[end:begin]
                end = following
                some: Any = gradients[begin:following]
                self._parts.append(Part(block, begin, following, some, places and places[begin:following]))
                _count_change(block.parameters[begin:following])  # now, while they are in the cache
        return left + block.parameters[end:]

    def _change_beside(self) -> None:
        """Tables of the optimizer follow."""
        for name, table in self._tables().items():
            if not table:
                continue
            changed = dict(table)
            for part in self._parts:
                values = [changed.pop(one) for one in part.parameters if one in changed]
                if values:
                    changed[part.leaf] = part.block.take_beside(name, values, part.begin)
            self._beside[name] = table, changed
            setattr(self.optimizer, name, changed)

    def _leave(self) -> None:
        if not self._entered:
            return
        self._entered = False
        self._exchange.take_back()
        beside, self._beside = self._beside, {}
        for name, (table, changed) in beside.items():
            setattr(self.optimizer, name, table)
            if not changed:
                table.clear()  # the optimizer has cleared its table
        parts, self._parts = self._parts, []
        with torch.no_grad():
            if self._witness is not None and not self._witness.agrees():
                self._step_again(parts, self._witness)
                return
            self._witness = None
            for part in parts:
                self._stale = not part.finish() or self._stale
        self.count = sum(part.end - part.begin for part in parts)
        self._steps += self.count > 0
        new = [one for one in self._rest if id(one) not in self._stepped]
        self._count_groups({part.block.group for part in parts}, set(map(id, new)))
        self._stepped.update(map(id, new))
        # The first step of new ones has made state: they may be rows from now on.
        self._stale = self._stale or bool(new)

    def _count_groups(self, fused: set[int], new: set[int]) -> None:
        for group in fused:
            self.steps_of_groups += 1 + self._prepared.pop(group, 0)
        for group, alone in enumerate(self._alone):
            if new and group not in fused and not new.isdisjoint(map(id, alone)):
                self._prepared[group] += 1

    def _step_again(self, parts: Sequence[Part], witness: Witness) -> None:
        """Repeats the step for parameters of its parts, each by itself, because the optimizer can't be fused."""
        witness.restore()
        lists: list[list[torch.Tensor]] = [[] for _ in self._groups]
        for part in parts:
            part.leaf.grad = None
            lists[part.block.group] += part.parameters
        self._refused = witness.words
        self._refuse(self._refused)
        self._exchange.put(lists, {})
        try:
            own_code(self.optimizer)(self.optimizer)
        finally:
            self._exchange.take_back()

    # Blocks

    def _known(self) -> bool:
        """True if the optimizer still has the parameters and states for which blocks were made."""
        now = [one for group in self._groups for one in group["params"]]
        if len(now) != len(self._order) or not all(map(is_, now, self._order)):
            return False
        states = self.optimizer.state.values()  # no look-up: torch's tensors are slow keys
        return len(states) == len(self._states) and all(map(is_, states, self._states))

    def _arrange(self) -> None:
        """Makes blocks anew. Values move, and stay the same."""
        own = self._own
        self._order = [one for group in self._groups for one in group["params"]]
        self._states = list(self.optimizer.state.values())
        self._alone = []
        self.reasons = Counter()
        self._stale, self._threads = False, torch.get_num_threads()
        blocks: list[Block] = []
        for number, group in enumerate(self._groups):
            alike: dict[Any, list[torch.Tensor]] = {}
            alone: list[torch.Tensor] = []
            words = refuse_group(group)
            for one in group["params"]:
                state = self.optimizer.state.get(one) or {}
                why = words or refuse_parameter(one, state, id(one) in self._stepped)
                if why:
                    self.reasons[why] += 1
                    alone.append(one)
                    continue
                # Memory of a former block is ours, though parameters share it.
                home = self._moves and (lies_alone(one) or one.untyped_storage().data_ptr() in own)
                alike.setdefault((kind(one, state), home), []).append(one)
            for (_, home), some in alike.items():
                for rows in _divide(some):
                    if len(rows) > 1:
                        blocks.append(Block(number, rows, self.optimizer.state, home))
                    else:
                        alone += rows
                        self.reasons[ALONE] += 1
            self._alone.append(alone)
        self.blocks = blocks
        made = {block.weights.storage for block in blocks if block.home}
        self._own = {one.untyped_storage().data_ptr() for one in self._order} & (own | made)
        if self._steps or blocks:
            self._tell()

    def _tell(self) -> None:
        text = self.explain()
        if text != self._told:
            self._told = text
            LOG.info("fuse_optimizer: %s", text)


def _divide(parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Rows of blocks. On the CPU a block is small enough for one thread, or for its cache."""
    most = len(parameters)
    if parameters[0].device.type == "cpu":
        bound = CACHED_ELEMENTS if torch.get_num_threads() == 1 else SERIAL_ELEMENTS
        most = max(1, bound // max(one.numel() for one in parameters))
    return [list(parameters[begin : begin + most]) for begin in range(0, len(parameters), most)]


def _count_change(parameters: Sequence[torch.Tensor]) -> None:
    """autograd notices when a parameter is changed between forward and backward, as with a plain step."""
    try:
        torch.autograd.graph.increment_version(parameters)
    except (TypeError, RuntimeError):  # torch before 2.6 takes one
        for one in parameters:
            torch.autograd.graph.increment_version(one)
