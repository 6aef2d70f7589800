"""A rank for the engine's tests: a process that joins an engine and runs one of the scripts in worker_scripts/.

Run as ``python worker.py '<json>'`` with {"core" (path), "socket", "token" (hex), "rank", "script", "args"}. It prints
one JSON line, its result. A line on its standard input lets a script go on where it asks (``pause``).
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from worker_scripts import elastic, faults
from worker_scripts.rank import Rank, core, say


def main():
    task = json.loads(sys.argv[1])
    try:
        rank = Rank(task)
        result = {**vars(elastic), **vars(faults)}[task["script"]](rank, **task["args"])
    except core.CoreError as error:
        say(error=str(error), at=time.monotonic())
        os._exit(3)
    say(**result)
    rank.native.close()


if __name__ == "__main__":
    main()
