#!/usr/bin/env python3
"""How long ``bagua run`` of a script that does nothing takes, with a warm core, and with a core that must be built.

python tests/bench/startup.py --rounds 5
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import harness


def run(script: Path, arguments: list[str], env: dict[str, str]) -> float:
    """Seconds of one ``bagua run``."""
    command = [sys.executable, "-P", "-m", "bagua.cli.main", "run", "--quiet", *arguments, str(script)]
    return (
        harness.timed(
            lambda: subprocess.run(command, env={**os.environ, **env}, check=True, timeout=harness.JOB_DEADLINE_S)
        )
        / 1e3
    )


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-cold", action="store_true", help="don't build a core")
    options = parser.parse_args()
    rounds = 1 if options.smoke else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "nothing.py"
        script.write_text("")
        run(script, [], {})  # whatever was cold is warm now
        shapes = {"1 x 1": [], "2 x 2": ["--nnodes", "2", "--nproc-per-node", "2"]}
        rows = []
        for shape, arguments in shapes.items():
            values = [run(script, arguments, {}) for _ in range(rounds)]
            rows.append({"what": f"warm, {shape} ranks", "s": round(statistics.median(values), 3)})
        if not (options.smoke or options.no_cold):
            cold = run(script, [], {"BAGUA_CACHE_DIR": str(Path(folder) / "cache")})
            rows.append({"what": "cold, 1 x 1 ranks", "s": round(cold, 3)})
    harness.finish(options, rows, "seconds, median")


if __name__ == "__main__":
    main()
