"""Rows of the audit log on their way to the database."""

import asyncio
from types import SimpleNamespace

from bagua.base.errors import UnavailableError
from bagua.base.retention import Keep
from bagua.daemon.coordinator.rules.identity import ADMINISTRATOR
from bagua.daemon.coordinator.use.audit import Audit


async def written_by_two():
    """Two flush at once, as the writer and somebody who reads the log do; the first try fails."""
    written = []
    tries = 0

    async def write(work):
        nonlocal tries
        tries += 1
        await asyncio.sleep(0)
        if tries == 1:
            raise UnavailableError("not now")
        work(SimpleNamespace(add_audit=lambda rows: written.extend(row["target"] for row in rows)))

    worker = SimpleNamespace(write=write)
    clock = SimpleNamespace(wall=lambda: 1.0)
    audit = Audit(worker, clock, Keep())
    for target in "abc":
        audit.add(ADMINISTRATOR, "/bagua.v1.JobService/GetJob", target, "OK", "", "")
    first, second = await asyncio.gather(audit.flush(), audit.flush(), return_exceptions=True)
    assert isinstance(first, UnavailableError) and second is None
    return written


def test_each_row_is_written_once_and_none_is_lost():
    assert asyncio.run(written_by_two()) == ["a", "b", "c"]
