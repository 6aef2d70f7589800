"""Samplers that know how far an epoch is, and can go on from there, also with another number of ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import distributed
from torch.utils.data import Sampler

from bagua.torch_api.comm.checkpoint_state import Kept, keepers
from bagua.torch_api.data.complexity import check_length
from bagua.torch_api.job.session import current, is_initialized

Item = TypeVar("Item")
BLOCK = 1 << 14  # Indices that become Python's integers at a time: ten million of them would take 400 MB


def place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Returns (number of ranks, this one's): as given, else those of the job. Raises ValueError if they don't fit,
    BaguaError where they are not given and nothing is initialised.
    """
    if num_replicas is None or rank is None:
        # A program may share out among the ranks of torch.distributed alone.
        if not is_initialized() and distributed.is_available() and distributed.is_initialized():
            found = distributed.get_world_size(), distributed.get_rank()
        else:
            membership = current().membership
            found = membership.world_size, membership.rank
        num_replicas = found[0] if num_replicas is None else num_replicas
        rank = found[1] if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank is {rank} of {num_replicas} ranks: it must be from 0 to num_replicas - 1. [BG701]")
    return num_replicas, rank


class Legs:
    """An epoch's course. ``before``, ``[(ranks, given), …]``: each of so many ranks was given so many items (samples,
    or batches), then the job went on with another number of ranks. At present there are ``replicas`` ranks, and each
    was given ``given`` items."""

    def __init__(self, replicas: int, told: Iterable[Sequence[int]] = ()) -> None:
        """``told``: by ``to_json``, of a job with as many ranks, or others."""
        self.replicas = replicas
        self.given = 0
        # A leg in which nothing was given changes nothing.
        self.before = [(ranks, given) for ranks, given in told if given]
        if self.before and self.before[-1][0] == replicas:  # as many ranks as before: the leg goes on
            self.given = self.before.pop()[1]

    def to_json(self) -> list[list[int]]:
        """Returns all of it in JSON's types."""
        return [*map(list, self.before), [self.replicas, self.given]]

    def rest(
        self,
        order: torch.Tensor,
        deal: Callable[[torch.Tensor, int], Any],
        used: Callable[[Any, int], torch.Tensor],
    ) -> Any:
        """``deal(order, ranks)`` of the samples that no earlier leg has used. ``used(dealt, given)``: the samples of
        the first items of all ranks."""
        for replicas, given in self.before:
            taken = torch.zeros(int(order.max()) + 1 if len(order) else 0, dtype=torch.bool)
            taken[used(deal(order, replicas), given)] = True
            order = order[~taken[order]]
        return deal(order, self.replicas)


class ResumableSampler(Sampler[Item], Generic[Item]):
    """A sampler with epochs, and with ``state_dict`` in the middle of them, as torchdata's StatefulDataLoader wants it.

    An iteration begins with the epoch, but for the first one after ``load_state_dict``: that goes on where the state
    was taken. ``set_epoch`` with the epoch of that state changes nothing.
    """

    def __init__(self, dataset: Any, length: int, num_replicas: int | None, rank: int | None, seed: int) -> None:
        self.dataset = dataset
        self.num_replicas, self.rank = place(num_replicas, rank)
        self.seed = seed
        self.epoch = 0
        self._length = length
        self._legs = Legs(self.num_replicas)
        self._resumed = False
        if is_initialized():  # checkpoints of the job hold it
            keepers(current()).add("sampler of shares", self)

    @abstractmethod
    def _items(self, legs: Legs) -> Iterator[Item]:
        """This rank's items of the last leg, from ``legs.given`` on."""

    def set_epoch(self, epoch: int) -> None:
        """Gives the epoch an order of its own. Call it before each epoch, on all ranks."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._restart()

    def _restart(self) -> None:
        self._legs, self._resumed = Legs(self.num_replicas), False

    def __iter__(self) -> Iterator[Item]:
        check_length(self.dataset, self._length)
        if not self._resumed:
            self._restart()
        self._resumed = False
        # Not a generator: the position is settled when the iteration begins, not at its first item.
        return self._walk(self._legs, self._items(self._legs))

    def _walk(self, legs: Legs, items: Iterator[Item]) -> Iterator[Item]:
        for item in items:
            legs.given += 1
            yield item

    def state_dict(self, given: int | None = None) -> dict[str, Any]:
        """The position in the epoch, in JSON's types. ``given``: samples (batches, of a sampler of batches) of this
        rank that were trained on since the iteration began; needed where a plain ``DataLoader`` has worker processes,
        because they ask the sampler ahead of time. Without it all that the sampler has given out count."""
        legs = self._legs.to_json()
        if given is not None:
            legs[-1][1] = given  # workers of a DataLoader have asked for more than was used
        return {"epoch": self.epoch, "seed": self.seed, "length": self._length, "legs": legs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state, from which the next iteration goes on: with the samples of that epoch that no rank had been
        given, shared out among the ranks of now. Raises ValueError if it is no such state, or one of another dataset or
        seed.
        """
        try:
            mine = {"seed": self.seed, "length": self._length}
            other = {name: state[name] for name in mine}
            epoch, told = int(state["epoch"]), [[int(ranks), int(given)] for ranks, given in state["legs"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"This is no state of a {type(self).__name__}: {error!r}. [BG703]") from error
        if mine != other:
            raise ValueError(f"This state is of another sampler: it has {other}, and this one has {mine}. [BG703]")
        if any(ranks < 1 or given < 0 for ranks, given in told):
            raise ValueError(f"This state of a {type(self).__name__} is damaged: its legs are {told}. [BG703]")
        self.epoch = epoch
        self._legs = Legs(self.num_replicas, told)
        self._resumed = True

    # Checkpoints: see ``Keeper``

    def keep(self) -> Kept:
        """Returns the state to keep, as ``state_dict`` does: what has been given out counts."""
        return Kept(self.state_dict())

    def misfit(self, document: Any) -> str:
        """Says why a document is no state of a sampler with this seed, over as many samples; empty if it is one."""
        return differences(document, {"seed": self.seed, "length": self._length})

    def make_room(self, document: Any, own: Any) -> Kept:
        """Loads a state, as ``load_state_dict`` does."""
        self.load_state_dict(document)
        return Kept(None)

    def filled(self, ranks: int) -> None:
        """Does nothing: there is no more to take over."""


def differences(document: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Says which of these settings differ from those of a checkpoint; empty if none does."""
    return " ".join(
        f"{name} was {document[name]}, and is {now}." for name, now in mine.items() if document[name] != now
    )


def numbers(indices: torch.Tensor) -> Iterator[int]:
    """Yields the tensor's elements as integers of Python."""
    return chain.from_iterable(indices[at : at + BLOCK].tolist() for at in range(0, len(indices), BLOCK))
