"""Limits connections that have shown no token: few at a time, and not for long.

gRPC for Python tells nothing of connections, and one that never makes a call holds a descriptor for ever. So once a
second this module looks at the sockets that the process has accepted, asks which of them have shown a token, and shuts
down those that have not in time. gRPC reads the end of the stream and closes its descriptor itself.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import resource
import socket
import stat
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote

import structlog

from bagua.base.address import network_of

TICK_S = 1.0
_MOST_STRANGERS = 2_048  # however many descriptors there are
_MOST_KNOWN = 10_000  # addresses
PERIOD_S = 60.0  # between two lines of the log about refusals
_MAX_ADDRESSES = 1_000
_SHOWN = 10  # addresses in one line
_OTHERS = "others"

log = structlog.get_logger("coordinator.rpc")

Peer: TypeAlias = tuple[str, int]  # Address in its shortest form, port


class Refusals:
    """Counts refusals by address and kind; of many there is one line in ``PERIOD_S``."""

    def __init__(self, clock: Callable[[], float], warn: Callable[..., Any] | None = None) -> None:
        self._clock = clock
        self._warn = warn or log.warning
        self._told_at = float("-inf")
        self._addresses: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()

    def add(self, address: str, kind: str) -> None:
        """Counts one more refusal from ``address``."""
        if address not in self._addresses and len(self._addresses) >= _MAX_ADDRESSES:
            address = _OTHERS
        self._addresses[address] += 1
        self._kinds[kind] += 1

    def log_due(self) -> None:
        """Logs the sum since the last time, if there is one and the time has come."""
        now = self._clock()
        if now - self._told_at >= PERIOD_S:
            if self._kinds:
                self._told_at = now
            self.log_rest()

    def log_rest(self) -> None:
        """Logs what was not told yet."""
        if not self._kinds:
            return
        addresses = dict(self._addresses.most_common(_SHOWN))
        more = len(self._addresses) - len(addresses)
        self._warn("refused", **self._kinds, addresses=addresses, **({"more_addresses": more} if more else {}))
        self._addresses.clear()
        self._kinds.clear()


@dataclass(frozen=True)
class Socket:
    """An accepted TCP connection of this process. ``inode`` stays the same as long as it lives."""

    inode: int
    descriptor: int
    peer: Peer


@dataclass
class _Seen:
    socket: Socket
    looks: int = 0
    admitted: bool = False


@dataclass(eq=False)
class Connections:
    """Connections that there are, with the mark of those that have shown a token. Used from the event loop only.

    ``look`` lists the accepted connections, outside of the event loop: 1,000 of them take 20 ms. ``cut`` shuts one
    down. A stranger is shut down after ``patience`` looks, not seconds: in a process that stood still nobody had the
    time to show anything. ``limit``
    strangers may be connected, and half as many from one network. Where there are more, those from addresses that never
    showed a token go first, then the oldest: daemons that come back find room.
    """

    look: Callable[[Iterable[Socket]], Awaitable[list[Socket]]]
    cut: Callable[[Socket], bool]
    limit: int
    patience: int
    refusals: Refusals
    counters: Counter[tuple[str, str]]

    def __post_init__(self) -> None:
        self._seen: dict[int, _Seen] = {}  # by inode, the oldest first
        self._fresh: set[Peer] = set()  # have shown a token since the last look
        self._known: dict[str, None] = {}  # addresses that have, the newest last

    def admitted(self, peer: str) -> None:
        """Notes that a call on this connection has shown a valid token."""
        found = parse_peer(peer)
        if found is not None:
            self._fresh.add(found)

    def refused(self, peer: str) -> None:
        """Notes that a call was refused because it has shown no valid token."""
        found = parse_peer(peer)
        self.refusals.add(found[0] if found else peer, "calls")

    def network(self, peer: str) -> str:
        """Returns the network that the caller is counted with."""
        found = parse_peer(peer)
        return network_of(found[0]) if found else peer

    def know(self, addresses: Iterable[str]) -> None:
        """Notes that a token was shown from these addresses."""
        for address in map(_address, addresses):
            self._known.pop(address, None)
            self._known[address] = None
        while len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    async def tick(self) -> None:
        """Looks at connections, once every ``TICK_S``. Raises the errors of ``look``."""
        await self._update()
        # Connections that came since the last look are not judged yet.
        strangers = [seen for seen in self._seen.values() if not seen.admitted and seen.looks > 1]
        for seen in strangers:
            if seen.looks > self.patience:
                self._end(seen.socket, "no_token_in_time")
        for seen in self._too_many([seen for seen in strangers if seen.looks <= self.patience]):
            self._end(seen.socket, "too_many")
        self.refusals.log_due()

    async def _update(self) -> None:
        # A connection that has shown a token by now was accepted before now: it is in this look, or gone.
        fresh, self._fresh = self._fresh, set()
        try:
            sockets = await self.look([seen.socket for seen in self._seen.values()])
        except BaseException:
            self._fresh |= fresh
            raise
        found = {found.inode: found for found in sockets}
        self._seen = {inode: seen for inode, seen in self._seen.items() if inode in found}
        for inode, connection in found.items():
            if inode not in self._seen:
                self._seen[inode] = _Seen(connection)
        for seen in self._seen.values():
            seen.looks += 1
            seen.admitted = seen.admitted or seen.socket.peer in fresh
        self.know(address for address, _ in fresh)

    def _too_many(self, strangers: list[_Seen]) -> Iterator[_Seen]:
        """Yields those of ``strangers`` to shut down. ``strangers`` begin with the oldest."""
        of_network = Counter(network_of(seen.socket.peer[0]) for seen in strangers)
        rest = []
        for seen in strangers:
            network = network_of(seen.socket.peer[0])
            if of_network[network] > max(1, self.limit // 2):
                of_network[network] -= 1
                yield seen
            else:
                rest.append(seen)
        rest.sort(key=lambda seen: seen.socket.peer[0] in self._known)  # stable
        yield from rest[: max(0, len(rest) - self.limit)]

    def _end(self, connection: Socket, reason: str) -> None:
        if self.cut(connection):
            self.counters["connections_cut", reason] += 1
            self.refusals.add(connection.peer[0], "connections")


def parse_peer(text: str) -> Peer | None:
    """``ipv4:1.2.3.4:5``, ``ipv6:%5B::1%5D:5`` as gRPC writes them. None: no TCP connection."""
    scheme, _, rest = text.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if scheme not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return _address(unquote(host).strip("[]")), int(port)


def _address(host: str) -> str:
    """Returns one spelling for each address, without the zone, which gRPC and the kernel write differently."""
    try:
        parsed = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


# ---- the process's own sockets (Linux)


class OwnSockets:
    """Sockets of this process that were accepted on a port given to ``watch``.

    A descriptor is looked at through a copy, since gRPC may close its own at any time and the number may be given to
    another connection. The copy goes to a number that was taken at the start (``dup2``): so it works also when no
    descriptor is left.
    """

    def __init__(self) -> None:
        self._ports: set[int] = set()
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._copy = os.dup(self._nothing)
        self._others: dict[int, int] = {}  # descriptor -> inode of sockets that are none of these
        self._using = threading.Lock()  # the copy: ``look`` may run in a thread
        self._closed = False

    def close(self) -> None:
        """Gives the two descriptors back."""
        with self._using:
            self._closed = True
            os.close(self._copy)
            os.close(self._nothing)

    def watch(self, port: int) -> None:
        """This process listens on ``port``."""
        self._ports.add(port)
        self._others.clear()

    def look(self, known: Iterable[Socket]) -> list[Socket]:
        """Lists all sockets of this process. ``known``: those of the last call, which need no second look. A thread may
        call it.
        """
        with self._using:
            return [] if self._closed else self._find(known)

    def _find(self, known: Iterable[Socket]) -> list[Socket]:
        by_inode = {found.inode: found for found in known}
        others: dict[int, int] = {}
        result = []
        for descriptor in self._descriptors():
            inode = _socket_inode(descriptor)
            if inode is None:
                continue
            found = by_inode.get(inode)
            if found is None or found.descriptor != descriptor:
                found = None if self._others.get(descriptor) == inode else self._accepted(descriptor)
            if found is None:
                others[descriptor] = inode
            else:
                result.append(found)
        self._others = others
        return result

    def cut(self, connection: Socket) -> bool:
        """Shuts a connection down in both directions. False if it has gone."""
        with contextlib.suppress(OSError), self._using, self._opened(connection.descriptor) as (inode, found):
            if inode == connection.inode:
                found.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def _accepted(self, descriptor: int) -> Socket | None:
        with contextlib.suppress(OSError), self._opened(descriptor) as (inode, found):
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] in self._ports:
                host, port = found.getpeername()[:2]  # fails for one that listens
                return Socket(inode, descriptor, (_address(host), port))
        return None

    @contextlib.contextmanager
    def _opened(self, descriptor: int) -> Iterator[tuple[int, socket.socket]]:
        """Inode and socket of the copy. Raises OSError if the descriptor was closed, or is no socket."""
        os.dup2(descriptor, self._copy, inheritable=False)
        try:
            found = socket.socket(fileno=self._copy)
            try:
                yield os.fstat(self._copy).st_ino, found
            finally:
                found.detach()  # the copy's number stays ours: closing would give it to others
        finally:
            os.dup2(self._nothing, self._copy, inheritable=False)

    def _descriptors(self) -> Iterable[int]:
        try:
            return [int(name) for name in os.listdir("/proc/self/fd")]
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # none is free: every number is one


def _socket_inode(descriptor: int) -> int | None:
    """Returns the inode of a socket; None if it is none, or closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def limit_of_strangers(descriptors: int) -> int:
    """Returns the number of connections of strangers that are allowed if so many files may be open."""
    return _MOST_STRANGERS if descriptors < 0 else max(8, min(_MOST_STRANGERS, descriptors // 4))
