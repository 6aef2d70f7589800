"""Takes the place of what tunes a model."""

from rig.ranks.faults import kill_self


class Alternating:
    """Other cuts before each second step: a bucket for each parameter, and one for all, in turns. ``dies_at``: this
    rank is killed in the middle of that change; -1: it is not."""

    def __init__(self, dies_at, ddp, layout, *_):
        self.ddp, self.layout, self.passes, self.dies_at = ddp, layout, 0, dies_at

    def also(self, inner):
        def both(*arguments):
            inner(*arguments)
            self.passes += 1

        return both

    def between_steps(self):
        if not self.passes or self.passes % 2:
            return
        names = [name for names in self.layout.cuts for name in names]
        used = self.ddp._use_buckets
        if self.passes == self.dies_at:
            self.ddp._use_buckets = lambda: (used(), kill_self())
        assert self.ddp.recut([[one] for one in names] if self.passes % 4 else [names])

    def tell_newcomers(self):
        return {"passes": self.passes}

    def follow_as_newcomer(self, told):
        self.passes = told["passes"]

    def close(self):
        pass
