"""A check that nobody listens at an address."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from bagua.base.address import split_address
from bagua.base.errors import ConfigError

REFUSAL_S = 1.0  # how long a connection may take to be refused


async def refuses(address: str) -> bool:
    """True if nobody listens: every address of the host refuses. Silence, or no way to the host, is no refusal."""
    loop = asyncio.get_running_loop()
    try:
        host, port = split_address(address)
        async with asyncio.timeout(REFUSAL_S):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, target in found:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setblocking(False)  # asyncio wants it so
                    try:
                        await loop.sock_connect(probe, target)
                    except ConnectionRefusedError:
                        continue
                    return False  # somebody accepted
    except (OSError, ConfigError):  # TimeoutError too
        return False
    return bool(found)


def socket_refuses(path: Path) -> bool:
    """The same of a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return True
        except OSError:
            pass
    return False
