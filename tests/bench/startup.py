#!/usr/bin/env python3
"""How long ``bagua run`` of a script that does nothing takes, with a warm core, and with a core that must be built.

python tests/bench/startup.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN_DEADLINE_S = 600.0


def run(script: Path, arguments: list[str], env: dict[str, str]) -> float:
    """Seconds of one ``bagua run``."""
    command = [sys.executable, "-P", "-m", "bagua.cli.main", "run", "--quiet", *arguments, str(script)]
    started = time.perf_counter()
    subprocess.run(command, env={**os.environ, **env}, check=True, timeout=RUN_DEADLINE_S)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-cold", action="store_true", help="don't build a core")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "nothing.py"
        script.write_text("")
        run(script, [], {})  # whatever was cold is warm now
        shapes = {"1 x 1": [], "2 x 2": ["--nnodes", "2", "--nproc-per-node", "2"]}
        rows = []
        for shape, arguments in shapes.items():
            values = [run(script, arguments, {}) for _ in range(options.rounds)]
            rows.append({"what": f"warm, {shape} ranks", "s": round(statistics.median(values), 3)})
        if not options.no_cold:
            cold = run(script, [], {"BAGUA_CACHE_DIR": str(Path(folder) / "cache")})
            rows.append({"what": "cold, 1 x 1 ranks", "s": round(cold, 3)})
    if options.output == "json":
        print(json.dumps({"unit": "seconds, median", "system": platform.platform(), "rows": rows}))
        return
    for row in rows:
        print(f"{row['what']:<24} {row['s']:.2f} s")


if __name__ == "__main__":
    main()
