"""Keeps the server of prometheus_client at rest while there are no file descriptors for scrapes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from bagua.base.descriptors import SCARCE

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

_PAUSE_S = 0.1


def wait_for_descriptors(server: WSGIServer) -> None:
    """Makes ``server`` wait a moment if it can't accept a connection. Otherwise it would ask again at once,
    with all of a processor, until it can."""
    accept = server.get_request

    def get_request() -> Any:
        try:
            return accept()
        except OSError as error:
            if error.errno in SCARCE:
                time.sleep(_PAUSE_S)
            raise

    server.get_request = get_request  # type: ignore[method-assign]
