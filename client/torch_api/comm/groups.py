"""Process groups: ranks that train a model together, and the communicators among them.

Ranks that make the same group must agree on the numbers of its communicators without talking to each other, whatever
groups other ranks make meanwhile. Groups of all ranks are counted: every rank makes them in the same order. For any
other group the number is a hash of its ranks and of how many groups of exactly these ranks there were before.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

from torch import distributed

from bagua.base.errors import BaguaError
from bagua.torch_api.comm.communicator import NON_COMM_MEMBER, WORLD, Comm, Communicator, World
from bagua.torch_api.comm.communicators import communicator_of, communicators
from bagua.torch_api.comm.members import Roster
from bagua.torch_api.job.session import Session, current


class BaguaProcessGroup(Roster):
    """Some of the job's ranks, made by ``new_group``, ``from_torch_group`` or, for all ranks, ``init_process_group``.

    ``ranks``: global numbers, ascending. ``contains_this_rank``: whether this process is one of them. ``stream``: the
    torch.cuda.Stream that primitives on CUDA tensors go through; None: the current one. ``group_name``: a name that
    this process gave, see ``get_communicator``.

    Communicators are made when they are first asked for. A process that is no member of the group, or of the part asked
    for, gets ``CommMember.NON_COMM_MEMBER``, which is false, and primitives on it return at once.

    In an elastic job ``ranks`` are those of the members that are left, in the present generation. A group that lost one
    gives out no communicators any more, but for that of all ranks (``init_process_group``) and for models that were
    wrapped with it.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        stream: Any = None,
        group_name: str = "",
        *,
        key: str = "",
        place: int | None = None,
    ) -> None:
        self.place = place
        self._session = current()
        self._made = communicators(self._session)
        self.ranks = sorted(ranks)
        self.stream = stream
        self.group_name = group_name
        self.contains_this_rank = self._session.membership.rank in self.ranks
        self._everyone = tuple(self.ranks) == self._made.world.ranks
        self._enroll(self._session.membership, self.ranks)
        self._key = f"{key} {self.numbers}"  # numbers of members, and not ranks: these change with the generation
        self._key += f" {self._made.count(self._key)}"  # how many groups of exactly these members were made before
        # Taken here, where all ranks are in the same order, and not when a communicator is first asked for.
        self._world_id = self._made.next_world_id() if self._everyone and not key else None
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        if self._session.elastic:
            self._session.renew_with(self)

    def renew(self) -> None:
        """In a new generation of the job. Its communicators have been renewed before, or will be."""
        self.ranks = self._follow(self._session.membership)
        made, self._communicators = list(self._communicators.values()), {}
        for one in made:
            one.renew_ranks()
            if not one.lost:
                self._communicators.setdefault(one.ranks, one)
        _note_ranks(self)

    def __deepcopy__(self, _: dict[int, Any]) -> BaguaProcessGroup:
        """Copies of a model that communicates in it do so, too."""
        return self

    def __repr__(self) -> str:
        return f"BaguaProcessGroup(ranks={self.ranks}, group_name={self.group_name!r})"

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Global numbers of the group's ranks on every host that has one."""
        found = (tuple(rank for rank in host if rank in self.ranks) for host in self._session.membership.hosts)
        return tuple(host for host in found if host)

    def get_global_communicator(self) -> Communicator:
        """Returns the communicator of all ranks of the group."""
        return self._part(self.ranks)

    def get_intra_node_communicator(self) -> Communicator:
        """The group's ranks on this host."""
        rank = self._session.membership.rank
        return self._part(next((host for host in self.hosts if rank in host), ()))

    def get_inter_node_communicator(self) -> Communicator:
        """The group's first rank on each host."""
        return self._part([host[0] for host in self.hosts])

    def communicator(self, ranks: Sequence[int]) -> Communicator:
        """A communicator for some of the group's ranks (global numbers, any order), this one among them; the same
        object each time. Only members call it. Raises ValueError for ranks that are not in the group, or without this
        one."""
        self._check_members(ranks)
        return self._part(sorted(ranks))

    def new_communicator(
        self,
        ranks: Sequence[int] | None = None,
        *,
        shrinks: bool = False,
        purpose: str = "",
        number: int | None = None,
    ) -> Communicator:
        """A communicator of its own, another one each time, for ``ranks`` (None: all of the group). All its members
        make theirs in the same order. It ends with the last reference to it. ``shrinks``: in an elastic job it goes on
        without members that are lost; if it was made without naming ``ranks``, with newcomers too.

        ``purpose``: members make theirs at moments of their own, in the same order among those of this purpose, and
        nobody uses it in a later generation. So they agree on its number, whichever of them had made one before a
        generation ended.

        ``number``: with ``ranks`` None, the number that it gets."""
        members = self.ranks if ranks is None else sorted(ranks)
        self._check_members(members)
        if ranks is None and (self.place is not None or number is not None):
            counted, grows = number is None, shrinks and self.grows
            number = self._made.next_world_id(self.place) if number is None else number
            made = self._made.attach(number, members, shrinks=shrinks, grows=grows, place=self.place, counted=counted)
            made.stream = self.stream
            return made
        # Some that are all at the moment may not be so when members have come: they count for themselves then.
        if tuple(members) == self._made.world.ranks and (ranks is None or not self._session.elastic):
            number, grows = self._made.next_world_id(), shrinks and self.grows
            made = self._made.attach(number, members, shrinks=shrinks, grows=grows, counted=True)
        else:
            key = f"{self._key} own {self._made.numbers(members)}"
            if purpose:
                # Newcomers may be let in during a generation.
                key += f" for {purpose} in {self._session.membership.generation} of {self.numbers}"
            made = self._made.make(f"{key} {self._made.count(key)}", members, shrinks=shrinks, counted=True)
        made.stream = self.stream
        return made

    def _check_members(self, ranks: Sequence[int]) -> None:
        strange = [rank for rank in ranks if rank not in self.ranks]
        if strange or len(set(ranks)) != len(ranks):
            raise ValueError(f"{list(ranks)} must be different ranks of the group {self.ranks}. [BG406]")
        if self._session.membership.rank not in ranks:
            raise ValueError(f"Rank {self._session.membership.rank} is not among the members {list(ranks)}. [BG406]")

    def _part(self, ranks: Sequence[int]) -> Communicator:
        members = tuple(ranks)
        self._check_whole("group", self.ranks)
        if self._session.membership.rank not in members:
            return NON_COMM_MEMBER
        found = self._communicators.get(members)
        if found is None:
            if self._session is not current():  # numbers of a former session mean other communicators now
                raise BaguaError("This group was made before destroy_process_group(): make a new one. [BG407]")
            if self._world_id is not None and members == self._made.world.ranks:
                found = self._made.attach(self._world_id, members, shrinks=self.shrinks)
            else:
                key = f"{self._key} part {self._made.numbers(members)}"
                found = self._made.make(key, members, shrinks=self.shrinks)
            found.stream = self.stream
            self._communicators[members] = found
        return found


_numbers = itertools.count(1)  # of the groups of this process
_pg_map: weakref.WeakValueDictionary[str, BaguaProcessGroup] = weakref.WeakValueDictionary()
_pg_group_ranks: weakref.WeakKeyDictionary[BaguaProcessGroup, dict[int, int]] = weakref.WeakKeyDictionary()
# Weak: a torch group that was destroyed must not live on here.
_torch_to_bagua_pg_map: weakref.WeakKeyDictionary[Any, BaguaProcessGroup] = weakref.WeakKeyDictionary()


def _remember(group: BaguaProcessGroup) -> BaguaProcessGroup:
    """Enters it where programs for the original look things up. It stays alive only as long as somebody holds it."""
    _pg_map[group.group_name] = group
    _note_ranks(group)
    return group


def _note_ranks(group: BaguaProcessGroup) -> None:
    _pg_group_ranks[group] = {rank: position for position, rank in enumerate(group.ranks)}


def _get_default_group() -> BaguaProcessGroup:
    """The group of all ranks. Raises BaguaError before ``init_process_group``."""
    return current().keep(_default_group)


def _default_group(session: Session) -> BaguaProcessGroup:
    """Makes the default group: its communicator of all ranks is the one that ``comm=None`` means."""
    world = communicators(session).world
    made = BaguaProcessGroup(world.ranks, None, "0", key="default")
    made._communicators[world.ranks] = world
    made.shrinks = made.grows = True
    made._key = "default"  # whoever its members are
    return _remember(made)


def replicas_group() -> BaguaProcessGroup:
    """The group of the ranks that hold the same shards as this one: those at its position of each island."""
    return current().keep(_replicas_group)


def _replicas_group(session: Session) -> BaguaProcessGroup:
    membership = session.membership
    made = BaguaProcessGroup(membership.at_place(membership.place), None, "", key="replicas", place=membership.place)
    made.shrinks = made.grows = True
    made._key = f"replicas {membership.place}"  # whoever its members are
    return made


def new_group(ranks: Sequence[int] | None = None, stream: Any = None) -> BaguaProcessGroup:
    """A group of ``ranks`` (None: all). Ranks of the job that are no members may call it, too, or not.

    Its members make their groups in the same order. ``stream``: see ``BaguaProcessGroup``. The group and its
    communicators end with the last reference to them. Raises ValueError for ranks that the job does not have, for
    none, and for one named twice.
    """
    world = current().membership.world_size
    members = list(range(world)) if ranks is None else list(ranks)
    for rank in members:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world:
            raise ValueError(f"{rank!r} is not a rank of this job: ranks are 0 to {world - 1}. [BG406]")
    if not members:
        raise ValueError("A group needs at least one rank. [BG406]")
    if len(set(members)) != len(members):
        raise ValueError(f"ranks is {members}: each rank can be named once. [BG406]")
    return _remember(BaguaProcessGroup(members, stream, str(next(_numbers))))


def from_torch_group(group: Any, stream: Any = None) -> BaguaProcessGroup:
    """The group of the ranks of a ``torch.distributed`` process group, the same one each time. Its members call it.

    Raises ValueError if this process is no member of ``group``.
    """
    if group is None:
        group = distributed.group.WORLD
    if not isinstance(group, distributed.ProcessGroup):
        raise ValueError(f"{group!r} is no torch.distributed group of which this process is a member. [BG406]")
    known = _torch_to_bagua_pg_map.get(group)
    if known is not None and known._session is current():
        return known
    ranks = distributed.get_process_group_ranks(group)
    island = current().membership.island
    if distributed.get_world_size() == len(island):  # torch.distributed counts the ranks of this island alone
        ranks = [island[rank] for rank in ranks]
    made = BaguaProcessGroup(ranks, stream, f"torch {next(_numbers)}", key=f"torch {group.group_name}")
    _torch_to_bagua_pg_map[group] = _remember(made)
    return made


def to_torch_group(group: BaguaProcessGroup) -> Any:
    """The ``torch.distributed`` process group that ``from_torch_group`` made it of; None if there is none."""
    return next((torch_group for torch_group, ours in _torch_to_bagua_pg_map.items() if ours is group), None)


def communicator_of_group(group: Any) -> Communicator:
    """The communicator of all members of ``group``: None for all ranks, a group of ``torch.distributed`` or of ours, or
    a communicator. NON_COMM_MEMBER on a process that is no member."""
    if group is None or isinstance(group, (Communicator, World)):
        return communicator_of(group)
    if isinstance(group, BaguaProcessGroup):
        return group.get_global_communicator()
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        return NON_COMM_MEMBER
    return from_torch_group(group).get_global_communicator()


class comm:
    """Holds ``WORLD``: all ranks of the job."""

    WORLD = WORLD


class CommMember:
    """``WORLD``: all ranks of the job. ``NON_COMM_MEMBER``: stands for a communicator that a process is no member of;
    it is false."""

    WORLD = WORLD
    NON_COMM_MEMBER = NON_COMM_MEMBER


def _rank_not_in_comm(comm: Comm = None) -> bool:
    """Returns True if this process is no member of a communicator. False for None, which means all ranks."""
    return comm is NON_COMM_MEMBER


def _rank_not_in_group(group: BaguaProcessGroup | None = None) -> bool:
    """Returns True if this process is no member of a group. False for None, which means all ranks."""
    return group is not None and not group.contains_this_rank


def _bagua_backend_comm(comm: Comm = None) -> Communicator | None:
    """The communicator that ``comm`` of a primitive stands for; None on a process that is no member."""
    return communicator_of(comm) or None


def get_communicator(group_name: str, comm_name: str) -> Communicator:
    """The communicator ``global``, ``inter`` or ``intra`` of the group named ``group_name`` (``BaguaProcessGroup
    .group_name``), or NON_COMM_MEMBER. Raises KeyError for a group that is not there, ValueError for another
    ``comm_name``."""
    group = _pg_map[group_name]
    if comm_name == "global":
        return group.get_global_communicator()
    if comm_name == "inter":
        return group.get_inter_node_communicator()
    if comm_name == "intra":
        return group.get_intra_node_communicator()
    raise ValueError(f"comm_name is {comm_name!r}: it must be global, inter or intra. [BG406]")
