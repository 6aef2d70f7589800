"""Values of secrets that came with jobs: in this process's memory alone, until the job has ended.

They are never written, logged or shown. A coordinator that is started again has none of them. Nodes keep those of the
jobs that they run, so what runs goes on; a job that still waited for nodes fails in words, and has to be submitted
again.
"""

from __future__ import annotations

from collections.abc import Mapping

from bagua.base.errors import InvalidRequestError, NotFoundError, TooMuchError

MAX_BYTES = 256 << 10  # of one job
MAX_TOTAL_BYTES = 64 << 20
_MOST = 100  # variables of one job


class HeldSecrets:
    """Use from the event loop."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, str]] = {}
        self._coming: set[str] = set()  # jobs that are not written yet
        self._bytes = 0

    def hold(self, job_id: str, values: Mapping[str, str]) -> None:
        """Holds the secrets of a job that is submitted. Raises InvalidRequestError that names no value,
        TooMuchError.
        """
        size = _size(values)
        if len(values) > _MOST or size > MAX_BYTES:
            raise InvalidRequestError(f"secrets: at most {_MOST} of {MAX_BYTES >> 10} KiB together. [BG812]")
        for name, value in values.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise InvalidRequestError(f"secrets: {name[:100]!r} can't be a variable of an environment. [BG812]")
        if self._bytes + size > MAX_TOTAL_BYTES:
            raise TooMuchError(
                "secrets: those of other jobs fill the room for them. Wait until some have ended. [BG814]"
            )
        if values:
            self._values[job_id] = dict(values)
            self._coming.add(job_id)
            self._bytes += size

    def made(self, job_id: str) -> None:
        """Notes that the job is written."""
        self._coming.discard(job_id)

    def of(self, job_id: str) -> dict[str, str]:
        """Raises NotFoundError if this process does not have them."""
        if job_id not in self._values:
            raise NotFoundError(
                "the coordinator has its secrets no more: it was started again, or another one took the job. They are "
                "in memory alone. Submit the job again [BG905]"
            )
        return self._values[job_id]

    def forget(self, job_id: str) -> None:
        """Forgets the secrets of a job that has ended, or was not made."""
        self._coming.discard(job_id)
        self._bytes -= _size(self._values.pop(job_id, {}))

    def jobs(self) -> list[str]:
        """Returns the ids of written jobs that have secrets."""
        return [job_id for job_id in self._values if job_id not in self._coming]


def _size(values: Mapping[str, str]) -> int:
    return sum(len(name) + len(value.encode()) for name, value in values.items())
