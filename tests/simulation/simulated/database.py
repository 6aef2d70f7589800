"""The way to the database, which is slow, fails, or is cut off from whoever waits for it."""

import asyncio

import sqlalchemy as sa

KINDS = ("fail", "fail", "lose", "slow", "slow", "cancel")


class Trouble:
    """Outcome of the next query to the database. ``plan`` fixes it by number, for histories that try each of
    them; the rest is drawn. ``down_until``: the disk is full, or another process holds the lock."""

    def __init__(self, rng, rate, plan=None):
        self._rng = rng
        self._rate = rate
        self._plan = plan or {}
        self.asked = 0
        self.down_until = 0.0
        self.over = False  # from now on all is well

    def draw(self, now):
        """``fail``, ``lose`` (it is done, but the answer is an error), ``slow``, ``cancel``, or empty: it works."""
        self.asked += 1
        if self.over:
            return ""
        if self.asked in self._plan:
            return self._plan[self.asked]
        if now < self.down_until:
            return "fail"
        if self._rng.random() >= self._rate:
            return ""
        return self._rng.choice(KINDS)

    def seconds(self):
        """How long something slow takes: often longer than a lease."""
        return self._rng.uniform(0.01, 16.0)


class VirtualWorker:
    """``Worker``, for one coordinator. One question after the other; each is answered also if nobody waits any more.
    ``on_cancel`` cuts somebody off who waits."""

    def __init__(self, store, trouble, on_cancel):
        self.store = store
        self._trouble = trouble
        self._on_cancel = on_cancel
        self._loop = asyncio.get_running_loop()
        self._free_at = 0.0
        self.waiting = 0
        self.killed = False

    async def write(self, work):
        """The result of ``work``, or OperationalError."""
        return await self.write_with(lambda store: store.apply(work))

    async def read(self, work):
        return await self.write_with(lambda store: store.look(work))

    async def write_with(self, function):
        """The result of ``function``, or OperationalError."""
        trouble = self._trouble.draw(self._loop.time())
        future = self._loop.create_future()
        if not trouble and self._free_at <= self._loop.time():
            self._loop.call_soon(self._answer, future, trouble, function)
        else:
            delay = self._trouble.seconds() if trouble in ("slow", "cancel") else 0.0
            self._free_at = max(self._free_at, self._loop.time()) + delay
            self._loop.call_at(self._free_at, self._answer, future, trouble, function)
        if trouble == "cancel":
            self._loop.call_later(self._trouble.seconds() / 4, self._on_cancel)
        self.waiting += 1
        try:
            return await future
        finally:
            self.waiting -= 1

    def _answer(self, future, trouble, function):
        error = None
        result = None
        if self.killed:  # nobody is there to do it
            error = ConnectionError("the coordinator is gone")
        elif trouble == "fail":
            error = _locked()
        else:
            try:
                result = function(self.store)
            except Exception as raised:
                error = raised
            if trouble == "lose":
                error = error or _locked()
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def _locked():
    return sa.exc.OperationalError("", {}, Exception("database is locked"))
