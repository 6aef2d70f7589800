"""Keeps the trials of jobs that tune themselves, and answers their questions. Jobs with the same model on the same
network share a study."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from bagua.base.errors import ConflictError, InvalidRequestError, NotFoundError
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.identity import DEFAULT_NAMESPACE, EVERYWHERE
from bagua.daemon.coordinator.store import models as m
from bagua.daemon.coordinator.store.store import Transaction
from bagua.daemon.coordinator.store.worker import Worker
from bagua.daemon.coordinator.use.tuning_search import Tried, propose
from bagua.proto import common_pb2, job_pb2
from bagua.tuning.space import Dimension

_MOST_TEXT = 2_000
_MOST_SETTING = 64 << 10  # characters: a model's cuts are a number for each bucket
_MOST_TRIALS = 1_000  # of one study that are looked at, the newest
_MOST_CHOICES = 64


class Tuning:
    """Use from the event loop; the database and the search run in threads."""

    def __init__(self, worker: Worker, clock: ServiceClock) -> None:
        self._worker = worker
        self._clock = clock

    async def answer(self, request: common_pb2.TuneRequest) -> common_pb2.TuneReply:
        """Writes what it tells; then the best known setting, and a candidate if it asks for one. Raises
        InvalidRequestError."""
        _check(request)
        reply, trials = await self._worker.write(lambda tx: self._note(tx, request))
        if request.ask:  # not in the writer's thread: others wait for that
            found = await asyncio.to_thread(self._candidate, request, trials)
            reply.exhausted = found is None
            reply.candidate.update(found or {})
        return reply

    async def line(self, job_id: str) -> str:
        """Describes how far the tuning of this job is; empty if it does not tune itself."""
        return await self._worker.read(lambda tx: _line(tx, job_id))

    async def studies(self, namespace: str = EVERYWHERE) -> list[job_pb2.Tuning]:
        """Lists all studies of a namespace, the newest first, without trials."""
        return await self._worker.read(lambda tx: _studies(tx, namespace))

    async def study(self, prefix: str, namespace: str = EVERYWHERE) -> job_pb2.Tuning:
        """Returns a study with its trials. Raises NotFoundError, ConflictError."""
        return await self._worker.read(lambda tx: _study(tx, prefix, namespace))

    async def forget(self, prefix: str, all: bool, namespace: str = EVERYWHERE) -> list[str]:
        """Deletes studies, and returns their ids. Raises as ``study``."""
        return await self._worker.write(lambda tx: _forget(tx, prefix, all, namespace))

    # ---- in a thread

    def _note(self, tx: Transaction, request: common_pb2.TuneRequest) -> tuple[common_pb2.TuneReply, list[bytes]]:
        """Writes it; the best known setting until then, and the study's trials if they are needed."""
        now = self._clock.wall()
        job = tx.owned(request.job_id)
        namespace = DEFAULT_NAMESPACE if job is None else job.namespace
        study_id = study_number(request.study, namespace)
        before = tx.tune_study(study_id)
        settled = request.settled or (before is not None and before.settled and not request.trials)
        known = "" if before is None else str(before.best)
        best = _text(request.present) if request.settled else known
        tx.put_tune_study(
            {
                "study_id": study_id,
                "study": request.study.SerializeToString(deterministic=True),
                "settled": settled,
                "best": best,
                "line": request.line or ("" if before is None else before.line),
                "job_id": request.job_id,
                "updated_at": now,
                "namespace": namespace,
            }
        )
        for trial in request.trials:
            trial.job_id, trial.time = request.job_id, now
            tx.add_tune_trial(study_id, request.job_id, trial.number, now, trial.SerializeToString())
        trials = tx.tune_trials(study_id, _MOST_TRIALS) if request.ask else []
        reply = common_pb2.TuneReply()
        if known:  # a job has settled, whether or not another one has begun to search since
            reply.has_best = True
            reply.best.update(json.loads(known))
        return reply, trials

    def _candidate(self, request: common_pb2.TuneRequest, stored: Sequence[bytes]) -> dict[str, str] | None:
        trials = [common_pb2.TuneTrial.FromString(one) for one in stored]
        space = [Dimension(one.name, tuple(one.choices), one.ordered) for one in request.study.space]
        mine = [one for one in trials if one.job_id == request.job_id and one.round == request.round]
        tried = [Tried(dict(one.setting), one.level) for one in mine]
        return propose(space, tried, seed=int(study_number(request.study)[:6], 16))


def _line(tx: Transaction, job_id: str) -> str:
    query = sa.select(m.tune_studies.c.line).where(m.tune_studies.c.job_id == job_id)
    found = tx.rows(query.order_by(m.tune_studies.c.updated_at.desc()).limit(1))
    return str(found[0].line) if found else ""


def _studies(tx: Transaction, namespace: str) -> list[job_pb2.Tuning]:
    rows = tx.rows(sa.select(m.tune_studies).where(_of(namespace)).order_by(m.tune_studies.c.updated_at.desc()))
    counts = tx.rows(
        sa.select(m.tune_trials.c.study_id, sa.func.count().label("tried")).group_by(m.tune_trials.c.study_id)
    )
    tried = {row.study_id: int(row.tried) for row in counts}
    return [_message(row, tried.get(row.study_id, 0)) for row in rows]


def _study(tx: Transaction, prefix: str, namespace: str) -> job_pb2.Tuning:
    row = _find(tx, prefix, namespace)
    trials = [common_pb2.TuneTrial.FromString(one) for one in tx.tune_trials(row.study_id, _MOST_TRIALS)]
    found = _message(row, len(trials))
    found.trials.extend(trials)
    return found


def _forget(tx: Transaction, prefix: str, all: bool, namespace: str) -> list[str]:
    if all:
        ids = [row.study_id for row in tx.rows(sa.select(m.tune_studies.c.study_id).where(_of(namespace)))]
    else:
        ids = [_find(tx, prefix, namespace).study_id]
    tx.forget_tune_studies(ids)
    return ids


def study_number(study: common_pb2.TuneStudy, namespace: str = DEFAULT_NAMESPACE) -> str:
    """The id of a study: a digest of both fingerprints. Namespaces share none."""
    own = "" if namespace == DEFAULT_NAMESPACE else f"\n{namespace}"
    return hashlib.sha256(f"{study.model}\n{study.network}{own}".encode()).hexdigest()[:12]


def _of(namespace: str) -> sa.ColumnElement[bool]:
    return sa.true() if namespace == EVERYWHERE else m.tune_studies.c.namespace == namespace


def _find(tx: Transaction, prefix: str, namespace: str) -> sa.Row[tuple[object, ...]]:
    plausible = prefix.isalnum() and len(prefix) <= 64
    query = sa.select(m.tune_studies).where(m.tune_studies.c.study_id.startswith(prefix), _of(namespace))
    rows = tx.rows(query) if plausible else []
    if not rows:
        raise NotFoundError(f"Nothing was tuned under {prefix[:64]!r}. `bagua tune list` shows what was. [BG810]")
    if len(rows) > 1:
        ids = ", ".join(sorted(row.study_id for row in rows))
        raise ConflictError(f"{prefix} may be {ids}: write more of it. [BG811]")
    return rows[0]


def _message(row: sa.Row[tuple[object, ...]], tried: int) -> job_pb2.Tuning:
    return job_pb2.Tuning(
        id=row.study_id,
        study=common_pb2.TuneStudy.FromString(row.study),
        settled=row.settled,
        best=json.loads(row.best or "{}"),
        line=row.line,
        job_id=row.job_id,
        updated_at=row.updated_at,
        tried=tried,
    )


def _text(setting: Mapping[str, str]) -> str:
    return json.dumps(dict(setting), sort_keys=True)


def _check(request: common_pb2.TuneRequest) -> None:
    """Raises InvalidRequestError for what is too large, or can't be."""
    study = request.study
    texts = [study.model, study.network, study.model_text, study.network_text, request.line]
    if not (study.model and study.network) or max(map(len, texts)) > _MOST_TEXT or any("\0" in one for one in texts):
        raise InvalidRequestError(
            f"A study needs a model and a network, and texts have at most {_MOST_TEXT} characters. [BG820]"
        )
    if len(study.space) > 16 or any(not 1 <= len(one.choices) <= _MOST_CHOICES for one in study.space):
        raise InvalidRequestError(f"A space has at most 16 settings, with 1 to {_MOST_CHOICES} values each. [BG820]")
    if len(request.trials) > _MOST_CHOICES:
        raise InvalidRequestError(f"At most {_MOST_CHOICES} trials in one request. [BG820]")
    settings = [request.present, *(one.setting for one in request.trials), *(one.against for one in request.trials)]
    if any(sum(len(name) + len(value) for name, value in one.items()) > _MOST_SETTING for one in settings):
        raise InvalidRequestError(f"A setting has at most {_MOST_SETTING} characters. [BG820]")
    if any(len(one.reason) > _MOST_TEXT or len(one.state) > 64 for one in request.trials):
        raise InvalidRequestError(f"Reasons have at most {_MOST_TEXT} characters. [BG820]")
