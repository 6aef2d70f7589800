"""Jobs as users see them. Thousands of ranks change host by host: those of a host are encoded again when they have
changed, not with every look at the job."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from bagua.daemon.coordinator.domain import JobRecord, RankRecord
from bagua.daemon.coordinator.translate import MAX_TAILS, job_message, rank_message
from bagua.proto import common_pb2, job_pb2

_JOBS = 4  # that were asked for last are kept


@dataclass(frozen=True)
class _Encoded:
    """The ranks of a host as a part of a serialized Job: parts that are concatenated are one message."""

    ranks: tuple[RankRecord, ...]
    wire: bytes
    tails: int  # characters

    @classmethod
    def of(cls, ranks: tuple[RankRecord, ...]) -> _Encoded:
        wire = job_pb2.Job(ranks=[rank_message(rank) for rank in ranks]).SerializeToString()
        return cls(ranks, wire, sum(len(rank.error_tail) for rank in ranks))


class Answers:
    """Makes them. ``encoded`` counts hosts whose ranks were encoded."""

    def __init__(self) -> None:
        self.encoded = 0
        self._known: OrderedDict[str, list[_Encoded]] = OrderedDict()

    def job(self, job: JobRecord, progress: common_pb2.Progress | None = None) -> job_pb2.Job:
        """A job with its ranks."""
        if job.state.terminal:  # nothing of it changes any more, and it is read anew each time
            self._known.pop(job.job_id, None)
            return job_message(job, progress)
        parts = self._parts(job)
        if sum(part.tails for part in parts) > MAX_TAILS:  # some have to go
            return job_message(job, progress)
        message = job_message(job, progress, with_ranks=False)
        message.MergeFromString(b"".join(part.wire for part in parts))
        return message

    def _parts(self, job: JobRecord) -> list[_Encoded]:
        known = self._known.pop(job.job_id, [])
        if len(known) != len(job.hosts):
            known = [_Encoded((), b"", 0)] * len(job.hosts)
        parts = []
        for part, host in zip(known, job.hosts, strict=True):
            if part.ranks is not host.ranks:
                part = _Encoded.of(host.ranks)
                self.encoded += 1
            parts.append(part)
        self._known[job.job_id] = parts
        if len(self._known) > _JOBS:
            self._known.popitem(last=False)
        return parts
