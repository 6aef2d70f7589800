"""Ranks that go on through the generations of an elastic job."""

import time

from worker_scripts.rank import core, say


def through(rank, count, rest_s=0.0):
    """All-reduces without end, with a rest after each. Says each view that it enters, after the first result there, and
    each end."""
    member = rank.rank
    rank.view(rank.src, count)[:] = member + 1
    result = rank.view(rank.dst, count)
    view = rank.native.view()

    def check():
        expected = sum(one + 1 for one in view["members"])
        assert (result == expected).all(), f"{set(result)} is not {expected} in {view}"

    while True:
        try:
            rank.run("allreduce", count=count)
            check()
            say(view=view)
            while True:
                rank.run("allreduce", count=count, label="bucket 1")
                check()
                time.sleep(rest_s)
        except core.Regrouped as why:
            say(regrouped=str(why))
        entered = rank.native.enter(60.0)
        assert entered is not None and entered == rank.native.view()
        assert entered["members"][entered["rank"]] == member and entered["generation"] > view["generation"]
        view = entered


def flags(rank, count, given):
    """All-reduces with flags behind them, waited for in one call, until the generation ends. Says what the first flags
    tell. Then: whether those of the last round ended well. Flags that could not be submitted have no ticket."""
    native, values = rank.native, rank.src
    made = native.flags(0, values.address, (values.id, 0))
    made.given = given + rank.rank
    rounds, waited = 0, []
    try:
        while True:
            waited.clear()
            waited.append(rank.start("allreduce", count=count, src=64))
            waited.append(rank.start("allreduce", count=count, src=64, behind=made))
            assert made.ticket not in (0, *waited)
            times, told = native.wait_all(waited, made, 60.0)
            if not times:
                break
            assert made.ticket == 0 and len(times) == 2
            rounds += 1
            if rounds == 1:
                say(told=told)
    except core.Regrouped:  # as one of them was submitted
        assert made.ticket == 0
    well = []
    for ticket in (*waited, made.ticket):
        try:
            well.append(ticket != 0 and native.wait(ticket, 60.0) is not None)
        except core.Regrouped:
            well.append(False)
    return {"flags_well": well[-1], "rounds": rounds}


def fenced(rank, count, fences):
    """A large broadcast from rank 0, and a small operation behind it: when they were over, in ns."""
    large = rank.start("broadcast", count=count, root=0)
    small = rank.start("reduce", "int32", count=3, op="MAX", root=0, fenced=fences)
    done = {"small": rank.native.wait(small, 60.0), "large": rank.native.wait(large, 60.0)}
    return {name: times[2] for name, times in done.items()}
