"""Proposes the next setting of a job that tunes itself, from those that were tried. Pure, but for Optuna's sampler.

The sampler is TPE (Bergstra et al., "Algorithms for hyper-parameter optimization", NIPS 2011). The study is made again
from the trials for each question: the job's database holds all there is, and any coordinator can go on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bagua.tuning.space import Dimension

FIRST_AT_RANDOM = 5


@dataclass(frozen=True)
class Tried:
    """A setting that was measured, and its step time in that of the defaults."""

    setting: Mapping[str, str]
    ratio: float


def propose(space: Sequence[Dimension], tried: Sequence[Tried], seed: int) -> dict[str, str] | None:
    """A setting that has not been tried; None: there is no other. The same again for the same arguments."""
    size = math.prod(len(one.choices) for one in space)
    known = {_key(one.setting) for one in tried}
    if not space or len(known & _all_keys(space, size)) >= size:
        return None
    # Imported here: it costs a quarter of a second, in jobs that tune alone.
    import optuna

    sampler = optuna.samplers.TPESampler(seed=seed + len(tried), n_startup_trials=FIRST_AT_RANDOM)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler)
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        one.name: optuna.distributions.IntDistribution(0, len(one.choices) - 1)
        if one.ordered
        else optuna.distributions.CategoricalDistribution(one.choices)
        for one in space
    }
    for one in tried:
        if _fits(one.setting, space):
            values = {dimension.name: _value(dimension, one.setting[dimension.name]) for dimension in space}
            level = math.log(max(one.ratio, 1e-6))
            study.add_trial(optuna.trial.create_trial(params=values, distributions=distributions, value=level))
    for _ in range(20):
        asked = study.ask(distributions)
        found = {one.name: _word(one, asked.params[one.name]) for one in space}
        if _key(found) not in known:
            return found
        study.tell(asked, state=optuna.trial.TrialState.FAIL)
    return next((setting for setting in _neighbours(space, tried) if _key(setting) not in known), None) or next(
        (setting for setting in _all(space) if _key(setting) not in known), None
    )


def _value(dimension: Dimension, word: str) -> int | str:
    return dimension.choices.index(word) if dimension.ordered else word


def _word(dimension: Dimension, value: int | str) -> str:
    return dimension.choices[value] if isinstance(value, int) else value


def _fits(setting: Mapping[str, str], space: Sequence[Dimension]) -> bool:
    return all(setting.get(one.name) in one.choices for one in space)


def _key(setting: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(setting.items()))


def _all(space: Sequence[Dimension]) -> Iterator[dict[str, str]]:
    for words in itertools.product(*(one.choices for one in space)):
        yield {one.name: word for one, word in zip(space, words, strict=True)}


def _all_keys(space: Sequence[Dimension], size: int) -> set[tuple[tuple[str, str], ...]]:
    return {_key(setting) for setting in _all(space)} if size <= 10_000 else set()  # nobody tries all of more


def _neighbours(space: Sequence[Dimension], tried: Sequence[Tried]) -> list[dict[str, str]]:
    """Returns the neighbours of the best setting that was tried: those with one value changed."""
    fitting = [one for one in tried if _fits(one.setting, space)]
    if not fitting:
        return []
    best = min(fitting, key=lambda one: one.ratio).setting
    return [{**best, one.name: word} for one in space for word in one.choices if word != best[one.name]]
