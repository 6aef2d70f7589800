"""A host: a process that holds engines, as a node daemon does; one JSON line in, one JSON line out.

``python host.py '<json>'`` with {"core" (path)}. Killing or stopping this process is what happens to a host whose
daemon is killed or stopped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bagua.csrc import build


class Host:
    """Engines by name: several jobs may be on one host."""

    def __init__(self, core: str) -> None:
        self.core = build._load(Path(core))
        self.engines: dict[str, Any] = {}

    def do_open(self, job: str, options: dict[str, Any]) -> dict[str, Any]:
        tokens = {int(rank): bytes.fromhex(token) for rank, token in options.pop("tokens").items()}
        key = bytes.fromhex(options.pop("job_key"))
        self.engines[job] = self.core.Engine(job_id=job, tokens=tokens, job_key=key, **options)
        return {"address": self.engines[job].address()}

    def do_peers(self, job: str, addresses: list[str]) -> dict[str, Any]:
        self.engines[job].set_peers(addresses)
        return {}

    def do_state(self, job: str, longer_than_s: float = 0.0) -> dict[str, Any]:
        engine = self.engines[job]
        return {
            "stats": engine.stats(),
            "error": engine.error(),
            "waiting": engine.waiting(longer_than_s),
            "events": engine.events(),
        }

    def do_close(self, job: str) -> dict[str, Any]:
        self.engines.pop(job).close()
        return {}


def main() -> None:
    host = Host(json.loads(sys.argv[1])["core"])
    print("{}", flush=True)
    while line := sys.stdin.readline():
        command = json.loads(line)
        try:
            answer = getattr(host, f"do_{command.pop('do')}")(**command)
        except host.core.CoreError as error:
            answer = {"refused": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
