"""A TCP relay in front of the coordinator that can be cut: a network between two processes of one machine."""

import contextlib
import select
import socket
import threading


def free_port():
    """Of loopback, a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Relay:
    """Passes bytes on in both directions, one thread for all connections."""

    def __init__(self, target):
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._peers = {}
        self._silent = self._cut = False
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self, silent):
        """``silent``: nothing passes and nobody is told; else connections end, and new ones do at once."""
        self._silent, self._cut = silent, not silent

    def heal(self):
        """All passes again. What lay in between meanwhile comes late."""
        self._silent = self._cut = False

    def close(self):
        self._over = True
        self._thread.join(10)
        for one in (*self._peers, self._listener):
            one.close()

    def _run(self):
        while not self._over:
            if self._silent:
                threading.Event().wait(0.05)
                continue
            if self._cut:
                for one in list(self._peers):
                    self._drop(one)
            ready, _, _ = select.select([self._listener, *self._peers], [], [], 0.05)
            for one in ready:
                if one is self._listener:
                    self._accept()
                elif one in self._peers:
                    self._pass(one)

    def _accept(self):
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target, timeout=2)
        except OSError:
            near.close()
            return
        far.settimeout(20)
        near.settimeout(20)
        self._peers[near], self._peers[far] = far, near

    def _pass(self, one):
        try:
            data = one.recv(1 << 16)
            if data:
                self._peers[one].sendall(data)
                return
        except OSError:
            pass
        self._drop(one)

    def _drop(self, one):
        other = self._peers.pop(one, None)
        if other is not None:
            self._peers.pop(other, None)
        for each in (one, other):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.close()
