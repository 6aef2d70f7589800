"""The search of one job, which its coordinator makes: questions go through the daemon, in a thread of their own. No
training step waits for them."""

from __future__ import annotations

import queue
import threading
import time

from bagua.base.errors import ServiceError, UnavailableError
from bagua.proto.common_pb2 import TuneRequest, TuneStudy, TuneTrial
from bagua.torch_api.join.daemon import DaemonClient
from bagua.tuning.decision import Setting, Trial

AGAIN_S = 5.0
"""After a question without an answer."""
LAST_S = 2.0
AT_ONCE = 50
"""Trials in one question."""
TRIALS_OF_A_GENERATION = 1_000


class RemoteSearch:
    """Begins with a question for the best known setting. ``daemon`` None: there is nobody to ask."""

    def __init__(self, daemon: DaemonClient | None, member: int, study: TuneStudy, generation: int = 1) -> None:
        """``generation``: in which this rank became the first. Trials of several first ranks have different numbers."""
        self._daemon = daemon
        self._member = member
        self._study = study
        self._lock = threading.Lock()  # guards what follows
        self._told: list[TuneTrial] = []
        self._number = (generation - 1) * TRIALS_OF_A_GENERATION
        self._round = 0
        self._candidate: Setting | None = None
        self._exhausted = daemon is None
        self._asking = False
        self.best: Setting | None = None
        self._present: Setting = {}
        self._settled = False
        self._line = ""
        self._questions: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="bagua tuning")
        if daemon is not None:
            self._questions.put(True)
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
                self._questions.put(True)
            return None

    def tell(self, trial: Trial) -> None:
        """Reports a trial."""
        with self._lock:
            self._number += 1
            self._told.append(_message(trial, self._number, self._round))
        self._questions.put(True)

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
        self._questions.put(True)

    def close(self) -> None:
        """The last words go out, for at most 2 s."""
        self._questions.put(False)
        if self._thread.is_alive():
            self._thread.join(LAST_S)

    def _run(self) -> None:
        while self._questions.get():
            while not self._questions.empty():  # one question says all
                if not self._questions.get():
                    self._exchange()
                    return
            if not self._exchange():
                time.sleep(AGAIN_S)
                self._questions.put(True)

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
            if isinstance(error, UnavailableError):
                return False
            with self._lock:
                self._exhausted, self._asking = True, False
            return True
        with self._lock:
            del self._told[: len(told)]
            if self._told:
                self._questions.put(True)
            if round != self._round:
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
