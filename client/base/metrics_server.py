"""Keeps the server of prometheus_client well: at rest while there are no file descriptors for scrapes, and open to
these whoever else connects."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from bagua.base.address import first_of_crowd, network_of
from bagua.base.system_limits import SCARCE

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

MOST = 32  # connections, each of which has a thread
_PAUSE_S = 0.1


def keep_well(server: WSGIServer) -> None:
    """Makes ``server`` wait a moment if it can't accept a connection: otherwise it would ask again at once, with all of
    a processor, until it can. For a connection beyond ``MOST`` it ends the oldest of the network that has most."""
    if isinstance(server.socket, ssl.SSLSocket):
        server.socket.do_handshake_on_connect = False  # type: ignore[attr-defined]  # it comes with the request, in its thread
    accept, held = server.get_request, list[tuple[str, socket.socket]]()

    def get_request() -> Any:
        try:
            found = accept()
        except OSError as error:
            if error.errno in SCARCE:
                time.sleep(_PAUSE_S)
            raise
        held.append((network_of(found[1][0]), found[0]))
        if len(held) > MOST:
            _, oldest = held.pop(first_of_crowd([network for network, _ in held]))
            with suppress(OSError):  # it is over
                oldest.shutdown(socket.SHUT_RDWR)  # the thread of the connection wakes up, and closes it
        return found

    server.get_request = get_request  # type: ignore[method-assign]
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # whoever breaks off is no traceback
