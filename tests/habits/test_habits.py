"""Programs find under each of our ways what they find under torch's DistributedDataParallel on Gloo."""

import pytest
import torch
from habits.case import HABITS, load_habits
from habits.failing import FAILING
from habits.rank_side import run_habit
from habits.ways import CALLED, ELASTIC, EQUAL, HOSTS, NEAR, ORACLE, RARE, WAYS

RANKS = [0, 1]
LONG = {("compiles_the_whole_step", "backend"), ("compiles_the_whole_step", "elastic")}
"""Programs and ways in which each rank of the pool compiles anew, which takes three seconds of a core."""


def cases():
    """(habit, way), with a mark where it is known to fail."""
    found = []
    for habit in load_habits().values():
        for way in habit.only or WAYS:
            if way == ORACLE or way in habit.without:
                continue
            reason = next((one for one, names in FAILING.items() if way in names.get(habit.name, "").split()), "")
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            rare = way in RARE - set(habit.only) and (habit.kind == 1 or way not in CALLED)
            if rare or (habit.name, way) in LONG:
                marks.append(pytest.mark.full)
            found.append(pytest.param(habit.name, way, id=f"{habit.name}-{way}", marks=marks))
    return found


@pytest.fixture(scope="session")
def oracles():
    """Findings under torch's on every rank, by name of the program."""
    return {}


@pytest.mark.parametrize(("name", "way"), cases())
def test_a_program_finds_what_it_finds_under_torch(pools, oracles, name, way):
    pool = pools(*HOSTS.get(way, [RANKS]), elastic=way in ELASTIC)
    if not HABITS[name].oracle:
        found = pool.run(run_habit, name=name, way=way)
        false = [f"rank {rank}: {key!r}" for rank, one in enumerate(found) for key in one if one[key] is False]
        assert not false
        return
    if name not in oracles:
        oracles[name] = pools(RANKS).run(run_habit, name=name, way=ORACLE)
    found = pool.run(run_habit, name=name, way=way)
    if way in NEAR:
        wrong = near_difference(found, oracles[name], equal=way in EQUAL)
    else:
        pairs = enumerate(zip(found, oracles[name], strict=True))
        wrong = "\n".join(filter(None, (difference(*pair, f"rank {rank}") for rank, pair in pairs)))
    if wrong:
        pytest.fail(wrong, pytrace=False)


def difference(mine, theirs, where):
    """Where two values of a program are not the same; empty if they are."""
    if isinstance(theirs, torch.Tensor):
        return tensor_difference(mine, theirs, where)
    if isinstance(theirs, dict | list | tuple) and type(mine) is type(theirs) and places(mine) == places(theirs):
        parts = (difference(mine[one], theirs[one], f"{where}, {one!r}") for one in places(theirs))
        return next(filter(None, parts), "")
    return "" if mine == theirs else f"{where}: {mine!r}, and under torch's {theirs!r}"


def places(many):
    """Keys or indices."""
    return list(many) if isinstance(many, dict) else list(range(len(many)))


def tensor_difference(mine, theirs, where):
    """The same for a tensor."""
    if not isinstance(mine, torch.Tensor):
        return f"{where}: {mine!r}, and under torch's a tensor"
    kinds = [(one.dtype, tuple(one.shape), one.layout) for one in (mine, theirs)]
    if kinds[0] != kinds[1]:
        return f"{where}: {kinds[0]}, and under torch's {kinds[1]}"
    mine, theirs = mine.detach().to_dense(), theirs.detach().to_dense()
    if torch.allclose(mine, theirs, 0, 0, equal_nan=True):
        return ""
    return f"{where}: off by {(mine - theirs).abs().max().item():.3g}, {mine.flatten()[:4].tolist()}"


def near_difference(found, theirs, equal):
    """Where words or truth values are not the oracle's. ``equal``: or where numbers differ between ranks that are the
    same on all of them under torch's."""
    for key, value in theirs[0].items():
        mine, other = [one[key] for one in found], [one[key] for one in theirs]
        if isinstance(value, bool | str | int):
            if mine != other:
                return f"{key!r}: {mine}, and under torch's {other}"
        elif equal and alike(other) and not alike(mine):
            return f"{key!r} differs between ranks"
    return ""


def alike(values):
    """Whether all ranks have the same."""
    return not any(difference(other, values[0], "") for other in values[1:])
