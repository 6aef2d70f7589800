"""Findings of a section of the GPU tests: checks that hold or not, and rows of figures; on disk from the first on.

A section that is stopped at its limit, or that crashes, keeps what it had found.
"""

import argparse
import json
import os
import traceback
from contextlib import contextmanager
from pathlib import Path


class Findings:
    """Written by one section into one file: {"checks": [...], "tables": {title: [row, ...]}, "notes": [...],
    "finished": bool}."""

    def __init__(self, path):
        self._path = path
        self._found = {"checks": [], "tables": {}, "notes": [], "finished": False}
        self._write()

    def check(self, name, ok, detail=""):
        self._found["checks"].append({"name": name, "ok": bool(ok), "detail": detail})
        print(f"{'ok' if ok else 'FAILED'}  {name}  {detail}", flush=True)
        self._write()
        return bool(ok)

    def row(self, table, **values):
        """A row of figures; all rows of a table have the same columns."""
        self._found["tables"].setdefault(table, []).append(values)
        print(f"{table}: {values}", flush=True)
        self._write()

    def note(self, text):
        """Adds a sentence for readers of the figures."""
        self._found["notes"].append(text)
        print(text, flush=True)
        self._write()

    @contextmanager
    def guarded(self, name):
        """An exception of the block is a check that failed; the section goes on."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # pytest.fail of the rig is no Exception
            traceback.print_exc()
            self.check(name, False, f"{type(error).__name__}: {str(error)[-600:]}")

    def finish(self):
        self._found["finished"] = True
        self._write()

    @property
    def failed(self):
        return not all(check["ok"] for check in self._found["checks"])

    def _write(self):
        scratch = self._path.with_suffix(".new")
        scratch.write_text(json.dumps(self._found, indent=1))
        os.replace(scratch, self._path)


def section(name, work, description, *flags):
    """The main program of a section: ``work(findings, options)``. Returns its exit code. Needs no torch."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--result", type=Path, required=True, help="file for the findings")
    parser.add_argument("--seconds", type=float, default=60.0, help="time that it has")
    parser.add_argument("--device", choices=["cuda", "fake", "cpu"], default="cuda", help="others: rehearsals")
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    findings = Findings(options.result)
    with findings.guarded(f"section {name}"):
        work(findings, options)
    findings.finish()
    return 1 if findings.failed else 0
