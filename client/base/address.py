"""Addresses: how they are written, and which ones need TLS."""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Collection

from bagua.base.errors import ConfigError

LOOPBACK_S = 5.0


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` -> (host, port). Raises ConfigError."""
    host, separator, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address!r} is not an address: write host:port, for example 127.0.0.1:7670 [BG101]")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Joins host and port to ``host:port``, with brackets for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True if ``host`` (a name or a number) means this machine alone, whatever it resolves to. Wildcards do not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    # "%eth0" names the interface of a link-local address.
    return bool(found) and all(ipaddress.ip_address(str(a).split("%")[0]).is_loopback for a in found)


def network_of(host: str) -> str:
    """An address as its holder is counted: of IPv6 the part that one network has to itself."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    # /64: a host of IPv6 may take any address of its network.
    return str(ipaddress.ip_network((found, 64), strict=False) if found.version == 6 else found)


def first_of_crowd(networks: Collection[str]) -> int:
    """The place of the first one of the network that is there most often: it makes room for others."""
    crowd = Counter(networks).most_common(1)[0][0]
    return next(place for place, network in enumerate(networks) if network == crowd)


def require_loopback() -> None:
    """Raises ConfigError where processes of this machine can't reach each other by its loopback interface, as in a
    network namespace that nobody has set up. Many waits would end without a word of it."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=LOOPBACK_S).close()
    except OSError as error:
        raise ConfigError(
            f"This machine can't reach itself at 127.0.0.1: {error.strerror or error}. Is its loopback interface up? "
            "`ip link set lo up` brings it up; in a container or namespace, whoever made it does that. [BG923]"
        ) from None


def own_address(peer: str) -> str:
    """The address of this host on the way to ``peer`` (host:port): others on that side reach it there. Raises
    ConfigError."""
    host, port = split_address(peer)
    if is_loopback(host):
        return "127.0.0.1"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"This host has no way to {peer}: {error.strerror}. [BG919]") from None
