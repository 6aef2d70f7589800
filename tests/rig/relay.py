"""A TCP relay between two processes of one machine: a network that can be cut, or an attacker on the way."""

import contextlib
import select
import socket
import threading


class Relay:
    """Passes bytes on in both directions, one thread for all connections. ``seen``: all bytes. ``change`` rewrites
    what clients send."""

    def __init__(self, target, change=bytes):
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._peers, self._clients, self._change = {}, set(), change
        self.seen = bytearray()
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
        self._clients.add(near)

    def _pass(self, one):
        try:
            data = one.recv(1 << 16)
            if data:
                self.seen += data
                self._peers[one].sendall(self._change(data) if one in self._clients else data)
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
