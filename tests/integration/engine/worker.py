"""A rank for the engine's tests: a process that joins an engine and runs one of the scripts in worker_scripts/.

Run as ``python worker.py '<json>'`` with {"core" (path), "socket", "token" (hex), "rank", "world", "script", "args"}.
It prints one JSON line, its result. A line on its standard input lets a script go on where it asks (``pause``).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from worker_scripts.elastic import fenced, flags, through
from worker_scripts.encoded import compressed, residuals, traffic
from worker_scripts.faults import call, early, endless, forked, hang, interrupted, leave, many, ones, refused, segments
from worker_scripts.kinds import digest, verify
from worker_scripts.planned import boundaries
from worker_scripts.rank import Rank, core, say

SCRIPTS: dict[str, Callable[..., dict[str, Any]]] = {
    script.__name__: script
    for script in (
        verify,
        digest,
        compressed,
        traffic,
        residuals,
        call,
        endless,
        hang,
        leave,
        early,
        interrupted,
        segments,
        refused,
        forked,
        many,
        ones,
        through,
        fenced,
        flags,
        boundaries,
    )
}


def main() -> None:
    task = json.loads(sys.argv[1])
    arguments = {"task": task} if task["script"] == "refused" else task["args"]
    try:
        rank = Rank(task)
        result = SCRIPTS[task["script"]](rank, **arguments)
    except core.CoreError as error:
        say(error=str(error), at=time.monotonic())
        os._exit(3)
    say(**result)
    rank.native.close()


if __name__ == "__main__":
    main()
