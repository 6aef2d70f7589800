"""Findings of a section of the GPU tests: checks that hold or not, and rows of figures; on disk from the first on.

A section that is stopped at its limit, or that crashes, keeps what it had found.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Findings:
    """Written by one section into one file: {"checks": [...], "tables": {title: [row, ...]}, "notes": [...],
    "finished": bool}."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = {"checks": [], "tables": {}, "notes": [], "finished": False}
        self._write()

    def check(self, name: str, ok: bool, detail: str = "") -> bool:
        """A statement that holds or does not."""
        self._found["checks"].append({"name": name, "ok": bool(ok), "detail": detail})
        print(f"{'ok' if ok else 'FAILED'}  {name}  {detail}", flush=True)
        self._write()
        return bool(ok)

    def row(self, table: str, **values: Any) -> None:
        """A row of figures; all rows of a table have the same columns."""
        self._found["tables"].setdefault(table, []).append(values)
        print(f"{table}: {values}", flush=True)
        self._write()

    def forget(self, table: str) -> None:
        """Rows that are to be told anew."""
        self._found["tables"].pop(table, None)

    def note(self, text: str) -> None:
        """Adds a note that a reader of the figures needs."""
        self._found["notes"].append(text)
        print(text, flush=True)
        self._write()

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """An exception of the block is a check that failed; the section goes on."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # pytest.fail of the rig is no Exception
            traceback.print_exc()
            self.check(name, False, f"{type(error).__name__}: {str(error)[-600:]}")

    def finish(self) -> None:
        """The section has come to its end."""
        self._found["finished"] = True
        self._write()

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return not all(check["ok"] for check in self._found["checks"])

    def _write(self) -> None:
        scratch = self._path.with_suffix(".new")
        scratch.write_text(json.dumps(self._found, indent=1))
        os.replace(scratch, self._path)


def section(name: str, work: Callable[[Findings, Any], None], options: Any) -> int:
    """The main program of a section; ``options.result``: where the findings go. Returns its exit code."""
    findings = Findings(Path(options.result))
    with findings.guarded(f"section {name}"):
        work(findings, options)
    findings.finish()
    return 1 if findings.failed else 0
