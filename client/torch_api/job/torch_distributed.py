"""``torch.distributed`` for the user's own calls, on Gloo (and NCCL for CUDA tensors). Nothing of ours goes through it.

Gloo starts three threads and a listening socket per rank; ranks connect to each other when they first communicate.
Before torch 2.8 every rank connects to all others at the start, so either all ranks of a job have the group or none.
In an elastic job the group is destroyed when a generation ends, and operations under way on it fail. The next
generation makes another one, whose ranks meet at a store that its first rank opens.
With islands the group is that of this rank's island. It lives as long as the island, which loses no member alone: FSDP
keeps its groups for life.
Processes that are forked (DataLoader workers) inherit the group's objects without the threads, and freeing these would
wait for threads for ever: in a forked child they are never freed.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import logging
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from bagua.base.address import is_loopback
from bagua.base.errors import ConfigError
from bagua.torch_api.job import environment
from bagua.torch_api.job.connection import Regrouped
from bagua.torch_api.job.session import Session

LOG = logging.getLogger("bagua")

SWITCH = "BAGUA_TORCH_DISTRIBUTED"
INTERFACE = "GLOO_SOCKET_IFNAME"
LAZY = "TORCH_GLOO_LAZY_INIT"
LAZY_SINCE = (2, 8)
LONGEST = timedelta(days=365)
MEETING = timedelta(minutes=5)
CONNECT = timedelta(seconds=30)
"""Rank 0 listens before it tells its address: a rank that can't connect in this time never will (a firewall)."""
CONNECT_AGAIN = timedelta(seconds=5)
"""In a later generation: that host was reached before, and may have been lost since."""
FREED_S = 5.0  # the interpreter's end waits so long for threads that free a group of a former generation
ADDRESS_BYTES = 256
_FILE, _FAILED = "file:", "!"
MIN = 2  # number of the reduction
_SIOCGIFADDR = 0x8915


class TorchGroup:
    """The default group of ``torch.distributed``, if it is ours; made for one session.

    ``leave``, ``offer`` and ``renew`` take it into the next generation of an elastic job (``Companion`` in session.py).
    """

    _uses = 0
    _guarded = False

    def __init__(self, session: Session, wanted: bool) -> None:
        self._session = session
        self._pid = os.getpid()
        self._mine: Any = None
        self._down = wanted  # it is to come up: now, or with the next generation
        self._offered: Store | None = None
        self._interface: str | None = None
        self._freeing: list[threading.Thread] = []
        type(self)._uses += 1
        if session.membership.later:  # ``renew`` follows
            return
        try:
            # Before torch 2.8 ranks connect to all others: one that stays away would hold them up.
            if not connects_lazily():
                self._down = _all_want(session, wanted)
            where = self._first_place()
            self._down = self._down and bool(where)
            if self._down:
                self._meet(where, CONNECT)
        except Regrouped:  # so it comes with the next generation
            pass
        except (RuntimeError, OSError, ValueError) as error:
            self._down = False
            self._warn(error)

    def _first_place(self) -> str:
        """Returns the place at which Gloo's ranks find each other first. All ranks of several hosts call it together;
        it is "" where rank 0 does not want the group."""
        membership = self._session.membership
        if all(len(ranks) % len(membership.island) == 0 for ranks in membership.hosts):  # all ranks decide alike
            # Each group of newcomers, and each later group, meets at a file of its own.
            return _FILE + self._file(f"{membership.members[membership.island[0]]}-{self._uses}")
        told, mine = {}, self.offer()
        for first in range(0, membership.world_size, len(membership.island)):  # of each island
            told[first] = _broadcast_text(self._session, mine, first)
        return told[membership.island[0]]

    def _on_one_host(self) -> bool:
        membership = self._session.membership
        return set(membership.local_ranks).issuperset(membership.island)

    def _meet(self, where: str, patience: timedelta) -> None:
        """Makes the group with the others that come to this place: a file beside the daemon's socket, or a TCP port of
        the first rank."""
        offered, self._offered = self._offered, None
        if where.startswith(_FAILED):
            raise RuntimeError(f"the first rank offers no place to meet: {where.removeprefix(_FAILED)} [BG910]")
        ranks = len(self._session.membership.island)
        if where.startswith(_FILE):
            store = FileStore(where.removeprefix(_FILE), ranks)
            # Its destructor aborts the process where the file can't be written any more: on a disk that has become
            # read-only, or is full. The daemon removes the file.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
            self._bring_up(store, "127.0.0.1")
        else:
            self._bring_up(offered or _store_at(where, ranks, patience), where.rpartition(":")[0])
        self._down = False

    def _warn(self, error: Exception) -> None:
        LOG.warning(
            "Rank %d could not bring up torch.distributed, which only your own calls of it need: %s",
            self._session.membership.rank,
            str(error).splitlines()[0],
        )

    def _bring_up(self, store: Store, towards: str) -> None:
        """Makes the default group, without waiting for other ranks if this torch connects lazily. ``towards``: a host
        of the job."""
        membership = self._session.membership
        address = "127.0.0.1" if self._on_one_host() else _address_towards(towards)
        interface = _interface_of(address)
        if interface is not None and INTERFACE not in os.environ:  # a variable that the user set stays
            os.environ[INTERFACE] = self._interface = interface  # for groups that the user makes, too
        hook = sys.excepthook
        place, ranks = membership.island.index(membership.rank), len(membership.island)
        with environment.for_a_moment(LAZY, "1"):
            distributed.init_process_group(backends(), store=store, rank=place, world_size=ranks, timeout=_patience())
        sys.excepthook = hook  # torch's puts "[rank1]: " before each line of a traceback
        self._mine = distributed.group.WORLD
        if not TorchGroup._guarded:
            TorchGroup._guarded = True
            # A forked child has the group's objects without its threads: freeing them would wait for ever.
            os.register_at_fork(after_in_child=_never_free)

    def _file(self, name: str) -> str:
        """Path of a file beside the daemon's socket, or where the daemon says, for ranks of this host."""
        socket_path = Path(self._session.data_socket)
        folder = Path(os.environ.get("BAGUA_MEETING_DIR") or socket_path.parent)
        return str(folder / f"{socket_path.stem}.torch-{name}")

    # The next generation

    def leave(self) -> None:
        """Destroys the group, because the generation ends: operations on it of other threads and ranks fail. That of an
        island stays."""
        if self._is_up() and self._session.membership.island_size == 1:
            self._down = True
            last = _backends_of_all()
            with suppress(RuntimeError, AttributeError):  # older torch has no abort, and Gloo's does nothing yet
                self._mine.abort()
            self._take_down()
            # Gloo's threads take 10 ms to end: nobody waits for that here.
            freeing = threading.Thread(target=last.clear, name="bagua-torch-leave", daemon=True)
            freeing.start()
            self._freeing = [*(one for one in self._freeing if one.is_alive()), freeing]

    def _is_up(self) -> bool:
        """Returns True if it is there, and ours: the program may have put its own in its place."""
        return self._mine is not None and distributed.is_initialized() and distributed.group.WORLD is self._mine

    def offer(self) -> str:
        """Opens the store of the next group on the first rank of the group, and returns its address; "" on others."""
        membership = self._session.membership
        self._offered = None
        if not self._down or membership.rank != membership.island[0]:
            return ""
        if self._on_one_host():
            return _FILE + self._file(secrets.token_hex(8))
        try:
            address = _address_towards(environment.get_master_addr())
            self._offered, where = _listen(address, len(membership.island))
        except (RuntimeError, OSError) as error:
            return f"{_FAILED}{error}"
        return where

    def renew(self, offers: Sequence[str]) -> None:
        """Makes the group again, of the ranks that take part in this generation. ``offers``: their results of
        ``offer``, by rank."""
        if self._down and distributed.is_initialized():  # the program has one of its own now
            self._down = False
        if not self._down:
            return
        self._take_down()
        try:
            if not connects_lazily():
                raise RuntimeError(f"torch {torch.__version__} can't make its group again: 2.8 or newer can. [BG910]")
            membership = self._session.membership
            first = membership.active.index(membership.island[0])
            where = offers[first] or f"{_FAILED}it has no torch.distributed group of Bagua"
            self._meet(where, CONNECT_AGAIN)
        except (RuntimeError, OSError, ValueError) as error:
            self._warn(error)

    def close(self) -> None:
        """Takes it down, if it is still there and ours. Waits for pending calls of the user's own."""
        self._wait_until_freed()
        self._take_down()

    def _take_down(self) -> None:
        if self._mine is None or self._pid != os.getpid():
            return  # a forked child has no threads that would end
        mine, self._mine = self._mine, None
        if self._interface is not None and os.environ.get(INTERFACE) == self._interface:
            del os.environ[INTERFACE]
        if distributed.is_initialized() and distributed.group.WORLD is mine:
            kept = _backends_of_all()  # held while groups are freed: see there
            with suppress(RuntimeError):  # a peer that is gone
                distributed.destroy_process_group()
            del mine
            kept.clear()

    def abandon(self) -> None:
        """The process ends by an error: others may be gone, and nobody is waited for but threads of this process."""
        if self._mine is not None:  # freeing would wait for ranks that are gone
            _never_free()
        self._wait_until_freed()

    def _wait_until_freed(self) -> None:
        freeing, self._freeing = self._freeing, []
        if self._pid == os.getpid():
            # A thread inside a destructor of C++ would abort the process when the interpreter ends.
            deadline = time.monotonic() + FREED_S
            for one in freeing:
                one.join(max(0.0, deadline - time.monotonic()))


def refuse_samplers_of_islands(elastic: bool) -> None:
    """Makes torch's ``DistributedSampler`` refuse numbers of torch.distributed, which knows the island alone: each
    island would get the same samples. In an ``elastic`` job it refuses those of islands, too: it is followed through
    losses by ranks. Once in a process."""
    from torch.utils.data import DistributedSampler  # here: no other job needs it, and it takes time

    make = DistributedSampler.__init__
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def init(self: Any, dataset: Any, num_replicas: Any = None, rank: Any = None, *rest: Any, **more: Any) -> None:
        size, world, own = environment.get_island_size(), environment.get_world_size(), environment.get_rank()
        # By ranks, by islands, or by groups of an island's ranks that read the same.
        right = [(world // alike, own // alike) for alike in range(1, size + 1) if size % alike == 0]
        if size > 1 and (num_replicas, rank) not in right:
            numbers = "" if num_replicas is None else f" with {num_replicas} replicas and rank {rank}"
            raise ConfigError(
                f"DistributedSampler{numbers} would give islands the same samples: "
                "torch.distributed knows this island alone. Write DistributedSampler(dataset, bagua.get_world_size(), "
                "bagua.get_rank()), or, where its ranks read the same, (dataset, bagua.get_replica_count(), "
                "bagua.get_island()). In an elastic job take bagua.contrib.ElasticSampler. [BG701]"
            )
        if size > 1 and elastic and (num_replicas, rank) != right[0]:
            raise ConfigError(
                "DistributedSampler of islands would give samples twice, or never, after an island is lost. Write "
                "bagua.contrib.ElasticSampler(dataset, global_batch=..., per_island=True). [BG701]"
            )
        make(self, dataset, num_replicas, rank, *rest, **more)

    DistributedSampler.__init__ = init  # type: ignore[method-assign]


def wanted() -> bool:
    """Returns True if this process is to make the group. Raises ConfigError if BAGUA_TORCH_DISTRIBUTED is no
    number."""
    return (
        environment.read_int(SWITCH, 1) != 0
        and distributed.is_available()
        and distributed.is_gloo_available()
        and not distributed.is_initialized()
    )


def connects_lazily() -> bool:
    """Returns True if Gloo's ranks of this torch connect when they first communicate."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= LAZY_SINCE


def backends() -> str:
    """Backends for the user's own tensors: Gloo, and NCCL for those on CUDA devices where there are any."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and distributed.is_nccl_available() else "gloo"


def _backends_of_all() -> list[Any]:
    """Returns the backends of all groups of torch.distributed, which the caller holds while it frees the groups."""
    found: list[Any] = []
    with suppress(AttributeError):  # private to torch, and may move: a test tells
        for group in distributed.distributed_c10d._world.pg_map:
            with suppress(RuntimeError):  # a group of the user's own kind
                # torch before 2.8 frees a group under the interpreter's lock, for which threads that Gloo joins may
                # wait. A backend that Python holds is freed without it.
                found += [group._get_backend(device) for device in group._device_types]
    return found


def _never_free() -> None:
    """Keeps all groups of torch.distributed from being freed, whatever becomes of the interpreter."""
    if distributed.is_initialized():
        for group, (_, store) in distributed.distributed_c10d._world.pg_map.items():
            for kept in (group, store):
                # A reference that nobody gives back: its destructor never runs.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _all_want(session: Session, wanted: bool) -> bool:
    """Returns True if every rank wants the group. Logs a warning on a rank that wants it where another one does not."""
    vote = torch.tensor([wanted], dtype=torch.uint8, device="cpu")
    session.connection.exchange_bytes("allreduce", vote.data_ptr(), vote.data_ptr(), 1, op=MIN)
    if wanted and not vote.item():
        LOG.warning(
            "Rank %d could not bring up torch.distributed, which only your own calls of it need: another rank wants "
            "none (BAGUA_TORCH_DISTRIBUTED=0, or one of its own), and before torch %d.%d all have one or none.",
            session.membership.rank,
            *LAZY_SINCE,
        )
    return bool(vote.item())


def _patience() -> timedelta:
    """Returns how long operations wait for ranks: as long as ours."""
    return timedelta(seconds=min(environment.get_wait_timeout(), LONGEST.total_seconds()))


def _listen(address: str, world_size: int) -> tuple[Store, str]:
    """A store that listens on a free port of ``address``, and where it is."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(where)
        listener.listen(1024)
        host, port = listener.getsockname()[:2]
        store = TCPStore(
            host,
            port,
            world_size,  # True: this is the server
            True,
            CONNECT_AGAIN,  # it connects to itself: not where a firewall drops even that
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=False,  # which takes no listening socket in torch 2.4
        )
    store.set_timeout(MEETING)
    return store, f"{host}:{port}"


def _store_at(where: str, world_size: int, patience: timedelta) -> Store:
    """The store that listens at ``where``."""
    host, _, port = where.rpartition(":")
    # Other ranks connect when they get here.
    store = TCPStore(host, int(port), world_size, False, patience, wait_for_workers=False)
    store.set_timeout(MEETING)
    return store


def _broadcast_text(session: Session, text: str, root: int) -> str:
    """Broadcasts the ``text`` of this rank, and returns it on every rank."""
    held = torch.zeros(ADDRESS_BYTES, dtype=torch.uint8, device="cpu")
    data = text.encode()[:ADDRESS_BYTES]
    held[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device="cpu")
    gives = session.membership.rank == root
    src, dst = (held.data_ptr(), 0) if gives else (0, held.data_ptr())
    session.connection.exchange_bytes("broadcast", src, dst, ADDRESS_BYTES, root=root)
    return bytes(held.tolist()).rstrip(b"\0").decode(errors="replace")


def _address_towards(host: str) -> str:
    """Returns this host's own address on the way to ``host``."""
    if is_loopback(host):
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str | None:
    """Name of the network interface with this IPv4 address; None where it can't be told: Gloo then chooses one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", os.fsencode(name)[:15])  # the kernel takes 15 bytes and a zero
            with suppress(OSError):
                found = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                # The address follows the name, the family and the port in ``struct ifreq``.
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
