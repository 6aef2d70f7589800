"""An engine in a process of its own, for tests that stop, cut off or kill a whole host.

Run as ``python host.py '<json>'`` with {"core", "socket", "tokens" (rank -> hex), "key" (hex), "host", "hosts",
"listen", "options"}. It prints JSON lines: first its address, then one answer for each line on its standard input:
``peers [...]``, ``waiting``, ``error`` (waits for one), ``closed`` (closes the engine and counts what is left).
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

from bagua.csrc import build


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def resources() -> dict[str, int]:
    """Descriptors and threads of this process, its resident memory in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def await_error(engine: Any) -> str:
    while not engine.error():
        select.select([engine.event_fd()], [], [], 5.0)
        engine.events()
    text: str = engine.error()
    return text


def main() -> None:
    task = json.loads(sys.argv[1])
    core = build._load(Path(task["core"]))
    before = resources()
    engine = core.Engine(
        job_id="faults", generation=1, host_index=task["host"], hosts=task["hosts"], data_socket=task["socket"],
        tokens={int(rank): bytes.fromhex(token) for rank, token in task["tokens"].items()},
        job_key=bytes.fromhex(task["key"]), listen=task["listen"], **task["options"],
    )  # fmt: skip
    say(address=engine.address())
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        if command == "peers":
            engine.set_peers(json.loads(rest))
            say()
        elif command == "waiting":
            say(text=engine.waiting(float(rest)))
        elif command == "error":
            say(text=await_error(engine), **resources())
        elif command == "closed":
            engine.close()
            del engine  # its descriptor of events outlives close()
            after = resources()
            say(fds=after["fds"] - before["fds"], threads=after["threads"] - before["threads"], bytes=after["bytes"])
            return


if __name__ == "__main__":
    main()
