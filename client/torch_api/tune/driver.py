"""Tunes one wrapped model while it trains. Rank 0 decides; all ranks change together, between the same two steps.

Between two decisions nothing is exchanged: each says for how many steps it holds. In an elastic job a decision is a
unit of its own; members that change discard the comparison under way.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from bagua.algorithms.plan import GRADIENT
from bagua.base.errors import ConfigError
from bagua.proto.common_pb2 import TuneStudy
from bagua.torch_api.comm.transfer import ReduceOp
from bagua.torch_api.join.connection import Record, Times
from bagua.torch_api.join.session import Session
from bagua.torch_api.train.agreement import broadcast_json
from bagua.torch_api.train.bucket_layout import ModelBuckets
from bagua.torch_api.train.parameters import canonical
from bagua.torch_api.train.runner import Runner
from bagua.torch_api.tune.observer import Observed, Observer
from bagua.torch_api.tune.options import TuneOptions
from bagua.torch_api.tune.search import RemoteSearch
from bagua.torch_api.tune.settings import Settings, Tuned
from bagua.tuning.comparison import Step
from bagua.tuning.decision import Decider, Phase, Setting, Trial, text
from bagua.tuning.network import Network

LOG = logging.getLogger("bagua")
PROBE_ELEMENTS = 1 << 18
PROBES = 3
FAST_MBIT, NEAR_MS = 4096.0, 1.0
"""A wire is told apart from others up to this rate, and from this delay on: beyond them the machine decides."""
NEVER = 1 << 60


class Model(Tuned, Observed, Protocol):
    """The wrapped model, as tuning uses it."""

    bagua_module_name: str
    description: dict[str, object]
    exchanged: str


class Tuning:
    """Tuning of one model on this rank. ``TuneOptions`` are those of rank 0: others follow it."""

    def __init__(
        self, options: TuneOptions, model: Model, layout: ModelBuckets, runner: Runner, session: Session
    ) -> None:
        self._options = options
        self._model = model
        self._runner = runner
        self._session = session
        self._settings = Settings(model, layout, runner)
        if "codec" in options.given and not hasattr(model.bagua_algorithm, "codec"):
            name = type(model.bagua_algorithm).__name__.removesuffix("Impl")
            raise ConfigError(
                f"tune['codec'] can't be used with {name}, which has no choice of codecs: leave it out. [BG309]"
            )
        self._layout = layout
        self._passes = 0  # that were exchanged: the same on all ranks
        self._due = 1  # the next decision comes after so many
        self._applied: Setting = {}
        self._present: Setting = {}
        self._network = ""
        self._wire = Network()
        self._generation = session.membership.generation
        self._steps: list[Step] = []
        self._decider: Decider | None = None  # on rank 0
        self._search: RemoteSearch | None = None
        self._observer: Observer | None = None

    # Each step

    def also(self, inner: Record) -> Record:
        """Counts exchanged passes, and has ``inner`` count their times."""

        def both(times: Sequence[Times], begin: Any, end: Any) -> None:
            inner(times, begin, end)
            self._passes += 1
            if self._observer is not None:
                self._observer.finished(times, begin, end)
            last = self._session.statistics.last_step()
            if self._decider is not None and last is not None:
                self._steps.append(Step(last.step_seconds, last.exposed_seconds))

        return both

    def between_steps(self) -> None:
        """Runs before a forward pass. All ranks have exchanged the same passes."""
        if self._passes >= self._due:
            self._decide()

    # A decision

    def _decide(self) -> None:
        if self._model.exchanged != GRADIENT or not self._layout.may_be_cut or self._runner.on_device:
            self._give_up("It tunes buckets of gradients on the CPU, with algorithms that allow other cuts.")
            return
        if self._runner.everyone.nranks() < 2 and not self._session.elastic:
            self._give_up("A rank alone has nobody to exchange gradients with.")
            return
        if not self._network:
            self._network, self._wire = self._runner.together(self._probe)
        said: list[dict[str, Any]] = []

        def attempt() -> dict[str, Any]:
            everyone = self._runner.everyone
            if everyone.rank() == 0 and not said:
                said.append(self._choose())
            found: dict[str, Any] = broadcast_json(said[0] if said else {}, everyone)
            return found

        decision = self._runner.together(attempt)
        self._present = decision["present"]
        if decision["setting"] != self._applied and not self._settings.apply(decision["setting"]):
            self._give_up("Buckets can't be cut anew now.")
            return
        self._applied = decision["setting"]
        self._due = self._passes + decision["steps"]
        self._steps.clear()

    def _choose(self) -> dict[str, Any]:
        decider = self._of_rank_0()
        generation, steps = self._session.membership.generation, self._steps
        if generation != self._generation:
            decider.discard()
        elif decider.waits_for(len(steps)):
            decider.add(steps)
        self._generation = generation
        block = decider.next_block()
        return {"setting": dict(block.setting), "present": dict(decider.present), "steps": block.steps}

    def _of_rank_0(self) -> Decider:
        if self._decider is None:
            self._search = RemoteSearch(
                self._session.daemon,
                self._session.membership.member,
                self._study(),
                self._session.membership.generation,
            )
            self._session.end_first(self._search, self._search.close)
            self._decider = Decider(
                self._search.ask,
                self._first_candidates,
                limits=self._options.limits,
                clock=time.monotonic,
                tell=self._tell,
                say=self._say,
                anew=self._search.anew,
                present=self._present,
            )
            self._generation = self._session.membership.generation
            self._observer = Observer(self._model, self._session)
        return self._decider

    def _first_candidates(self) -> list[Setting]:
        assert self._search is not None
        found = [] if self._search.best is None else [self._search.best]
        if self._observer is not None:
            found += self._observer.partition(self._layout.arrival, self._wire, len(self._session.membership.hosts))
            self._observer.close()
            self._observer = None
        return [setting for setting in found if setting and self._fits(setting)]

    def _fits(self, setting: Setting) -> bool:
        """True if the setting can be applied to this model, and is not the defaults in other words."""
        try:
            return set(setting) != {"cuts"} or self._settings.cuts(setting) != self._settings.cuts({})
        except ValueError:
            return False

    def _tell(self, trial: Trial) -> None:
        assert self._search is not None and self._decider is not None
        self._search.tell(trial)
        if self._options.logs:
            print(f"bagua: tuning: {text(trial.setting)}: {trial.state}: {trial.reason}", file=sys.stderr)
        self._note(f"{self._decider.phase.value}: {text(self._decider.present)} at step {trial.step}")

    def _say(self, words: str) -> None:
        """Writes to standard error. A change of settings is rare, and whoever reads times must know of it."""
        print(f"bagua: tuning {self._model.bagua_module_name}: {words}", file=sys.stderr)
        self._note(words)

    def _note(self, line: str) -> None:
        if self._search is not None and self._decider is not None:
            self._search.note(self._decider.present, self._decider.phase is Phase.SETTLED, line)

    def _give_up(self, why: str) -> None:
        """The same on all ranks: nothing is tuned from now on."""
        self._due = NEVER
        if self._runner.everyone.rank() == 0:
            LOG.warning("Autotuning of %s has no effect. %s", self._model.bagua_module_name, why)

    # The study

    def _study(self) -> TuneStudy:
        membership, description = self._session.membership, self._model.description
        model = hashlib.sha256(canonical({**description, "space": _plain(self._options.given)})).hexdigest()[:16]
        total = sum(tensor.nbytes for tensor in self._layout.in_order())
        return TuneStudy(
            model=model,
            network=hashlib.sha256(self._network.encode()).hexdigest()[:16],
            model_text=f"{type(self._model.bagua_algorithm).__name__.removesuffix('Impl')}, {total / 2**20:.1f} MiB",
            network_text=self._network,
            space=self._settings.space(self._options.given, len(membership.hosts)),
        )

    def _probe(self) -> tuple[str, Network]:
        """The network, as rank 0 measures it: in words so coarse that they are the same next time, and as it is."""
        membership, everyone = self._session.membership, self._runner.everyone
        hosts, sizes = len(membership.hosts), "x".join(sorted({str(len(ranks)) for ranks in membership.hosts}))
        if hosts == 1:
            return f"one host of {sizes}", Network()
        small, large = torch.zeros(8), torch.zeros(PROBE_ELEMENTS)
        trip = _fastest(lambda: everyone.allreduce_inplace(small, ReduceOp.MAX))
        long = _fastest(lambda: everyone.allreduce_inplace(large, ReduceOp.SUM))
        rate = 2 * (hosts - 1) / hosts * large.nbytes * 8 / max(long - trip, 1e-6)
        rate, trip = broadcast_json([rate, trip], everyone)
        mbit, delay = min(FAST_MBIT, _coarse(rate / 1e6, 4)), max(NEAR_MS, _coarse(trip * 1e3, 4))
        words = f"{hosts} hosts of {sizes}, {mbit:g} Mbit/s, {delay:g} ms"
        return words, Network(rate if mbit < FAST_MBIT else 0.0, trip if delay > NEAR_MS else 0.0)

    # Members that come

    def tell_newcomers(self) -> dict[str, Any]:
        """Returns how far the tuning is."""
        return {
            "passes": self._passes,
            "due": self._due,
            "applied": dict(self._applied),
            "present": dict(self._present),
            "network": self._network,
        }

    def follow_as_newcomer(self, told: dict[str, Any]) -> None:
        """Takes over the tuning of the others, before buckets are made as theirs are."""
        self._passes, self._due, self._network = told["passes"], told["due"], told["network"]
        self._applied, self._present = told["applied"], told["present"]
        self._settings.prepare(self._applied)

    def close(self) -> None:
        """Ends the tuning when the model is unwrapped."""
        if self._observer is not None:
            self._observer.close()
        if self._search is not None:
            self._session.forget_end(self._search)
            self._search.close()
            self._search = None


def _fastest(operation: Callable[[], object]) -> float:
    found = []
    for _ in range(PROBES):
        begin = time.perf_counter()
        operation()
        found.append(time.perf_counter() - begin)
    return min(found)


def _coarse(value: float, factor: int) -> float:
    """The nearest power of ``factor``."""
    power = 1.0
    while power * factor**0.5 < value:
        power *= factor
    while power > value * factor**0.5:
        power /= factor
    return power


def _plain(given: Any) -> dict[str, list[str]]:
    return {name: list(values) for name, values in given.items()}
