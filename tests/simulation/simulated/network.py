"""A stream between a daemon and a coordinator: it delays, holds everything back for a while, or breaks."""

import asyncio
from collections import deque

DELAY_S = 0.003


class Pipe:
    """One direction, in order. What is sent while the stream is a black hole arrives when it is none any more."""

    def __init__(self, stream):
        self._stream = stream
        self._loop = stream.link.loop
        self._items = deque()
        self._came = asyncio.Event()
        self.ended = False  # nothing more will come
        self.cut = False  # and whoever reads knows it already

    def send(self, item):
        self._items.append((self._loop.time() + DELAY_S, item))
        self._came.set()

    def end(self):
        self.ended = True
        self._came.set()

    async def take(self):
        while not self.cut:
            if self._items:
                at = max(self._items[0][0], self._stream.held_until)
                if at <= self._loop.time():
                    return self._items.popleft()[1]
                await asyncio.sleep(at - self._loop.time())
            elif self.ended:
                if self._stream.held_until > self._loop.time():
                    await asyncio.sleep(self._stream.held_until - self._loop.time())
                return None
            else:
                self._came.clear()
                await self._came.wait()
        return None


class Link:
    """The network between a node and the coordinator."""

    def __init__(self, loop):
        self.loop = loop
        self.silent_until = 0.0

    @property
    def silent(self):
        return self.loop.time() < self.silent_until


class Stream:
    """One call of Session. To the coordinator it is the context of the call."""

    def __init__(self, link):
        self.link = link
        self.lost_until = 0.0
        self.up = Pipe(self)
        self.down = Pipe(self)
        self.handler = None  # the coordinator's

    @property
    def held_until(self):
        """Nothing passes before; what was sent is not lost."""
        return max(self.link.silent_until, self.lost_until)

    @property
    def silent(self):
        return self.link.loop.time() < self.held_until

    async def read(self):
        """Reads the coordinator's next message: a NodeFact."""
        fact = await self.up.take()
        return fact

    def say(self, fact):
        self.up.send(fact.SerializeToString())

    async def write(self, directive):
        if self.up.ended and not self.silent:
            raise ConnectionError("the stream is broken")
        self.down.send(directive)

    def tear(self):
        """It breaks, or the daemon hangs up: the daemon knows at once, the coordinator when nothing is held up."""
        self.up.end()
        self.down.cut = True
        self.down.end()
        self._let_go()

    def _let_go(self):
        """gRPC cancels the handler of a call when it learns of its end."""
        if self.handler is None or self.handler.done():
            return
        if self.silent:
            self.link.loop.call_at(self.held_until, self._let_go)
        else:
            self.link.loop.call_later(DELAY_S, self.handler.cancel)
