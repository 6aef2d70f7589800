"""Decides which setting the next steps run with. Pure: steps and candidates in, blocks of steps and words out.

Rank 0 asks for a block, runs it with all ranks, and gives back its steps. Phases, one after the other:

- warm-up: steps of the present setting, which don't count;
- search: candidates, each compared with the present setting (``comparison.py``); the better one stays;
- check: what was found against the defaults; it stays if it is better beyond noise;
- settled: watches the step time. If it changes for good, the search begins anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from bagua.tuning.comparison import STEPS_OF_BLOCK, Comparison, Figures, Step, Verdict

# Values by name; a name that is missing stays at its default. ``{}``: all defaults.
Setting = Mapping[str, str]

WARM_UP_STEPS = 8
STEPS_OF_SEARCH = 230  # after so many steps the search ends, with whatever it has found
PATIENCE = 8  # Candidates of the search without a gain, one after the other, that end it
LEAST_CANDIDATES = 10
WINDOW, WINDOW_S = 50, 2.0  # steps between two looks at a settled job, at least, and seconds
# Share of the step time. Further from the reference in ``WINDOWS`` windows: it has changed for good.
CHANGED = 0.1
WINDOWS, REFERENCE_WINDOWS = 3, 4


class Phase(Enum):
    WARM_UP = "warm-up"
    SEARCH = "search"
    CHECK = "check"
    SETTLED = "settled"


@dataclass(frozen=True)
class Block:
    """``steps`` with this setting; the first ``dropped`` of them are not measured."""

    setting: Setting
    steps: int
    dropped: int = 0


@dataclass(frozen=True)
class Trial:
    """A candidate that was compared. ``ratio``: its step time in that of the present setting; ``level``: in that of the
    setting with which the search began. ``state``: a ``Verdict``, or "known": it was not measured again."""

    setting: Setting
    against: Setting
    ratio: float
    level: float
    present: Figures
    candidate: Figures
    state: str
    reason: str
    step: int

    @property
    def taken(self) -> bool:
        return self.state == Verdict.BETTER.value


@dataclass(frozen=True)
class Limits:
    """``samples``: candidates of one search. ``warm_up_s``: at least so long nothing is tried."""

    samples: int = 60
    warm_up_s: float = 0.0
    confidence_s: float = 5.0


# The next candidate of the search. None: it has not come yet. Raises StopIteration where there are no more.
Ask = Callable[[], Setting | None]


class Decider:
    """Decisions for one model, on rank 0. ``present``: the setting in use, ``{}`` at first. ``first``: candidates that
    come before those of a search, asked when it begins: the best known one, and the model's partition.

    ``anew``: called when a search begins after a change. ``tell``: gets each trial. ``say``: gets words when a setting
    or a phase changes. ``clock``: seconds."""

    def __init__(
        self,
        ask: Ask,
        first: Callable[[], Sequence[Setting]],
        *,
        limits: Limits,
        clock: Callable[[], float],
        tell: Callable[[Trial], None],
        say: Callable[[str], None],
        anew: Callable[[], None],
        present: Setting | None = None,
    ) -> None:
        self.present: Setting = dict(present or {})
        self.phase = Phase.WARM_UP
        self.steps = 0
        self._ask, self._limits, self._clock, self._tell, self._say = ask, limits, clock, tell, say
        self._anew = anew
        self._began = clock()
        self._first_of = first
        self._first: deque[Setting] = deque()
        self._waits = STEPS_OF_BLOCK
        self._block: Block | None = None
        self._candidate: Setting | None = None
        self._against: Setting = {}
        self._comparison = Comparison()
        self._compared_since = 0.0
        self._since = 0  # steps at which this search began
        self._level = 1.0  # step time of the present setting, in that with which the search began
        self._tried = self._without_gain = 0
        self._known: set[tuple[tuple[str, str], ...]] = set()
        self._reference: list[float] = []
        self._away = 0
        self._window = WINDOW
        self._windows = WINDOWS  # doubles with each search that was begun anew for nothing
        self._before: Setting | None = None  # the setting with which that search began

    # The next steps

    def next_block(self) -> Block:
        """Returns the block that all ranks run next. ``add`` gets its steps."""
        self._block = self._choose()
        return self._block

    def _choose(self) -> Block:
        if self.phase is Phase.WARM_UP:
            if self.steps < WARM_UP_STEPS or self._clock() < self._began + self._limits.warm_up_s:
                return Block(self.present, WARM_UP_STEPS, WARM_UP_STEPS)
            self._begin_search()
        if self.phase is Phase.SEARCH and self._candidate is None:
            self._candidate = self._next_candidate()
            if self._candidate is None:  # it has not come yet, or there is nothing to check
                waits, self._waits = self._waits, min(2 * self._waits, WINDOW)
                return Block(self.present, waits, waits)
            self._waits = STEPS_OF_BLOCK
            self._compare()
        if self._candidate is not None:
            setting = self._candidate if self._comparison.of_candidate else self._against
            return Block(setting, STEPS_OF_BLOCK + 1, 1)
        return Block(self.present, self._window, 1)

    def _begin_search(self) -> None:
        self.phase, self._since = Phase.SEARCH, self.steps
        self._tried = self._without_gain = 0
        self._level = 1.0
        self._first = deque(self._first_of())
        self._known = {_key(self.present)}

    def _compare(self) -> None:
        """Compares a candidate with the present setting, or at the end with the defaults."""
        self._against = {} if self.phase is Phase.CHECK else self.present
        self._comparison = Comparison()
        self._compared_since = self._clock()

    def _next_candidate(self) -> Setting | None:
        while self._first:
            candidate = self._first.popleft()
            if _key(candidate) not in self._known:
                self._known.add(_key(candidate))
                return candidate
        over = self.steps - self._since >= STEPS_OF_SEARCH or self._tried >= self._limits.samples
        if over or (self._without_gain >= PATIENCE and self._tried >= LEAST_CANDIDATES):
            return self._end_search()
        try:
            found = self._ask()
        except StopIteration:
            return self._end_search()
        if found is None:
            return None
        if _key(found) in self._known:  # in another search's words
            self._tell(_unmeasured(found, self.present, self.steps))
            self._tried += 1
            self._without_gain += 1  # a search that proposes known ones alone must end, too
            return None
        self._known.add(_key(found))
        return found

    def _end_search(self) -> Setting | None:
        """Ends the search. Returns the setting to check; None: there is nothing to check."""
        if not self.present:
            self._settle("The defaults are best.")
            return None
        self.phase = Phase.CHECK
        return self.present

    def _settle(self, words: str) -> None:
        self.phase = Phase.SETTLED
        self._reference, self._away = [], 0
        if self._before is not None:
            self._windows = 2 * self._windows if self._before == self.present else WINDOWS
        self._before = self.present
        self._say(f"Tuning is settled after {self.steps} steps. {words}")

    # Their result

    def waits_for(self, steps: int) -> bool:
        """True if ``add`` is to be called with so many."""
        return self._block is not None and self._block.steps == steps

    def add(self, steps: Sequence[Step]) -> None:
        """The steps of the last block, those included that are not measured."""
        assert self._block is not None
        self.steps += len(steps)
        measured = list(steps[self._block.dropped :])
        if self._candidate is not None:
            self._comparison.add(measured)
            self._judge(self._candidate)
        elif self.phase is Phase.SETTLED and measured:
            self._watch(measured)

    def discard(self) -> None:
        """Members have changed, and with them what steps cost: the comparison under way is forgotten."""
        if self._candidate is not None and self.phase is Phase.SEARCH:
            self._first.appendleft(self._candidate)  # a candidate that was not judged gets another turn
            self._known.discard(_key(self._candidate))
        if self.phase is Phase.CHECK:
            self._compare()
        else:
            self._candidate = None
        self._reference, self._away = [], 0
        self._block = None

    def _judge(self, candidate: Setting) -> None:
        verdict, reason = self._comparison.verdict()
        late = self._clock() > self._compared_since + max(self._limits.confidence_s, 0.0)
        if verdict is Verdict.UNDECIDED and not (late and self._long_enough()):
            return
        if verdict is Verdict.UNDECIDED:
            verdict = Verdict.NOT_BETTER
        present, tried = self._comparison.figures()
        ratio = self._comparison.ratio
        level = ratio * self._level if self.phase is Phase.SEARCH else 1.0
        trial = Trial(candidate, self._against, ratio, level, present, tried, verdict.value, reason, self.steps)
        self._candidate = None
        if self.phase is Phase.CHECK:
            self._end_check(candidate, verdict, trial)
            return
        self._tried += 1
        self._without_gain = 0 if trial.taken else self._without_gain + 1
        if trial.taken:
            self.present, self._level = candidate, level
            self._say(f"Step {self.steps}: {text(candidate)} instead of {text(self._against)} ({reason}).")
        self._tell(trial)

    def _long_enough(self) -> bool:
        return len(self._comparison.blocks) >= 6 and len(self._comparison.blocks) % 2 == 0  # three whole pairs

    def _end_check(self, candidate: Setting, verdict: Verdict, trial: Trial) -> None:
        """Against the defaults, which are tried last: here they are the present setting of the comparison."""
        if verdict is Verdict.BETTER:
            self._settle(f"{text(candidate)} stays: {trial.reason} against the defaults.")
            return
        self.present = {}
        self._tell(trial)
        self._settle(f"The defaults stay: {text(candidate)} is not better beyond noise ({trial.reason}).")

    def _watch(self, measured: Sequence[Step]) -> None:
        middle = median(step.seconds for step in measured)
        self._window = max(WINDOW, min(100 * WINDOW, math.ceil(WINDOW_S / max(middle, 1e-9))))
        if len(self._reference) < REFERENCE_WINDOWS:
            self._reference.append(middle)
            return
        reference = max(median(self._reference), 1e-9)
        noise = (max(self._reference) - min(self._reference)) / reference
        change = middle / reference - 1
        if abs(change) <= max(CHANGED, 2 * noise):  # windows that differ by themselves ask for a larger change
            self._away = 0
            return
        direction = 1 if change > 0 else -1
        # Now slower and now faster is noise: one direction counts.
        self._away = self._away + direction if self._away * direction >= 0 else direction
        if abs(self._away) >= self._windows:
            self._say(
                f"Step {self.steps}: steps take {change:+.0%} for {self._windows} looks in succession: the network or "
                "the model has changed, and the search begins anew."
            )
            self._anew()
            self._begin_search()


def _key(setting: Setting) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(setting.items()))


def _unmeasured(setting: Setting, against: Setting, step: int) -> Trial:
    nothing = Figures(0.0, 0.0, 0.0, 0.0, 0)
    return Trial(setting, against, 1.0, 1.0, nothing, nothing, "known", "it has been measured before", step)


def text(setting: Setting) -> str:
    if not setting:
        return "the defaults"
    return ", ".join(f"{name}={_short(value)}" for name, value in sorted(setting.items()))


def _short(value: str) -> str:
    if "," not in value:
        return value
    numbers = value.split(",")
    # A list of hundreds of numbers tells people nothing.
    return value if len(numbers) <= 6 else f"{len(numbers)} buckets"
