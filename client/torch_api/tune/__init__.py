"""Tunes wrapped models while they train: compares settings on interleaved steps, and keeps the best.

Rank 0 decides (``bagua.tuning.decision``), the coordinator proposes candidates and keeps what was found, and all ranks
change together, between the same two steps. Between two decisions nothing is exchanged: each says for how many steps
it holds. In an elastic job a decision is a unit of its own; members that change discard the comparison under way.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua.algorithms import Codec
from bagua.algorithms.plan import GRADIENT
from bagua.base.errors import ConfigError, ServiceError, UnavailableError
from bagua.proto.common_pb2 import TuneDimension, TuneRequest, TuneStudy, TuneTrial
from bagua.torch_api.comm.transfer import ReduceOp
from bagua.torch_api.job.connection import Record, Times
from bagua.torch_api.job.daemon import DaemonClient
from bagua.torch_api.job.session import Session
from bagua.torch_api.step.gradients import GradientHook
from bagua.torch_api.step.parameters import canonical
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.train.agreement import broadcast_json
from bagua.torch_api.train.bucket_layout import ModelBuckets
from bagua.torch_api.train.grouping import group_tensors
from bagua.torch_api.train.recorder import StepRecorder
from bagua.torch_api.train.wrapped import Wrapped
from bagua.tuning.comparison import Step
from bagua.tuning.decision import Decider, Phase, Setting, Trial, text
from bagua.tuning.network import Network, measured_network
from bagua.tuning.options import NO_CODEC, TuneOptions
from bagua.tuning.partition import as_text, best_cuts, from_text, in_order
from bagua.tuning.space import space_of

LOG = logging.getLogger("bagua")
PROBE_ELEMENTS = 1 << 18
PROBES = 3
OBSERVED_STEPS = 5
NEVER = 1 << 60
AGAIN_S = 5.0  # after a question without an answer
LAST_S = 2.0
AT_ONCE = 50  # Trials in one question
TRIALS_OF_A_GENERATION = 1_000


class Tuning:
    """Tuning of one model on this rank. ``options`` are those of rank 0: others follow it. Names of settings:

    - ``bucket_kib``: bytes of a bucket, as BAGUA_DEFAULT_BUCKET_SIZE; or
    - ``cuts``: how many parameters each bucket has, in the order of gradients;
    - ``chunk_kib``: KiB of a chunk between hosts;
    - ``codec``: of algorithms that have one, if the user lists codecs.
    """

    def __init__(
        self, options: TuneOptions, model: Wrapped, layout: ModelBuckets, runner: Runner, session: Session
    ) -> None:
        self._options = options
        self._model = model
        self._runner = runner
        self._session = session
        self._codec: Any = getattr(model.bagua_algorithm, "codec", None)  # that of the program
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
        if self._runner.everyone.nranks() < 2 and not self._session.elastic:  # in an elastic job others may come
            self._give_up("A rank alone has nobody to exchange gradients with.")
            return
        if not self._network:
            self._network, self._wire = self._runner.vote.together(self._probe)
        said: list[dict[str, Any]] = []

        def attempt() -> dict[str, Any]:
            everyone = self._runner.everyone
            # A repeat tells what was said: the decider goes on with each question.
            if everyone.rank() == 0 and not said:
                said.append(self._choose())
            found: dict[str, Any] = broadcast_json(said[0] if said else {}, everyone)
            return found

        decision = self._runner.vote.together(attempt)
        self._present = decision["present"]
        if decision["setting"] != self._applied and not self._apply(decision["setting"]):
            self._give_up("Buckets can't be cut anew now.")
            return
        self._applied = decision["setting"]
        self._due = self._passes + decision["steps"]
        self._steps.clear()

    def _choose(self) -> dict[str, Any]:
        decider = self._of_rank_0()
        generation, steps = self._session.membership.generation, self._steps
        if generation != self._generation:  # steps of other members are no measure
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
            # The search's last words go while there is a daemon.
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
            self._observer = Observer(self._model, self._session)  # on rank 0 alone: its figures decide
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
            return set(setting) != {"cuts"} or self._cuts(setting) != self._cuts({})  # other cuts than the defaults'
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
        given = {name: list(values) for name, values in self._options.given.items()}
        model = hashlib.sha256(canonical({**self._model.description, "space": given})).hexdigest()[:16]
        total = sum(tensor.nbytes for tensor in self._layout.in_order())
        with_codec = hasattr(self._model.bagua_algorithm, "codec")
        space = space_of(total, len(self._session.membership.hosts), self._options.given, with_codec=with_codec)
        return TuneStudy(
            model=model,
            network=hashlib.sha256(self._network.encode()).hexdigest()[:16],
            model_text=f"{type(self._model.bagua_algorithm).__name__.removesuffix('Impl')}, {total / 2**20:.1f} MiB",
            network_text=self._network,
            space=[TuneDimension(name=one.name, choices=one.choices, ordered=one.ordered) for one in space],
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
        # An all-reduce moves 2(h-1)/h of the bytes; the trip of a small one is its delay.
        rate = 2 * (hosts - 1) / hosts * large.nbytes * 8 / max(long - trip, 1e-6)
        rate, trip = broadcast_json([rate, trip], everyone)  # rank 0's figures: all name the network alike
        return measured_network(hosts, sizes, rate, trip)

    # Settings

    def _cuts(self, setting: Setting) -> list[list[str]]:
        """Names of parameters, bucket by bucket."""
        if "cuts" in setting:
            return from_text(setting["cuts"], self._layout.arrival)
        if "bucket_kib" in setting:
            return self._layout.names_of(group_tensors(self._layout.in_order(), int(setting["bucket_kib"]) << 10))
        return self._layout.names_of(self._layout.default_groups())

    def _apply(self, setting: Setting) -> bool:
        """Applies a setting. All ranks call it between the same two steps. False: buckets can't be cut anew now. Raises
        ValueError for a setting that does not fit this model.
        """
        cuts = self._cuts(setting)
        if not self._layout.may_be_cut or self._runner.on_device:
            return False
        self._prepare(setting)
        return self._model.recut(cuts)

    def _prepare(self, setting: Setting) -> None:
        """Sets what buckets take over that are made next."""
        self._runner.chunk_kib = int(setting.get("chunk_kib", "0"))
        codec = setting.get("codec")
        if hasattr(self._model.bagua_algorithm, "codec"):
            wanted = self._codec if codec is None else Codec.of(None if codec == NO_CODEC else codec)
            self._model.bagua_algorithm.codec = wanted

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
        self._prepare(self._applied)

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
    return min(found)  # the fastest: other times have pauses of the scheduler in them


class Observer:
    """Records some steps on rank 0, and computes from them the cut into buckets that should be best. From its making to
    ``close`` its hooks run beside those of the model."""

    def __init__(self, model: Wrapped, session: Session) -> None:
        # The model trains already: one step of warm-up.
        self._recorder = StepRecorder(model, session, len(session.membership.hosts), OBSERVED_STEPS, warm_up=1)
        self._handles: list[Any] = list(self._recorder.watch(model.module))
        note = self._recorder.noting(lambda _name, _parameter: None)  # the model's own hook does the rest
        for name, parameter in model.bagua_build_params():
            hook = GradientHook(note, name)  # one that changes no gradient: buckets go out as ever
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self.finished = self._recorder.also(_no_record)

    def partition(self, arrival: Sequence[str], network: Network, hosts: int) -> list[dict[str, str]]:
        """The cut with the least exposed communication in the model of ``bagua.tuning``, as a setting; none if no step
        was recorded, or if it is no cut of gradients in the order of ``arrival``."""
        if not self._recorder.done:
            return []
        profile = in_order(self._recorder.profile(), arrival)
        cuts = best_cuts(profile, network, hosts=hosts)
        if [name for names in cuts for name in names] != list(arrival):  # parameters without a gradient are in no cut
            return []
        return [{"cuts": as_text(cuts)}]

    def close(self) -> None:
        """Ends the recording."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.finished = _no_record


def _no_record(_: Sequence[Times], __: Any, ___: Any) -> None:
    """The model's own record does the rest."""


class RemoteSearch:
    """The search that the coordinator makes, asked through the daemon. ``daemon`` None: there is nobody to ask.

    Questions have a thread of their own: no training step waits for them. The first asks for the best known setting."""

    def __init__(self, daemon: DaemonClient | None, member: int, study: TuneStudy, generation: int = 1) -> None:
        """``generation``: in which this rank became the first. Trials of several first ranks have different numbers."""
        self._daemon = daemon
        self._member = member
        self._study = study
        self._lock = threading.Lock()  # guards what follows
        self._told: list[TuneTrial] = []
        # Trials of several first ranks must have different numbers.
        self._number = (generation - 1) * TRIALS_OF_A_GENERATION
        self._round = 0
        self._candidate: Setting | None = None
        self._exhausted = daemon is None
        self._asking = False
        self.best: Setting | None = None
        self._present: Setting = {}
        self._settled = False
        self._line = ""
        self._news = threading.Event()  # there is something to say, or to ask
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="bagua tuning")
        if daemon is not None:
            self._news.set()
            self._thread.start()

    def ask(self) -> Setting | None:
        with self._lock:
            found, self._candidate = self._candidate, None
            if found is not None:
                return found
            if self._exhausted:
                raise StopIteration
            if not self._asking:
                self._asking = True
                self._news.set()
            return None

    def tell(self, trial: Trial) -> None:
        """Reports a trial."""
        with self._lock:
            self._number += 1
            self._told.append(_message(trial, self._number, self._round))
        self._news.set()

    def anew(self) -> None:
        """Earlier trials say nothing any more."""
        with self._lock:
            self._round += 1
            self._candidate, self._settled, self.best = None, False, None
            self._exhausted = self._daemon is None

    def note(self, present: Setting, settled: bool, line: str) -> None:
        """Reports the present setting, for people and for later jobs."""
        with self._lock:
            self._present, self._settled, self._line = dict(present), settled, line
        self._news.set()

    def close(self) -> None:
        """Sends the last words, for at most 2 s."""
        self._closed.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(LAST_S)

    def _run(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()  # before the question: news that comes meanwhile is asked for once more
            last = self._closed.is_set()
            understood = self._exchange()
            if last:
                return
            if not understood:
                self._closed.wait(AGAIN_S)  # close ends the pause
                self._news.set()

    def _exchange(self) -> bool:
        """Sends what is new. False: it is to be tried again."""
        assert self._daemon is not None
        with self._lock:
            told, round, asking = self._told[:AT_ONCE], self._round, self._asking
            request = TuneRequest(
                job_id=self._daemon.job_id,
                rank=self._member,
                study=self._study,
                trials=told,
                round=round,
                ask=asking,
                present=self._present,
                settled=self._settled,
                line=self._line,
            )
        try:
            reply = self._daemon.tune(request)
        except ServiceError as error:
            if isinstance(error, UnavailableError):  # the coordinator is away: the same question again
                return False
            with self._lock:
                self._exhausted, self._asking = True, False
            return True
        with self._lock:
            del self._told[: len(told)]  # lines that came meanwhile stay
            if self._told:
                self._news.set()
            if round != self._round:  # the answer is about trials that count no more
                return True
            if reply.has_best and self.best is None and not round:
                self.best = dict(reply.best)
            if asking:
                self._asking = False
                self._exhausted = reply.exhausted or bool(reply.error)
                self._candidate = None if self._exhausted else dict(reply.candidate)
        return True


def _message(trial: Trial, number: int, round: int) -> TuneTrial:
    found, against = trial.candidate, trial.present
    return TuneTrial(
        number=number,
        round=round,
        setting=trial.setting,
        against=trial.against,
        ratio=trial.ratio,
        level=trial.level,
        seconds=found.seconds,
        spread=found.spread,
        exposed=found.exposed,
        against_seconds=against.seconds,
        against_spread=against.spread,
        against_exposed=against.exposed,
        steps=found.steps,
        state=trial.state,
        reason=trial.reason,
        step=trial.step,
    )
