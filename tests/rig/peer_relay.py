"""A relay before a TCP port: a network that is slow, stalls, changes, cuts or resets what goes through it, or an
attacker on the way."""

import contextlib
import socket
import struct
import threading
import time


class Relay:
    """Passes on the connections of one listener, in the order in which they come, each at a rate of its own."""

    def __init__(self, target, address="127.0.0.1"):
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.rate = 0.0  # bytes per second of each connection; 0: unlimited
        self.going = threading.Event()  # cleared: nothing is passed on any more, nothing is closed
        self.going.set()
        self.refuses = False  # connections end as soon as they are made
        self.over = False
        self.taken = 0  # bytes
        self.lock = threading.Lock()  # guards the next one
        self.flips = 0
        self.pairs = []
        self.ended = set()  # of their sockets
        self.threads = []
        self.listener = socket.create_server((address, 0))
        self.address = f"{address}:{self.listener.getsockname()[1]}"
        self._start(self._accept)

    def _start(self, target, *arguments):
        self.threads.append(threading.Thread(target=target, args=arguments))
        self.threads[-1].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                try:
                    if self.refuses:
                        raise OSError
                    far = socket.create_connection(self.target)
                except OSError:
                    near.close()
                    continue
                self.pairs.append((near, far))
                self._start(self._pass, near, far, self.change)
                self._start(self._pass, far, near, self.change_answer)

    def _pass(self, source, target, change):
        free_at = time.monotonic()
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.taken += len(data)
                if self.rate:
                    free_at = max(free_at, time.monotonic() - 0.05) + len(data) / self.rate
                    time.sleep(max(0.0, free_at - time.monotonic()))
                while not self.going.wait(0.05):
                    if self.over:
                        return
                target.sendall(change(data))
            target.shutdown(socket.SHUT_WR)
        self.ended.add(source)
        if target in self.ended:
            source.close()
            target.close()

    def change(self, data):
        """Returns the bytes of a piece to pass on. An attacker's relay overrides this."""
        with self.lock:
            if not self.flips or len(data) < 1000:
                return data
            self.flips -= 1
        return data[:500] + bytes([data[500] ^ 1]) + data[501:]

    def change_answer(self, data):
        """Likewise, of pieces that come back."""
        return self.change(data)

    def corrupt(self):
        """One bit of the next large piece arrives changed."""
        with self.lock:
            self.flips += 1

    def part(self, silent):
        """``silent``: nothing passes and nobody is told; else connections end, and new ones do at once."""
        if silent:
            self.going.clear()
        else:
            self.refuses = True
            self.cut()

    def heal(self):
        """All passes again. What lay in between meanwhile comes late."""
        self.refuses = False
        self.going.set()

    def cut(self, *numbers):
        """Ends connections, or all of them, as a network does that loses its state."""
        for pair in [self.pairs[number] for number in numbers] or list(self.pairs):
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def reset(self):
        """Ends every connection with an RST at both ends."""
        for end in (end for pair in self.pairs for end in pair):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD)  # wakes the thread that reads
                end.close()

    def close(self):
        self.over = True
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.threads[0].join()
        self.cut()
        for thread in self.threads[1:]:
            thread.join()
        for end in (self.listener, *(end for pair in self.pairs for end in pair)):
            end.close()
