"""From one rank to another: send and receive, and blocks of any size between all ranks."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from bagua.torch_api.comm.checks import begin, check_peer
from bagua.torch_api.comm.communicator import NON_COMM_MEMBER, Comm, Communicator
from bagua.torch_api.comm.transfer import DTYPES, check_tensor, transfer
from bagua.torch_api.cuda.port import PORT
from bagua.torch_api.join.connection import NOWHERE, Connection, Place
from bagua.torch_api.join.session import Session

if TYPE_CHECKING:
    from bagua.torch_api.cuda.connection import CudaConnection


def send(tensor: torch.Tensor, dst: int, comm: Comm = None) -> None:
    """Sends ``tensor`` to rank ``dst``, which must receive one of the same size and dtype. Returns when it has
    arrived."""
    if comm is NON_COMM_MEMBER:
        return
    session, group = begin(comm)
    check_peer(dst, group, "dst")
    check_tensor(tensor, "tensor")
    transfer(session, "send", tensor, None, tensor.numel(), group, root=dst)


def recv(tensor: torch.Tensor, src: int, comm: Comm = None) -> None:
    """Receives into ``tensor`` what rank ``src`` sends."""
    if comm is NON_COMM_MEMBER:
        return
    session, group = begin(comm)
    check_peer(src, group, "src")
    check_tensor(tensor, "tensor")
    transfer(session, "recv", None, tensor, tensor.numel(), group, root=src)


def alltoall_v(
    send_tensor: torch.Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: torch.Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: Comm = None,
) -> None:
    """``alltoall`` with blocks of any size: rank j gets ``send_counts[j]`` elements of ``send_tensor`` from element
    ``send_displs[j]`` on, and what comes from rank i goes to the ``recv_counts[i]`` elements of ``recv_tensor`` from
    ``recv_displs[i]`` on. The rest of ``recv_tensor`` stays as it is.

    Lists of whole numbers, one for each rank; what is longer is ignored. ``recv_counts[i]`` here must be
    ``send_counts`` of this rank at rank i, else CommunicationError comes on all ranks. Blocks to be received must not
    overlap (ValueError); those sent may.
    """
    if comm is NON_COMM_MEMBER:
        return
    session, group = begin(comm)
    check_tensor(send_tensor, "send_tensor")
    check_tensor(recv_tensor, "recv_tensor")
    if send_tensor.dtype != recv_tensor.dtype:
        raise TypeError(f"send_tensor is {send_tensor.dtype} and recv_tensor is {recv_tensor.dtype}: they must agree.")
    if send_tensor.device != recv_tensor.device:
        raise TypeError(
            f"send_tensor is on {send_tensor.device} and recv_tensor on {recv_tensor.device}: move one to the other."
        )
    gives = _Blocks.of(send_tensor, send_counts, send_displs, group.nranks(), "send")
    takes = _Blocks.of(recv_tensor, recv_counts, recv_displs, group.nranks(), "recv")
    takes.check_apart()
    if gives.counts[group.rank()] != takes.counts[group.rank()]:
        raise ValueError(
            f"This rank, {group.rank()}, sends {gives.counts[group.rank()]} elements to itself and receives "
            f"{takes.counts[group.rank()]}: both must agree."
        )
    with torch.no_grad():
        if PORT.cuda.holds(send_tensor):
            with PORT.cuda.by_way_of(group.stream):
                _exchange(_Device(session, group, send_tensor), gives, takes)
        else:
            _exchange(_Host(session, group), gives, takes)
        if not recv_tensor.is_inference():
            increment_version(recv_tensor)


def alltoall_v_inplace(tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: Comm = None) -> None:
    """``alltoall_v`` whose result replaces its input: block j goes to rank j, and what that one sends takes its
    place."""
    alltoall_v(tensor, counts, displs, tensor, counts, displs, comm)


@dataclass(frozen=True)
class _Blocks:
    """Parts of a tensor, one for each rank."""

    tensor: torch.Tensor
    counts: list[int]
    displs: list[int]
    name: str

    @classmethod
    def of(cls, tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], n: int, name: str) -> _Blocks:
        """Raises ValueError for lists that are too short or reach beyond the tensor, TypeError for what is no list of
        whole numbers."""
        for what, values in (("counts", counts), ("displs", displs)):
            if len(values) < n:
                raise ValueError(f"{name}_{what} has {len(values)} entries: there are {n} ranks.")
            for rank, value in enumerate(values[:n]):
                if isinstance(value, bool) or not isinstance(value, int):
                    raise TypeError(f"{name}_{what}[{rank}] is {value!r}: it must be a whole number.")
        for rank, (count, displ) in enumerate(zip(counts[:n], displs[:n], strict=True)):
            if count < 0 or displ < 0 or displ + count > tensor.numel():
                raise ValueError(
                    f"{name}_counts[{rank}]={count} elements from {name}_displs[{rank}]={displ} on do not lie in "
                    f"{name}_tensor, which has {tensor.numel()}."
                )
        return cls(tensor, list(counts[:n]), list(displs[:n]), name)

    def check_apart(self) -> None:
        """Raises ValueError if two blocks overlap."""
        end, owner = 0, 0
        for begin_, count, rank in sorted(zip(self.displs, self.counts, range(len(self.counts)), strict=True)):
            if count and begin_ < end:
                raise ValueError(f"The blocks of {self.name}_tensor for ranks {owner} and {rank} overlap.")
            if count:
                end, owner = begin_ + count, rank

    def flat(self) -> torch.Tensor:
        """All elements in a row; a copy if they don't lie so."""
        return self.tensor.detach().reshape(-1)


class _Host:
    """Where messages of CPU tensors lie, and what carries them."""

    def __init__(self, session: Session, group: Communicator) -> None:
        self.connection: Connection | CudaConnection = session.connection
        self.group = group
        self.stage = session.memory.place_stage

    def behind(self, start: Place, nbytes: int) -> Place:
        """The place so many bytes behind the beginning of a stage."""
        segment, offset = start
        return segment, offset + nbytes


class _Device:
    """The same for those of one device."""

    def __init__(self, session: Session, group: Communicator, tensor: torch.Tensor) -> None:
        lane = session.on_device(tensor)
        self.connection: Connection | CudaConnection = lane
        self.group = lane.twin(group)
        self.stage = functools.partial(lane.place_empty, device=tensor.device)
        self.behind = lane.behind


def _exchange(where: _Host | _Device, gives: _Blocks, takes: _Blocks) -> None:
    """All blocks at once, through memory of our own. The block of this rank itself goes nowhere."""
    dtype, group = gives.tensor.dtype, where.group
    me = group.rank()
    given, target = gives.flat(), takes.flat()
    out, out_at = where.stage(sum(gives.counts), dtype)
    into, into_at = where.stage(sum(takes.counts), dtype)
    torch.cat([given[at : at + count] for at, count in zip(gives.displs, gives.counts, strict=True)], out=out)
    messages = _Messages(where, dtype)
    for distance in range(1, group.nranks()):  # each rank begins with its next one: nobody gets all messages at once
        messages.submit("send", (me + distance) % group.nranks(), gives.counts, out_at)
        messages.submit("recv", (me - distance) % group.nranks(), takes.counts, into_at)
    mine, begin_ = gives.counts[me], sum(gives.counts[:me])
    target[takes.displs[me] : takes.displs[me] + mine] = out[begin_ : begin_ + mine]
    messages.wait(0)
    for peer, (at, count) in enumerate(zip(takes.displs, takes.counts, strict=True)):
        if peer != me:
            begin_ = sum(takes.counts[:peer])
            target[at : at + count] = into[begin_ : begin_ + count]
    if target.data_ptr() != takes.tensor.data_ptr():
        takes.tensor.copy_(target.view(takes.tensor.shape))


class _Messages:
    """Sends and receives under way. The core has room for a limited number."""

    LIMIT = 256

    def __init__(self, where: _Host | _Device, dtype: torch.dtype) -> None:
        self._where = where
        self._connection = where.connection
        self._dtype = dtype
        self._tickets: deque[int] = deque()

    def submit(self, kind: str, peer: int, counts: Sequence[int], start: Place) -> None:
        """Block ``peer`` of blocks that lie one after the other from ``start`` on."""
        self.wait(self.LIMIT)
        place = self._where.behind(start, sum(counts[:peer]) * self._dtype.itemsize)
        ticket = self._connection.submit(
            self._connection.kinds[kind],
            comm=self._where.group.id,
            dtype=self._connection.dtypes[DTYPES[self._dtype]],
            count=counts[peer],
            root=peer,
            src=place if kind == "send" else NOWHERE,
            dst=place if kind == "recv" else NOWHERE,
        )
        self._tickets.append(ticket)

    def wait(self, left: int) -> None:
        """Returns when at most ``left`` are under way."""
        while len(self._tickets) > left:
            self._connection.wait(self._tickets.popleft())
